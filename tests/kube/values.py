"""The chart's own files, as tests need them: example values, the schema, and which versions of Kubernetes it is for."""

from functools import cache
from typing import Any

import yaml

from tests.kube.helm import CHART

VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
"""Kubernetes' versions that the chart is for."""
EXAMPLES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))

NEEDS = {
    "endpoint-picker": ["inference.networking.k8s.io/v1"],
    "gateway": ["gateway.networking.k8s.io/v1", "cert-manager.io/v1"],
    "keda": ["keda.sh/v1alpha1"],
    "tls": ["keda.sh/v1alpha1"],
    "two-models": ["monitoring.coreos.com/v1"],
    "nodes": ["leaderworkerset.x-k8s.io/v1", "keda.sh/v1alpha1", "cert-manager.io/v1"],
}
"""The API versions that an example needs besides those that every cluster has."""
NEW = {"canary", "eks-production", "endpoint-picker", "nodes"}
"""Examples of what the previous version of the chart cannot do: their releases begin with this one."""
EVERY_POD = ("cpu-demo", "nodes")
"""Examples that together have every kind of pod that the chart makes."""


@cache
def _text(name: str) -> str:
    return (CHART / "ci" / f"{name}-values.yaml").read_text()


def example_values(name: str) -> dict[str, Any]:
    """The values of ``ci/<name>-values.yaml``, fresh at each call."""
    values: dict[str, Any] = yaml.safe_load(_text(name)) or {}
    return values


def with_values(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``values`` with others at dotted paths, of which each dot is written as two underscores."""
    for path, value in changes.items():
        part = values
        *folders, last = path.split("__")
        for folder in folders:
            part = part.setdefault(folder, {})
        part[last] = value
    return values


def over(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``defaults`` with ``values`` in their place, as Helm puts them together."""
    merged = {**defaults, **values}
    for key in defaults.keys() & values.keys():
        if isinstance(defaults[key], dict) and isinstance(values[key], dict):
            merged[key] = over(defaults[key], values[key])
    return merged
