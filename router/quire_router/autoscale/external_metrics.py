"""The API ``external.metrics.k8s.io/v1beta1``, which HorizontalPodAutoscalers ask, as an ASGI application.

The Kubernetes API server is its only client: it has checked who asks and whether they may, and shows the certificate of
its front proxy. Everyone else gets no further than health. Always answers in JSON, also where the client would rather
have something else.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import parse_qsl

from quire_proto.errors import ErrorCode, QuireError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_router.autoscale.documents import (
    GROUP,
    GROUP_VERSION,
    LABEL,
    api_group,
    api_groups,
    api_resources,
    failure,
    metric_values,
    to_json,
)
from quire_router.autoscale.front_proxy import FrontProxy
from quire_router.autoscale.load import METRIC, Load
from quire_router.autoscale.peer import peer_of
from quire_router.autoscale.selector import Selector, SelectorError

log = logging.getLogger(__name__)

_HEALTH = ("/healthz", "/livez", "/readyz")
_DISCOVERY = {
    "/apis": api_groups(),
    f"/apis/{GROUP}": api_group(),
    f"/apis/{GROUP_VERSION}": api_resources(),
}
_HEADERS = {"cache-control": "no-cache, private"}
_LAST_HEADERS = {**_HEADERS, "connection": "close"}
_MAX_PARAMETERS = 32


class _RefusalError(Exception):
    """A request that is answered with a Status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _StrangerError(_RefusalError):
    """A request of somebody who is not known as the front proxy, whose connection ends with the answer: it may have
    begun before others counted than now, and would be refused for as long as it is kept.
    """


class ExternalMetrics:
    """Tells the ``load`` of the models in ``labels``, each as the label that is given for it, in ``namespace`` and no
    other. ``proxy`` is who may ask.
    """

    def __init__(self, load: Load, labels: Mapping[str, str], namespace: str, proxy: FrontProxy) -> None:
        self._load = load
        self._labels = dict(labels)
        self._proxy = proxy
        self._path = f"/apis/{GROUP_VERSION}/namespaces/{namespace}/{METRIC}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        headers = _HEADERS
        try:
            status, document = HTTPStatus.OK, await self._answer(scope)
        except _RefusalError as refusal:
            status, document = refusal.status, failure(refusal.status, refusal.message)
            headers = _LAST_HEADERS if isinstance(refusal, _StrangerError) else _HEADERS
        except Exception:
            log.exception("a request for the load failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            document = failure(status, "The request failed because of an error inside the service.")
        await Response(to_json(document), status, headers, "application/json")(scope, receive, send)

    async def _answer(self, scope: Scope) -> Mapping[str, object]:
        path, method = str(scope["path"]), str(scope["method"])
        if path in _HEALTH and method == "GET":
            return self._health(path)
        self._authenticate(scope)
        if method != "GET":
            raise _RefusalError(
                HTTPStatus.METHOD_NOT_ALLOWED, "The server does not allow this method on this resource."
            )
        if path in _DISCOVERY:
            return _DISCOVERY[path]
        if path == self._path:
            return await self._values(_parameters(scope))
        raise _RefusalError(HTTPStatus.NOT_FOUND, "The server could not find the requested resource.")

    def _health(self, path: str) -> Mapping[str, object]:
        if path == "/readyz" and not self._proxy.is_known:
            raise _RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "The cluster has not told yet who its front proxy is.")
        return {"status": "ok"}

    def _authenticate(self, scope: Scope) -> None:
        if not self._proxy.is_known:
            raise _StrangerError(HTTPStatus.SERVICE_UNAVAILABLE, "The cluster has not told yet who its front proxy is.")
        peer = peer_of(scope)
        if not peer.certificate:
            raise _StrangerError(HTTPStatus.UNAUTHORIZED, "Only the cluster's front proxy is answered.")
        if not self._proxy.allows(peer):
            raise _StrangerError(HTTPStatus.FORBIDDEN, "This certificate is not of the cluster's front proxy.")

    async def _values(self, parameters: Mapping[str, str]) -> Mapping[str, object]:
        if parameters.get("watch", "false") not in ("false", "0", ""):
            raise _RefusalError(HTTPStatus.METHOD_NOT_ALLOWED, "This resource cannot be watched.")
        try:
            selector = Selector.parse(parameters.get("labelSelector", ""))
        except SelectorError as error:
            raise _RefusalError(HTTPStatus.BAD_REQUEST, f"The label selector cannot be read: {error}.") from None
        selected = {model: label for model, label in self._labels.items() if selector.matches({LABEL: label})}
        if not selected:  # no values would be an error to whoever scales by them, and one without a word
            raise _RefusalError(
                HTTPStatus.NOT_FOUND, "The label selector selects none of the models that are configured."
            )
        try:
            load = await self._load.read()
        except QuireError as error:
            raise _RefusalError(_status(error), error.message) from error
        return metric_values((({LABEL: label}, load[model]) for model, label in selected.items()), datetime.now(UTC))


def _status(error: QuireError) -> HTTPStatus:
    known = error.code is ErrorCode.UNAVAILABLE
    return HTTPStatus.SERVICE_UNAVAILABLE if known else HTTPStatus.INTERNAL_SERVER_ERROR


def _parameters(scope: Scope) -> dict[str, str]:
    """Of several with one name the first counts, as in the Kubernetes API."""
    query = bytes(scope["query_string"]).decode("ascii", "replace")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise _RefusalError(HTTPStatus.BAD_REQUEST, f"A request has at most {_MAX_PARAMETERS} parameters.") from None
    return dict(reversed(pairs))
