"""The REST application: its routes, the check of keys, and the one place where errors become responses."""

import logging
from collections.abc import Awaitable, Callable, Container, Sequence
from http import HTTPStatus

from quire_proto.errors import ErrorCode, QuireError, internal
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from quire_router.api.rest.endpoints import RequestEndpoints, StatusEndpoints, TokenizeEndpoints
from quire_router.api.rest.generate import GenerateHandler, x_headers
from quire_router.api.rest.http import (
    BodyLimits,
    ClientDisconnectedError,
    Header,
    HttpError,
    HttpExchange,
    HttpResponse,
    direct_writer,
    head_too_large,
    no_such_route,
    wrong_method,
)
from quire_router.api.rest.http_server import MAX_HEAD_BYTES
from quire_router.api.rest.openai_format import CHAT, COMPLETION, OpenAiFormat, error_event, error_response
from quire_router.api.rest.sse import KEEPALIVE, KeepAlive
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest, GenerationBody
from quire_router.api.service import ApiService, counting_rejections, new_request_id

log = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/started", "/ready", "/health", "/live"})
_NOT_FOR_CLIENTS = "this is the metrics port; the API is on the port of --http-port, 8000 by default"
_CONNECTION_CLOSE = ((b"connection", b"close"),)
Handler = Callable[[HttpExchange], Awaitable[None]]
_TRANSIENT = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
"""After these errors a resumable request was released, and not ended (see ``RequestRunner``)."""


class RestApp:
    """An ASGI application over ``routes``. Without a key only ``open_paths`` can be reached, and other paths do not
    show whether they exist. ``not_found_hint`` says what to use instead of an unknown path; by default that depends on
    the path.
    """

    def __init__(
        self,
        service: ApiService,
        routes: Sequence[Route],
        client_timeout: float,
        open_paths: Container[str] = PUBLIC_PATHS,
        not_found_hint: str | None = None,
    ) -> None:
        self._service = service
        self.routes = tuple(routes)
        self._open_paths = open_paths
        self._not_found_hint = not_found_hint
        self._router = Router(routes, redirect_slashes=False)
        self._client_timeout = client_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; raises nothing."""
        response = HttpResponse(send, self._client_timeout, new_request_id(), direct_writer(scope))
        exchange = HttpExchange(scope, receive, response)
        try:
            await self._serve(exchange, send)
        except ClientDisconnectedError:
            log.debug("request %s: the client left", exchange.request_id)
            if response.direct is not None:
                response.direct.abort()
        finally:
            response.close()

    async def _serve(self, exchange: HttpExchange, send: Send) -> None:
        try:
            if exchange.head_bytes > MAX_HEAD_BYTES:
                raise head_too_large(MAX_HEAD_BYTES)
            self._authenticate(exchange)
            await self._route(exchange, send)
        except (HttpError, QuireError) as error:
            await _send_error(exchange, error)
        except HTTPException as error:
            await _send_error(exchange, self._routing_error(exchange, error))
        except ClientDisconnectedError:
            raise
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await _send_error(exchange, internal())

    def _routing_error(self, exchange: HttpExchange, error: HTTPException) -> HttpError:
        """Returns the error for a path or method that no route has."""
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
            return wrong_method(exchange.path, str(exchange.scope["method"]), allowed)
        return no_such_route(exchange.path, self._not_found_hint)

    def _authenticate(self, exchange: HttpExchange) -> None:
        if exchange.path in self._open_paths:
            return
        with counting_rejections():
            exchange.caller = self._service.keys.authenticate(*exchange.credentials)
        exchange.response.extra_headers = lambda: (
            *x_headers(self._service.rate_limit_headers(exchange.caller)),
            *self._connection_close(),
        )

    def _connection_close(self) -> Sequence[Header]:
        """Closes connections while draining: clients keep them after load balancers have dropped this router."""
        return _CONNECTION_CLOSE if self._service.concurrency.draining else ()

    async def _route(self, exchange: HttpExchange, send: Send) -> None:
        exchange.scope["app"] = self  # makes the router raise instead of answering by itself
        await self._router(exchange.attach(), exchange.receive, send)


def build_api(
    service: ApiService, *, max_body_bytes: int, client_timeout: float, keepalive: KeepAlive = KEEPALIVE
) -> RestApp:
    """Returns the public REST API. ``client_timeout`` bounds a body's arrival and each write, in seconds."""
    status, requests = StatusEndpoints(service), RequestEndpoints(service, keepalive)
    limits = BodyLimits(max_body_bytes, client_timeout)
    tokens = TokenizeEndpoints(service, limits)

    def generate(path: str, schema: type[GenerationBody], style: OpenAiFormat) -> Route:
        return _route(path, "POST", GenerateHandler(service, path, schema, style, limits=limits, keepalive=keepalive))

    routes = [
        generate("/v1/completions", CompletionRequest, COMPLETION),
        generate("/v1/chat/completions", ChatRequest, CHAT),
        _route("/v1/requests/{id}", ("GET", "DELETE"), requests.show_or_delete),
        _route("/v1/requests/{id}/cancel", "POST", requests.cancel),
        _route("/v1/requests/{id}/events", "GET", requests.events),
        _route("/tokenize", "POST", tokens.tokenize),
        _route("/detokenize", "POST", tokens.detokenize),
        _route("/v1/models", "GET", status.models),
        _route("/v1/models/{model:path}", "GET", status.model),
        *_probes(status, status.health),
    ]
    return RestApp(service, routes, client_timeout)


def build_admin(service: ApiService, *, client_timeout: float) -> RestApp:
    """Returns what the metrics port serves, without a key: it is not for clients."""
    status = StatusEndpoints(service)
    routes = [*_probes(status, status.health_in_detail), _route("/metrics", "GET", status.metrics)]
    return RestApp(
        service, routes, client_timeout, open_paths=PUBLIC_PATHS | {"/metrics"}, not_found_hint=_NOT_FOR_CLIENTS
    )


def _probes(status: StatusEndpoints, health: Handler) -> list[Route]:
    return [
        _route("/started", "GET", status.started),
        _route("/ready", "GET", status.ready),
        _route("/health", "GET", health),
        _route("/live", "GET", status.live),
    ]


class _Asgi:
    """A handler as an ASGI application, which starlette's router takes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await self._handler(HttpExchange.from_scope(scope))


def _route(path: str, method: str | Sequence[str], handler: Handler) -> Route:
    methods = [method] if isinstance(method, str) else method
    return Route(path, _Asgi(handler), methods=methods, name=path)


async def _send_error(exchange: HttpExchange, error: HttpError | QuireError) -> None:
    """Sends an error as a response or, in a stream that has started, as its last event: it never just ends."""
    if not exchange.response.started:
        await exchange.response.send(*error_response(error, exchange.request_id))
    elif not exchange.response.ended and isinstance(error, QuireError):
        resumable = (exchange.has_output or exchange.resumable) and error.code in _TRANSIENT
        ids = exchange.event_ids
        await exchange.response.end(error_event(error, exchange.request_id, resumable=resumable, event_ids=ids))
