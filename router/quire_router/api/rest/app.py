"""The REST application: routes, keys, and what becomes of errors. Everything that is raised is answered here."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from quire_proto.errors import QuireError, internal
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from quire_router.api.frontend import Frontend, counting_rejections, new_request_id
from quire_router.api.rest.answers import CHAT, COMPLETION, error_answer, error_object, event
from quire_router.api.rest.connection import BodyLimits, ClientGoneError, Reply
from quire_router.api.rest.exchange import Exchange
from quire_router.api.rest.generate import Generate
from quire_router.api.rest.pages import Pages
from quire_router.api.rest.protocol import MAX_HEAD_BYTES
from quire_router.api.rest.refusals import HttpError, head_too_large, no_such_route, wrong_method
from quire_router.api.schemas import ChatRequest, CompletionRequest

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/live", "/metrics"})
Handler = Callable[[Exchange], Awaitable[None]]


class RestApp:
    """An ASGI application over ``routes``. Without a key only ``OPEN_PATHS`` can be reached, not even the knowledge
    of which other paths exist.
    """

    def __init__(self, frontend: Frontend, routes: Sequence[Route], patience: float) -> None:
        self._frontend = frontend
        self.routes = tuple(routes)
        self._router = Router(routes, redirect_slashes=False)
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever happens."""
        request_id = new_request_id()
        reply = Reply(_naming(send, request_id), self._patience)
        exchange = Exchange(scope, receive, reply, request_id)
        try:
            await self._serve(exchange, send)
        except ClientGoneError:
            log.debug("request %s: the client left", request_id)
        finally:
            reply.close()

    async def _serve(self, exchange: Exchange, send: Send) -> None:
        try:
            if exchange.head_bytes > MAX_HEAD_BYTES:
                raise head_too_large(MAX_HEAD_BYTES)
            self._authenticate(exchange)
            await self._route(exchange, send)
        except (HttpError, QuireError) as error:
            await _fail(exchange, error)
        except HTTPException as error:
            await _fail(exchange, _unrouted(error))
        except ClientGoneError:
            raise
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await _fail(exchange, internal())

    def _authenticate(self, exchange: Exchange) -> None:
        if exchange.path in OPEN_PATHS:
            return
        with counting_rejections():
            exchange.caller = self._frontend.keys.caller(*exchange.values("authorization"))

    async def _route(self, exchange: Exchange, send: Send) -> None:
        exchange.scope["app"] = self  # makes the router raise instead of answering by itself
        await self._router(exchange.attach(), exchange.receive, send)


def build_api(frontend: Frontend, *, max_body_bytes: int, patience: float) -> RestApp:
    """The public REST API. ``patience`` is how many seconds a client may leave its answer unread."""
    pages = Pages(frontend)
    completions, chat = "/v1/completions", "/v1/chat/completions"
    limits = BodyLimits(max_body_bytes, patience)
    routes = [
        _route(completions, "POST", Generate(frontend, completions, CompletionRequest, COMPLETION, limits)),
        _route(chat, "POST", Generate(frontend, chat, ChatRequest, CHAT, limits)),
        _route("/v1/models", "GET", pages.models),
        _route("/v1/models/{model:path}", "GET", pages.model),
        *_told_to_all(pages),
    ]
    return RestApp(frontend, routes, patience)


def build_admin(frontend: Frontend, *, patience: float) -> RestApp:
    """What the metrics port serves."""
    return RestApp(frontend, _told_to_all(Pages(frontend)), patience)


def _told_to_all(pages: Pages) -> list[Route]:
    return [
        _route("/health", "GET", pages.health),
        _route("/live", "GET", pages.live),
        _route("/metrics", "GET", pages.metrics),
    ]


class _Asgi:
    """A handler in the form that the router takes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await self._handler(Exchange.of(scope))


def _route(path: str, method: str, handler: Handler) -> Route:
    return Route(path, _Asgi(handler), methods=[method], name=path)


def _naming(send: Send, request_id: str) -> Send:
    """``send`` with the request's id in the headers of every answer."""
    header = (b"x-request-id", request_id.encode())

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        await send(message)

    return named


async def _fail(exchange: Exchange, error: HttpError | QuireError) -> None:
    """Tells an error as an answer or, where the stream has begun, as its last event: it never just ends."""
    if not exchange.reply.started:
        await exchange.reply.whole(*error_answer(error, exchange.request_id))
    elif not exchange.reply.ended and isinstance(error, QuireError):
        await exchange.reply.end(event(error_object(error, exchange.request_id)))


def _unrouted(error: HTTPException) -> HttpError:
    """What the router found wrong, in our words."""
    return wrong_method((error.headers or {}).get("Allow", "")) if error.status_code == 405 else no_such_route()
