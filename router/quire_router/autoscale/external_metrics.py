"""The API ``external.metrics.k8s.io/v1beta1`` for HorizontalPodAutoscalers, as an ASGI application.

Its only client is the Kubernetes API server, which has authenticated and authorised the caller, and sends the client
certificate of its front proxy. All others get only the health paths. It always answers in JSON, whatever the ``Accept``
header says; documents have their fields in the order in which the Kubernetes API writes them. Label selectors are those
of ``labelSelector``, such as ``model in (a, b), !spare``.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

from quire_proto.errors import ErrorCode, QuireError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_router.api.rest.http import to_json
from quire_router.autoscale.local_load import METRIC, Load
from quire_router.autoscale.proxy_auth import FrontProxy, peer_of

log = logging.getLogger(__name__)

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
GROUP_VERSION: Final = f"{GROUP}/{VERSION}"
LABEL: Final = "model"
"""The label of the metric's values."""

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
MAX_SELECTOR = 4096  # characters
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_MAX_PREFIX = 253
_TOKEN = re.compile(r"\s*(==|!=|[=!<>(),]|[^\s=!<>(),]+)")
_SIGNS = ("=", "==", "!=", "<", ">", "!", "(", ")", ",")
_HEALTH = ("/healthz", "/livez", "/readyz")
_HEADERS = {"cache-control": "no-cache, private"}
_LAST_HEADERS = {**_HEADERS, "connection": "close"}
_MAX_PARAMETERS = 32


class _StatusError(Exception):
    """A request that is answered with an error Status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _UnauthenticatedError(_StatusError):
    """A request that is not from the front proxy. Its connection ends with the response: it may have been made before
    the authorities changed, and would be refused for as long as it is kept.
    """


class ExternalMetrics:
    """Serves the ``load`` of the models in ``labels``, each under its label, in ``namespace`` only and to ``proxy``
    only.
    """

    def __init__(self, load: Load, labels: Mapping[str, str], namespace: str, proxy: FrontProxy) -> None:
        self._load = load
        self._labels = dict(labels)
        self._proxy = proxy
        self._path = f"/apis/{GROUP_VERSION}/namespaces/{namespace}/{METRIC}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        headers = _HEADERS
        try:
            status, document = HTTPStatus.OK, await self._handle(scope)
        except _StatusError as error:
            status, document = error.status, failure(error.status, error.message)
            headers = _LAST_HEADERS if isinstance(error, _UnauthenticatedError) else _HEADERS
        except Exception:
            log.exception("a request for the load failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            document = failure(status, "The request failed because of an error inside the service.")
        body = to_json(document) + b"\n"  # as the Kubernetes API ends it
        await Response(body, status, headers, "application/json")(scope, receive, send)

    async def _handle(self, scope: Scope) -> Mapping[str, object]:
        path, method = str(scope["path"]), str(scope["method"])
        if path in _HEALTH and method == "GET":
            return self._health(path)
        self._authenticate(scope)
        if method != "GET":
            raise _StatusError(HTTPStatus.METHOD_NOT_ALLOWED, "The server does not allow this method on this resource.")
        if path in _DISCOVERY:
            return _DISCOVERY[path]
        if path == self._path:
            return await self._values(_parameters(scope))
        raise _StatusError(HTTPStatus.NOT_FOUND, "The server could not find the requested resource.")

    def _health(self, path: str) -> Mapping[str, object]:
        if path == "/readyz" and not self._proxy.is_known:
            raise _StatusError(HTTPStatus.SERVICE_UNAVAILABLE, "The cluster has not told yet who its front proxy is.")
        return {"status": "ok"}

    def _authenticate(self, scope: Scope) -> None:
        if not self._proxy.is_known:
            raise _UnauthenticatedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "The cluster has not told yet who its front proxy is."
            )
        peer = peer_of(scope)
        if not peer.certificate:
            raise _UnauthenticatedError(HTTPStatus.UNAUTHORIZED, "Only the cluster's front proxy is answered.")
        if not self._proxy.allows(peer):
            raise _UnauthenticatedError(HTTPStatus.FORBIDDEN, "This certificate is not of the cluster's front proxy.")

    async def _values(self, parameters: Mapping[str, str]) -> Mapping[str, object]:
        if parameters.get("watch", "false") not in ("false", "0", ""):
            raise _StatusError(HTTPStatus.METHOD_NOT_ALLOWED, "This resource cannot be watched.")
        try:
            selector = Selector.parse(parameters.get("labelSelector", ""))
        except SelectorError as error:
            raise _StatusError(HTTPStatus.BAD_REQUEST, f"The label selector cannot be read: {error}.") from None
        selected = {model: label for model, label in self._labels.items() if selector.matches({LABEL: label})}
        if not selected:  # an empty list would be an error in the autoscaler, and one without an explanation
            raise _StatusError(
                HTTPStatus.NOT_FOUND, "The label selector selects none of the models that are configured."
            )
        try:
            load = await self._load.read()
        except QuireError as error:
            raise _StatusError(_status(error), error.message) from error
        return metric_values((({LABEL: label}, load[model]) for model, label in selected.items()), datetime.now(UTC))


def _status(error: QuireError) -> HTTPStatus:
    known = error.code is ErrorCode.UNAVAILABLE
    return HTTPStatus.SERVICE_UNAVAILABLE if known else HTTPStatus.INTERNAL_SERVER_ERROR


def _parameters(scope: Scope) -> dict[str, str]:
    """The query parameters; the first of several with one name counts, as in the Kubernetes API."""
    query = bytes(scope["query_string"]).decode("ascii", "replace")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise _StatusError(HTTPStatus.BAD_REQUEST, f"A request has at most {_MAX_PARAMETERS} parameters.") from None
    return dict(reversed(pairs))


def api_groups() -> dict[str, Any]:
    """The list of API groups."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_GROUP]}


def api_group() -> dict[str, Any]:
    """The versions of the group."""
    return {"kind": "APIGroup", "apiVersion": "v1", **_GROUP}


def api_resources() -> dict[str, Any]:
    """The list of metrics."""
    resource = {
        "name": METRIC,
        "singularName": "",
        "namespaced": True,
        "kind": "ExternalMetricValueList",
        "verbs": ["get"],
    }
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": [resource]}


def metric_values(load: Iterable[tuple[Mapping[str, str], int]], now: datetime) -> dict[str, Any]:
    """The metric's values: pairs of labels and number of requests."""
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
    """A count as a canonical Kubernetes quantity: whole thousands have a suffix."""
    power = 0
    while number and number % 1000 == 0 and power + 1 < len(_SUFFIXES):
        number, power = number // 1000, power + 1
    return f"{number}{_SUFFIXES[power]}"


def failure(status: HTTPStatus, message: str) -> dict[str, Any]:
    """The Status document of an error."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS[status],
        "code": int(status),
    }


_DISCOVERY = {
    "/apis": api_groups(),
    f"/apis/{GROUP}": api_group(),
    f"/apis/{GROUP_VERSION}": api_resources(),
}


class SelectorError(ValueError):
    """The text is no label selector. The message is one sentence without its full stop."""


class Operator(Enum):
    """The operator of a requirement."""

    EXISTS = "exists"
    DOES_NOT_EXIST = "!"
    IN = "in"
    NOT_IN = "notin"
    GREATER = ">"
    LESS = "<"


_SET_OPERATORS = {"in": Operator.IN, "notin": Operator.NOT_IN}
_SIGN_OPERATORS = {
    "=": Operator.IN,
    "==": Operator.IN,
    "!=": Operator.NOT_IN,
    ">": Operator.GREATER,
    "<": Operator.LESS,
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on the label ``key``."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels meet it. A missing label is in no set, and is no number."""
        value = labels.get(self.key)
        if self.operator is Operator.EXISTS:
            return value is not None
        if self.operator is Operator.DOES_NOT_EXIST:
            return value is None
        if self.operator is Operator.IN:
            return value in self.values
        if self.operator is Operator.NOT_IN:
            return value not in self.values
        return value is not None and self._compares(value)

    def _compares(self, value: str) -> bool:
        number, (bound,) = _integer(value), map(_integer, self.values)
        if number is None or bound is None:
            return False
        return number > bound if self.operator is Operator.GREATER else number < bound


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector: all of its requirements have to be met; without any, everything is selected."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels are selected."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    @classmethod
    def parse(cls, text: str) -> "Selector":
        """The selector in ``text``. Raises ``SelectorError``."""
        if len(text) > MAX_SELECTOR:
            raise SelectorError(f"a selector has at most {MAX_SELECTOR} characters")
        if not text.strip():
            return cls()
        return cls(tuple(_Parser(text).requirements()))


def is_label_value(value: str) -> bool:
    """Whether a Kubernetes label may have this value."""
    return not value or _NAME.fullmatch(value) is not None


class _Parser:
    """Parses requirements, token by token."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        self._position = 0

    def requirements(self) -> list[Requirement]:
        found = [self._requirement()]
        while self._take() == ",":
            found.append(self._requirement())
        self._position -= 1
        self._expect("")
        return found

    def _requirement(self) -> Requirement:
        if self._peek() == "!":
            self._take()
            return Requirement(self._key(), Operator.DOES_NOT_EXIST)
        key = self._key()
        if self._peek() in (",", ""):
            return Requirement(key, Operator.EXISTS)
        return self._comparison(key, self._take())

    def _comparison(self, key: str, word: str) -> Requirement:
        if word in _SET_OPERATORS:
            return Requirement(key, _SET_OPERATORS[word], self._set())
        if word not in _SIGN_OPERATORS:
            raise SelectorError(f"{word!r} is not an operator")
        operator, value = _SIGN_OPERATORS[word], self._value()
        if operator in (Operator.GREATER, Operator.LESS) and _integer(value) is None:
            raise SelectorError(f"{value!r} is not an integer")
        return Requirement(key, operator, frozenset([value]))

    def _set(self) -> frozenset[str]:
        self._expect("(")
        values = [self._value()]
        while (sign := self._take()) == ",":
            values.append(self._value())
        if sign != ")":
            raise SelectorError("a set of values ends with ')'")
        return frozenset(values)

    def _value(self) -> str:
        """A value, which may be empty."""
        if self._peek() in ("", ",", ")"):
            return ""
        value = self._take()
        if value in _SIGNS or not is_label_value(value):
            raise SelectorError(f"{value!r} cannot be the value of a label")
        return value

    def _key(self) -> str:
        key = self._take()
        prefix, slash, name = key.rpartition("/")
        if not _NAME.fullmatch(name) or (slash and not (len(prefix) <= _MAX_PREFIX and _PREFIX.fullmatch(prefix))):
            raise SelectorError(f"{key!r} cannot be the name of a label")
        return key

    def _expect(self, sign: str) -> None:
        found = self._take()
        if found != sign:
            raise SelectorError(f"{found!r} stands where {sign!r} should" if sign else f"{found!r} is one too many")

    def _peek(self) -> str:
        """The next token; empty at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._position += 1
        return token


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
