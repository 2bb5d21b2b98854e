"""The REST application: routes, keys, and what becomes of errors. Everything that is raised is answered here."""

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
_LAST = ((b"connection", b"close"),)
Handler = Callable[[HttpExchange], Awaitable[None]]
_PASSING = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
"""After these a request that somebody may come back to was let go of, and not ended (see ``RequestRunner``)."""


class RestApp:
    """An ASGI application over ``routes``. Without a key only ``open_paths`` can be reached, not even the knowledge
    of which other paths exist. ``elsewhere`` says where that is which is not here; by default that depends on the path.
    """

    def __init__(
        self,
        frontend: ApiService,
        routes: Sequence[Route],
        patience: float,
        open_paths: Container[str] = PUBLIC_PATHS,
        elsewhere: str | None = None,
    ) -> None:
        self._frontend = frontend
        self.routes = tuple(routes)
        self._open_paths = open_paths
        self._elsewhere = elsewhere
        self._router = Router(routes, redirect_slashes=False)
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever happens."""
        reply = HttpResponse(send, self._patience, new_request_id(), direct_writer(scope))
        exchange = HttpExchange(scope, receive, reply)
        try:
            await self._serve(exchange, send)
        except ClientDisconnectedError:
            log.debug("request %s: the client left", exchange.request_id)
            if reply.direct is not None:
                reply.direct.abort()
        finally:
            reply.close()

    async def _serve(self, exchange: HttpExchange, send: Send) -> None:
        try:
            if exchange.head_bytes > MAX_HEAD_BYTES:
                raise head_too_large(MAX_HEAD_BYTES)
            self._authenticate(exchange)
            await self._route(exchange, send)
        except (HttpError, QuireError) as error:
            await _fail(exchange, error)
        except HTTPException as error:
            await _fail(exchange, self._unrouted(exchange, error))
        except ClientDisconnectedError:
            raise
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await _fail(exchange, internal())

    def _unrouted(self, exchange: HttpExchange, error: HTTPException) -> HttpError:
        """What the router found wrong, in our words."""
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
            return wrong_method(exchange.path, str(exchange.scope["method"]), allowed)
        return no_such_route(exchange.path, self._elsewhere)

    def _authenticate(self, exchange: HttpExchange) -> None:
        if exchange.path in self._open_paths:
            return
        with counting_rejections():
            exchange.caller = self._frontend.keys.authenticate(*exchange.credentials)
        exchange.reply.extra_headers = lambda: (
            *x_headers(self._frontend.rate_limit_headers(exchange.caller)),
            *self._parting(),
        )

    def _parting(self) -> Sequence[Header]:
        """Sends a client elsewhere with its next request: connections outlive their place in lists of who is ready."""
        return _LAST if self._frontend.concurrency.draining else ()

    async def _route(self, exchange: HttpExchange, send: Send) -> None:
        exchange.scope["app"] = self  # makes the router raise instead of answering by itself
        await self._router(exchange.attach(), exchange.receive, send)


def build_api(
    frontend: ApiService, *, max_body_bytes: int, patience: float, keepalive: KeepAlive = KEEPALIVE
) -> RestApp:
    """The public REST API. ``patience`` is how many seconds a client may leave its answer unread."""
    pages, requests = StatusEndpoints(frontend), RequestEndpoints(frontend, keepalive)
    limits = BodyLimits(max_body_bytes, patience)
    tokens = TokenizeEndpoints(frontend, limits)

    def generate(path: str, schema: type[GenerationBody], style: OpenAiFormat) -> Route:
        return _route(path, "POST", GenerateHandler(frontend, path, schema, style, limits=limits, keepalive=keepalive))

    routes = [
        generate("/v1/completions", CompletionRequest, COMPLETION),
        generate("/v1/chat/completions", ChatRequest, CHAT),
        _route("/v1/requests/{id}", ("GET", "DELETE"), requests.show_or_delete),
        _route("/v1/requests/{id}/cancel", "POST", requests.cancel),
        _route("/v1/requests/{id}/events", "GET", requests.events),
        _route("/tokenize", "POST", tokens.tokenize),
        _route("/detokenize", "POST", tokens.detokenize),
        _route("/v1/models", "GET", pages.models),
        _route("/v1/models/{model:path}", "GET", pages.model),
        *_probes(pages, pages.health),
    ]
    return RestApp(frontend, routes, patience)


def build_admin(frontend: ApiService, *, patience: float) -> RestApp:
    """What the metrics port serves, without a key: it is not for clients."""
    pages = StatusEndpoints(frontend)
    routes = [*_probes(pages, pages.health_in_detail), _route("/metrics", "GET", pages.metrics)]
    return RestApp(frontend, routes, patience, open_paths=PUBLIC_PATHS | {"/metrics"}, elsewhere=_NOT_FOR_CLIENTS)


def _probes(pages: StatusEndpoints, health: Handler) -> list[Route]:
    return [
        _route("/started", "GET", pages.started),
        _route("/ready", "GET", pages.ready),
        _route("/health", "GET", health),
        _route("/live", "GET", pages.live),
    ]


class _Asgi:
    """A handler in the form that the router takes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await self._handler(HttpExchange.from_scope(scope))


def _route(path: str, method: str | Sequence[str], handler: Handler) -> Route:
    methods = [method] if isinstance(method, str) else method
    return Route(path, _Asgi(handler), methods=methods, name=path)


async def _fail(exchange: HttpExchange, error: HttpError | QuireError) -> None:
    """Tells an error as an answer or, where the stream has begun, as its last event: it never just ends."""
    if not exchange.reply.started:
        await exchange.reply.send(*error_response(error, exchange.request_id))
    elif not exchange.reply.ended and isinstance(error, QuireError):
        resumable = (exchange.has_output or exchange.resumable) and error.code in _PASSING
        ids = exchange.event_ids
        await exchange.reply.end(error_event(error, exchange.request_id, resumable=resumable, event_ids=ids))
