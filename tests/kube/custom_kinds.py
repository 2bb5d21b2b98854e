"""The kinds that Gateway API, KEDA, prometheus-operator and cert-manager add to a cluster, as ``schemas`` has them."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

SCHEMAS = Path(__file__).with_name("schemas")


def _kinds() -> Iterator[tuple[str, str]]:
    for folder in sorted(path for path in SCHEMAS.iterdir() if path.is_dir()):
        yield folder.name.replace("_", "/"), " ".join(sorted(file.stem for file in folder.glob("*.json")))


CUSTOM_KINDS = dict(_kinds())
"""The kinds, one space between them, by API version. All of them belong to a namespace."""
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object", "required": ["name"],
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": TEXTS, "annotations": TEXTS},
}  # fmt: skip


def specification(api_version: str, kind: str) -> Schema | None:
    """The schema of ``spec``, as its CustomResourceDefinition would have it, or None for an unknown kind."""
    file = SCHEMAS / api_version.replace("/", "_") / f"{kind}.json"
    return json.loads(file.read_text()) if file.is_file() else None


@functools.cache
def validator(api_version: str, kind: str) -> Draft202012Validator | None:
    """Refuses what the schema does not name, as ``kubectl --validate=strict`` does; None for an unknown kind."""
    spec = specification(api_version, kind)
    if spec is None:
        return None
    properties = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": METADATA, "spec": spec}
    return Draft202012Validator(_strict({"type": "object", "required": list(properties), "properties": properties}))


def _strict(schema: Schema) -> Schema:
    """The schema without room for fields that it does not name."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        result["additionalProperties"] = False
    elif "additionalProperties" in schema:
        result["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = _strict(schema["items"])
    return result


def definition(api_version: str, kind: str, plural: str) -> Schema:
    """The least CustomResourceDefinition with which an API server takes objects of the kind, and checks them."""
    group, version = api_version.split("/")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {
        "type": "object", "required": ["spec"],
        "properties": {"spec": _structural(specification(api_version, kind) or anything), "status": anything},
    }  # fmt: skip
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Names under k8s.io are refused without it.
            "annotations": {"api-approved.kubernetes.io": "unapproved, only for tests"},
        },
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [served]},
    }


def _structural(schema: Schema) -> Schema:
    """The schema in the form that definitions must have: one type in each place, or one of Kubernetes' own words."""
    if not schema:
        return {"x-kubernetes-preserve-unknown-fields": True}
    result = {name: value for name, value in schema.items() if name != "uniqueItems"}
    if isinstance(schema["type"], list):
        del result["type"]
        result["x-kubernetes-int-or-string"] = True
    if "properties" in schema:
        result["properties"] = {name: _structural(each) for name, each in schema["properties"].items()}
    for part in ("items", "additionalProperties"):
        if part in schema:
            result[part] = _structural(schema[part])
    return result
