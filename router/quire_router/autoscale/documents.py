"""What ``external.metrics.k8s.io/v1beta1`` answers, in the order in which the Kubernetes API writes it. Does no I/O."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from quire_router.autoscale.load import METRIC

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
GROUP_VERSION: Final = f"{GROUP}/{VERSION}"
LABEL: Final = "model"
"""By which the values of the metric are told apart."""

_NAMES: Final = {"groupVersion": GROUP_VERSION, "version": VERSION}
_GROUP: Final = {"name": GROUP, "versions": [_NAMES], "preferredVersion": _NAMES}
_SUFFIXES: Final = ("", "k", "M", "G")
_REASONS: Final = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.UNAUTHORIZED: "Unauthorized",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalError",
}


def to_json(document: object) -> bytes:
    """Compact JSON in ASCII, and the end of a line, as the Kubernetes API writes it."""
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def api_groups() -> dict[str, Any]:
    """Which groups there are."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_GROUP]}


def api_group() -> dict[str, Any]:
    """Which versions of the group there are."""
    return {"kind": "APIGroup", "apiVersion": "v1", **_GROUP}


def api_resources() -> dict[str, Any]:
    """Which metrics there are."""
    resource = {
        "name": METRIC,
        "singularName": "",
        "namespaced": True,
        "kind": "ExternalMetricValueList",
        "verbs": ["get"],
    }
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": [resource]}


def metric_values(load: Iterable[tuple[Mapping[str, str], int]], now: datetime) -> dict[str, Any]:
    """The metric's values: their labels, and how many requests each is."""
    timestamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items = [
        {
            "metricName": METRIC,
            "metricLabels": dict(labels),
            "timestamp": timestamp,
            "window": 0,
            "value": quantity(requests),
        }
        for labels, requests in load
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": items}


def quantity(number: int) -> str:
    """A count as a canonical Kubernetes quantity: thousands that nothing is left of are told by a suffix."""
    power = 0
    while number and number % 1000 == 0 and power + 1 < len(_SUFFIXES):
        number, power = number // 1000, power + 1
    return f"{number}{_SUFFIXES[power]}"


def failure(status: HTTPStatus, message: str) -> dict[str, Any]:
    """Why there is no answer."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS[status],
        "code": int(status),
    }
