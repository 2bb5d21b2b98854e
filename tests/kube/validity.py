"""Whether Kubernetes takes manifests: by its own schemas, and for custom resources by those in ``schemas`` and the
rules that schemas cannot say.
"""

from collections.abc import Sequence

from tests.kube.custom_kinds import validator
from tests.kube.custom_rules import complaints
from tests.kube.helm import Helm, Manifest
from tests.kube.manifests import name


def problems(helm: Helm, manifests: Sequence[Manifest], version: str) -> dict[str, str]:
    """Why which of ``manifests`` is refused; a kind without a schema is."""
    found = {}
    for manifest, verdict in zip(manifests, helm.validate(manifests, version), strict=True):
        problem = custom_problem(manifest) if verdict == "unknown" else verdict
        if problem is not None:
            found[name(manifest)] = problem
    return found


def custom_problem(manifest: Manifest) -> str | None:
    """Why a custom resource is refused, or None."""
    schema = validator(manifest["apiVersion"], manifest["kind"])
    if schema is None:
        return f"no schema for {manifest['kind']} of {manifest['apiVersion']}"
    for error in schema.iter_errors(manifest):
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return next(complaints(manifest["kind"], manifest["spec"]), None)
