"""Whether Kubernetes takes manifests: by its own schemas, and for custom resources by those in ``schemas``."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.kube.helm import Helm, Manifest
from tests.kube.manifests import name

SCHEMAS = Path(__file__).with_name("schemas")
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object", "required": ["name"], "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": TEXTS, "annotations": TEXTS},
}  # fmt: skip


@functools.cache
def _schemas(api_version: str) -> dict[str, Any]:
    path = SCHEMAS / f"{api_version.replace('/', '_')}.yaml"
    schemas: dict[str, Any] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return schemas


def problems(helm: Helm, manifests: Sequence[Manifest], version: str) -> dict[str, str]:
    """Why which of ``manifests`` is refused; a kind without a schema is."""
    found = {}
    for manifest, verdict in zip(manifests, helm.validate(manifests, version), strict=True):
        problem = _custom_problem(manifest) if verdict == "unknown" else verdict
        if problem is not None:
            found[name(manifest)] = problem
    return found


def _custom_problem(manifest: Manifest) -> str | None:
    schemas = _schemas(manifest["apiVersion"])
    if manifest["kind"] not in schemas:
        return f"no schema for {manifest['kind']} of {manifest['apiVersion']}"
    schema = {
        "type": "object", "required": ["apiVersion", "kind", "metadata", "spec"], "additionalProperties": False,
        "properties": {
            "apiVersion": {}, "kind": {}, "metadata": {"$ref": "#/$defs/metadata"}, "spec": schemas[manifest["kind"]],
        },
        "$defs": {**schemas.get("$defs", {}), "metadata": METADATA},
    }  # fmt: skip
    for error in Draft202012Validator(schema).iter_errors(manifest):
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return None
