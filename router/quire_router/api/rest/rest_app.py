"""The REST application: its routes, the check of keys, and the one place where errors become responses; and the handler
of the routes that generate.
"""

import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from http import HTTPStatus

from quire_proto.errors import ErrorCode, QuireError, internal, invalid
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_router.api.conversations import Conversations
from quire_router.api.prepared_request import PreparedRequest, RequestOptions, options_from_headers
from quire_router.api.request_limits import ReservedBody
from quire_router.api.rest.answer_format import AnswerFormat
from quire_router.api.rest.batch_endpoints import BatchApi, BatchEndpoints, FileEndpoints
from quire_router.api.rest.content_coding import decoding
from quire_router.api.rest.conversation_endpoints import CONVERSATIONS, ConversationEndpoints
from quire_router.api.rest.endpoints import (
    FleetEndpoint,
    RequestEndpoints,
    StatusEndpoints,
    TokenizeEndpoints,
    request_object,
)
from quire_router.api.rest.http import (
    JSON_HEADERS,
    LAST_EVENT_ID,
    BodyLimits,
    ClientDisconnectedError,
    Header,
    HttpError,
    HttpExchange,
    HttpResponse,
    direct_writer,
    head_too_large,
    no_such_route,
    read_body,
    to_json,
    wrong_method,
    x_headers,
)
from quire_router.api.rest.http_server import MAX_HEAD_BYTES
from quire_router.api.rest.loras import LoRAEndpoints
from quire_router.api.rest.messages_format import MESSAGES
from quire_router.api.rest.openai_format import CHAT, COMPLETION
from quire_router.api.rest.openapi import (
    BATCH_PATHS,
    BATCHES,
    CONVERSATION_PATHS,
    FILES,
    FLEET,
    LOAD_LORA,
    LORA_UPDATES,
    UNLOAD_LORA,
)
from quire_router.api.rest.page import DOCS, FOLDER, HOME, Page
from quire_router.api.rest.pooling_routes import pooling_handlers
from quire_router.api.rest.responses_endpoints import PATH as RESPONSES_PATH
from quire_router.api.rest.responses_endpoints import ResponseEndpoints
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.rest.sse import KEEPALIVE, KeepAlive, reconnect, send_whole, stream
from quire_router.api.rest.usage_page import UsageEndpoint
from quire_router.api.schemas.anthropic import MessagesRequest
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest, GenerationBody
from quire_router.api.service import ApiService, counting_rejections, new_request_id
from quire_router.api.stored_quota import ResponseQuota
from quire_router.api.validation import check_stream
from quire_router.engines.lora_updates import LoRAUpdater

log = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/started", "/ready", "/health", "/live", "/ping"})
_MESSAGES = "/v1/messages"
_FORMATS: Mapping[str, AnswerFormat] = {_MESSAGES: MESSAGES, RESPONSES_PATH: RESPONSES}
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
        exchange = HttpExchange(scope, receive, response, format_of_errors(scope["path"]))
        response.id_headers = exchange.format.id_headers
        response.extra_headers = self._connection_close
        try:
            await self._serve(exchange, send)
        except ClientDisconnectedError:
            log.debug("request %s: the client disconnected", exchange.request_id)
            if response.direct is not None:
                response.direct.abort()
        finally:
            response.close()

    async def _serve(self, exchange: HttpExchange, send: Send) -> None:
        try:
            if exchange.head_bytes > MAX_HEAD_BYTES:
                raise head_too_large(MAX_HEAD_BYTES)
            self._authenticate(exchange)
            if exchange.scope["method"] == "POST":
                exchange.receive = decoding(exchange.receive, exchange.values("content-encoding"))
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
            exchange.shows_fleet = self._service.keys.shows_fleet(exchange.caller)
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


def format_of_errors(path: str) -> AnswerFormat:
    """Returns how errors look at a path, also where there is no route, and before the key is checked."""
    for start, found in _FORMATS.items():
        if f"{path}/".startswith(f"{start}/"):
            return found
    return CHAT


Prepare = Callable[[HttpExchange, ReservedBody, RequestOptions], Awaitable[PreparedRequest]]
"""Returns the request in a body. Raises ``QuireError``."""
Start = Callable[[HttpExchange, PreparedRequest], Awaitable[None]]
"""Starts a request in the background, and sends the response to that. Raises ``QuireError``."""
Forget = Callable[[HttpExchange, PreparedRequest], Awaitable[None]]
"""Takes back what preparing a request has written, as it was refused or has failed, and cannot be resumed."""


class GenerateHandler:
    """One of the routes that generate. ``path`` names its span, ``prepare`` reads the request in its body, ``start``
    takes one for the background, where the response is not the state of the request, and ``forget`` one that was
    refused or has failed.
    """

    def __init__(
        self,
        service: ApiService,
        path: str,
        prepare: Prepare,
        answer_format: AnswerFormat,
        *,
        start: Start | None = None,
        forget: Forget | None = None,
        limits: BodyLimits,
        keepalive: KeepAlive,
    ) -> None:
        self._service = service
        self._name = f"POST {path}"
        self._prepare = prepare
        self._start = start or self._start_request
        self._forget = forget
        self._format = answer_format
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, exchange: HttpExchange) -> None:
        """Handles one request. Raises what the application turns into an error response or a last event."""
        exchange.check_json_body(self._limits.max_bytes)
        with counting_rejections():
            options = options_from_headers(exchange.values)
            keyed_id = await self._service.keyed_id(options, exchange.caller)
            shown_id = keyed_id if exchange.caller.tenant else ""  # else whoever has the key would learn it
            if exchange.headers.get(LAST_EVENT_ID):
                raise _resume_hint(shown_id)
        exchange.request_id = shown_id or exchange.request_id
        exchange.generation_id = keyed_id or exchange.request_id
        with (
            self._service.request_scope(self._name, exchange.request_id, exchange.headers),
            self._service.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            await exchange.cancel_on_disconnect(self._answer(exchange, body, options))

    async def _answer(self, exchange: HttpExchange, body: ReservedBody, options: RequestOptions) -> None:
        prepared = await self._prepare(exchange, body, options)
        try:
            await self._send(exchange, body, prepared)
        except QuireError as error:
            if self._forget is not None and not _is_resumable(exchange, error):
                await self._forget(exchange, prepared)
            raise

    async def _send(self, exchange: HttpExchange, body: ReservedBody, prepared: PreparedRequest) -> None:
        body.hold_until_queued(prepared.first.request_id)
        if prepared.first.background:
            await self._start(exchange, prepared)
            return
        answer = await self._service.responses.open(prepared, exchange.caller)
        exchange.request_id = prepared.first.request_id
        if answer.replayed:
            body.release()  # nothing is queued, and the first request's response may take long
        exchange.resumable = bool(prepared.first.digest)
        headers = self._service.response_headers(prepared, replayed=answer.replayed)
        if prepared.first.stream:
            await stream(exchange, self._format, answer, headers, self._keepalive)
        else:
            await send_whole(exchange, self._format, answer, headers)

    async def _start_request(self, exchange: HttpExchange, prepared: PreparedRequest) -> None:
        stored, replayed = await self._service.responses.start_background(prepared)
        exchange.request_id = stored.first.request_id
        location = (b"location", f"/v1/requests/{stored.first.request_id}".encode("ascii"))
        headers = x_headers(self._service.response_headers(prepared, replayed=replayed))
        await exchange.response.send(202, to_json(request_object(stored)), [*JSON_HEADERS, location, *headers])


def _preparing(service: ApiService, parse: Callable[[bytearray], GenerationBody]) -> Prepare:
    """Returns what prepares the requests that ``parse`` reads."""

    def read(body: ReservedBody) -> GenerationBody:
        request = parse(body.detach())
        check_stream(request)
        return request

    async def prepare(exchange: HttpExchange, body: ReservedBody, options: RequestOptions) -> PreparedRequest:
        size = len(body)
        return await service.prepare(partial(read, body), exchange.generation_id, exchange.caller, options, size=size)

    return prepare


def _resume_hint(request_id: str) -> QuireError:
    """Refuses a new request with Last-Event-ID: its client means to resume, and running it would be charged again."""
    address = f"/v1/requests/{request_id or '{id}'}/events"
    which = "" if request_id else " with the id in the x-request-id of the answer that broke off"
    message = f"This route begins a new answer. To read on, send {LAST_EVENT_ID} with GET {address}{which}."
    return invalid(LAST_EVENT_ID, message)


def build_api(
    service: ApiService,
    *,
    max_body_bytes: int,
    client_timeout: float,
    keepalive: KeepAlive = KEEPALIVE,
    page: Page | None = None,
    fleet: FleetEndpoint | None = None,
    lora_updater: LoRAUpdater | None = None,
    batches: BatchApi | None = None,
    conversations: Conversations | None = None,
    quota: ResponseQuota | None = None,
) -> RestApp:
    """Returns the public REST API. ``client_timeout`` bounds a body's arrival and each write, in seconds. ``page`` is
    what browsers get, and ``fleet`` the stream that it reads; ``lora_updater`` loads adapters, ``batches`` runs
    batches, and ``conversations`` keeps those of responses. None: there is nothing at their paths. ``quota`` bounds
    what is stored of responses.
    """
    absent = {FLEET} if fleet is None else set()
    if lora_updater is None:
        absent |= LORA_UPDATES
    if batches is None:
        absent |= BATCH_PATHS
    if conversations is None:
        absent |= CONVERSATION_PATHS
    status = StatusEndpoints(service, absent)
    limits = BodyLimits(max_body_bytes, client_timeout)
    tokens = TokenizeEndpoints(service, limits)
    responses = ResponseEndpoints(service, limits, keepalive, conversations, quota)
    requests = RequestEndpoints(service, keepalive, responses.delete)

    def generate(
        path: str,
        prepare: Prepare,
        answer_format: AnswerFormat,
        start: Start | None = None,
        forget: Forget | None = None,
    ) -> Route:
        handler = GenerateHandler(
            service, path, prepare, answer_format, start=start, forget=forget, limits=limits, keepalive=keepalive
        )
        return _route(path, "POST", handler)

    routes = [
        generate("/v1/completions", _preparing(service, CompletionRequest.from_json), COMPLETION),
        generate("/v1/chat/completions", _preparing(service, ChatRequest.from_json), CHAT),
        generate(_MESSAGES, _preparing(service, MessagesRequest.chat_from_json), MESSAGES),
        _route(f"{_MESSAGES}/count_tokens", "POST", tokens.count_tokens),
        generate(RESPONSES_PATH, responses.prepare, RESPONSES, responses.start, responses.forget),
        _route(f"{RESPONSES_PATH}/input_tokens", "POST", responses.input_tokens),
        _route(f"{RESPONSES_PATH}/{{id}}", ("GET", "DELETE"), responses.show_or_delete),
        _route(f"{RESPONSES_PATH}/{{id}}/cancel", "POST", responses.cancel),
        _route(f"{RESPONSES_PATH}/{{id}}/input_items", "GET", responses.input_items),
        *[_route(path, "POST", handler) for path, handler in pooling_handlers(service, limits).items()],
        _route("/v1/requests/{id}", ("GET", "DELETE"), requests.show_or_delete),
        _route("/v1/requests/{id}/cancel", "POST", requests.cancel),
        _route("/v1/requests/{id}/events", "GET", requests.events),
        _route("/v1/usage", "GET", UsageEndpoint(service).usage),
        _route("/tokenize", "POST", tokens.tokenize),
        _route("/detokenize", "POST", tokens.detokenize),
        _route("/v1/models", "GET", status.models),
        _route("/v1/models/{model:path}", "GET", status.model),
        _route("/version", "GET", status.version),
        _route("/openapi.json", "GET", status.openapi),
        _route("/ping", ("GET", "POST"), status.ping),
        *_probes(status, status.health),
    ]
    if fleet is not None:
        routes.append(_route(FLEET, "GET", fleet.events))
    if lora_updater is not None:
        loras = LoRAEndpoints(service, lora_updater, limits)
        routes.append(_route(LOAD_LORA, "POST", loras.load))
        routes.append(_route(UNLOAD_LORA, "POST", loras.unload))
    if batches is not None:
        routes += _batch_routes(service, batches, limits)
    if conversations is not None:
        routes += _conversation_routes(ConversationEndpoints(service, conversations, limits))
    if page is None:
        return RestApp(service, routes, client_timeout)
    routes += [
        _route(HOME, "GET", page.home),
        _route(DOCS, "GET", page.docs),
        _route(FOLDER + "{name}", "GET", page.file),
    ]
    return RestApp(service, routes, client_timeout, open_paths=PUBLIC_PATHS | page.paths)


def _batch_routes(service: ApiService, batches: BatchApi, limits: BodyLimits) -> list[Route]:
    files, own = FileEndpoints(service, batches, limits), BatchEndpoints(service, batches, limits)
    return [
        _route(FILES, ("GET", "POST"), files.list_or_upload),
        _route(f"{FILES}/{{id}}", ("GET", "DELETE"), files.show_or_delete),
        _route(f"{FILES}/{{id}}/content", "GET", files.content),
        _route(BATCHES, ("GET", "POST"), own.list_or_create),
        _route(f"{BATCHES}/{{id}}", "GET", own.show),
        _route(f"{BATCHES}/{{id}}/cancel", "POST", own.cancel),
    ]


def _conversation_routes(endpoints: ConversationEndpoints) -> list[Route]:
    return [
        _route(CONVERSATIONS, "POST", endpoints.create),
        _route(f"{CONVERSATIONS}/{{id}}", ("GET", "POST", "DELETE"), endpoints.one),
        _route(f"{CONVERSATIONS}/{{id}}/items", ("GET", "POST"), endpoints.items),
        _route(f"{CONVERSATIONS}/{{id}}/items/{{item_id}}", ("GET", "DELETE"), endpoints.item),
    ]


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of other sites too: browsers are told that they may send requests, keys included, and read all
    of the response. A key comes in a header, never in a cookie, so a page has only the keys that its user gave it.
    """
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",), expose_headers=("*",)
    )


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


def _is_resumable(exchange: HttpExchange, error: QuireError) -> bool:
    return (exchange.has_output or exchange.resumable) and error.code in _TRANSIENT


async def _send_error(exchange: HttpExchange, error: HttpError | QuireError) -> None:
    """Sends an error as a response or, in a stream that has started, as its last event: it never just ends. A stream
    with ids that can be resumed also says after which time.
    """
    if not exchange.response.started:
        await exchange.response.send(*exchange.format.error_response(error, exchange.request_id))
    elif not exchange.response.ended and isinstance(error, QuireError):
        resumable = _is_resumable(exchange, error)
        encoder = exchange.encoder
        event = exchange.format.error_event(error, exchange.request_id, resumable=resumable, encoder=encoder)
        await exchange.response.end((reconnect() if resumable and exchange.event_ids else b"") + event)
