"""The other routes: models, health, metrics and the API's description (``StatusEndpoints``), stored requests under
``/v1/requests/{id}`` (``RequestEndpoints``), ``/v1/fleet/events`` (``FleetEndpoint``), ``/tokenize`` and
``/detokenize`` (``TokenizeEndpoints``).
"""

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from quire_proto.errors import QuireError, invalid

from quire_router.api.auth import ANONYMOUS, Authenticator, Identity
from quire_router.api.fleet_feed import FleetFeed
from quire_router.api.prepared_request import options_from_headers
from quire_router.api.request_limits import ReservedBody
from quire_router.api.rest.answer_format import AnswerFormat
from quire_router.api.rest.http import (
    JSON_HEADERS,
    LAST_EVENT_ID,
    BodyLimits,
    Header,
    HttpExchange,
    read_body,
    to_json,
    x_headers,
)
from quire_router.api.rest.item_list import read_query
from quire_router.api.rest.messages_format import MESSAGES
from quire_router.api.rest.model_infos import ANTHROPIC_VERSION, model_info, model_info_page, model_object
from quire_router.api.rest.openai_format import CHAT, COMPLETION, error_object, usage_object
from quire_router.api.rest.openapi import openapi
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.rest.sse import KeepAlive, SseStream, collect, stream
from quire_router.api.schemas.anthropic import CountTokensRequest
from quire_router.api.service import ApiService, counting_rejections, ignored_parameters_header
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest, TokenizeResult, to_tokenize
from quire_router.core.errors import RETRY_NOT_READY, fleet_forbidden
from quire_router.core.generation import GenerationRequest
from quire_router.core.response_options import Api, ResponseOptions
from quire_router.core.retry import failing_tasks, retry_after

VERSION = version("quire-router")
_OK, _LEAVING, _FAILING = (to_json({"status": status}) for status in ("ok", "leaving", "failing"))
Delete = Callable[[str, Identity], Awaitable[StoredRequest]]


class StatusEndpoints:
    """Handlers of models, health and metrics, and of what the API says of itself, which has no paths that are
    ``absent``.
    """

    def __init__(self, service: ApiService, absent: Container[str] = ()) -> None:
        self._service = service
        self._absent = absent
        self._openapi = b""

    async def models(self, exchange: HttpExchange) -> None:
        """The configured models that the caller may use, whether or not an engine is ready. Anthropic's clients get a
        page in the form of their API.
        """
        cards = self._service.models(exchange.caller)
        if _is_anthropic(exchange):
            listed = model_info_page(cards, read_query(exchange))
        else:
            listed = {"object": "list", "data": [model_object(card) for card in cards]}
        await exchange.response.send(200, to_json(listed))

    async def model(self, exchange: HttpExchange) -> None:
        """One configured model."""
        write = model_info if _is_anthropic(exchange) else model_object
        card = await self._service.model(exchange.path_parameters["model"], exchange.caller)
        await exchange.response.send(200, to_json(write(card)))

    async def health(self, exchange: HttpExchange) -> None:
        """Whether requests can be served now: 200 when some model has an engine, else 503. A caller with a key, or
        where none is configured, also gets the number of engines of each of its models. Raises ``QuireError``
        UNAUTHENTICATED for a wrong key.
        """
        keys, given = self._service.keys, exchange.credentials
        if keys.required and not given:
            await self._health(exchange, {})
        else:
            await self._health(exchange, self._engines(keys.authenticate(*given)))

    async def health_in_detail(self, exchange: HttpExchange) -> None:
        """As ``health``, with the engines of all models for every caller."""
        await self._health(exchange, self._engines(ANONYMOUS))

    async def ping(self, exchange: HttpExchange) -> None:
        """As ``health``, without details: what SageMaker asks of a container."""
        await self._health(exchange, {})

    async def version(self, exchange: HttpExchange) -> None:
        """The version of the router."""
        await exchange.response.send(200, to_json({"version": VERSION}))

    async def openapi(self, exchange: HttpExchange) -> None:
        """What this API takes, for tools that read OpenAPI."""
        if not self._openapi:
            self._openapi = to_json(openapi(VERSION, self._absent))
        await exchange.response.send(200, self._openapi)

    async def started(self, exchange: HttpExchange) -> None:
        """Answers once settings and tokenizers are loaded: the ports are not open before."""
        await exchange.response.send(200, _OK)

    async def ready(self, exchange: HttpExchange) -> None:
        """Whether new requests are accepted: also while no engine is ready, because they are held until one is."""
        if self._service.concurrency.draining:
            await exchange.response.send(503, _LEAVING, _unready())
        else:
            await exchange.response.send(200, _OK)

    async def live(self, exchange: HttpExchange) -> None:
        """Whether the event loop runs (else nothing answers) and no supervised task fails again and again."""
        if failing_tasks():
            await exchange.response.send(503, _FAILING)
        else:
            await exchange.response.send(200, _OK)

    async def metrics(self, exchange: HttpExchange) -> None:
        """All metrics in Prometheus' text format."""
        await exchange.response.send(200, generate_latest(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))

    def _engines(self, caller: Identity) -> dict[str, dict[str, int]]:
        return {"ready_engines": {card.name: card.ready_engines for card in self._service.models(caller)}}

    async def _health(self, exchange: HttpExchange, details: Mapping[str, object]) -> None:
        if self._service.serving():
            await exchange.response.send(200, to_json({"status": "ok", **details}))
        else:
            await exchange.response.send(503, to_json({"status": "unavailable", **details}), _unready())


def _unready() -> tuple[Header, ...]:
    return (*JSON_HEADERS, (b"retry-after", b"%d" % retry_after(RETRY_NOT_READY)))


def _is_anthropic(exchange: HttpExchange) -> bool:
    """Whether a client of Anthropic's API asks, which then gets errors in its form, too."""
    if ANTHROPIC_VERSION not in exchange.headers:
        return False
    exchange.format = MESSAGES
    return True


def format_of(generation: GenerationRequest) -> AnswerFormat:
    """Returns the format of the route that a stored request came by. Raises ``QuireError`` INTERNAL when its record is
    damaged.
    """
    api = ResponseOptions.from_record(generation).api
    if api is not Api.OPENAI:
        return MESSAGES if api is Api.MESSAGES else RESPONSES
    return CHAT if generation.operation == "chat" else COMPLETION


_PATH = "/v1/requests/{id}"
_AFTER = "after"


def request_object(stored: StoredRequest) -> dict[str, Any]:
    """Returns the state of a stored request."""
    first, error = stored.first, stored.error
    failure = {} if error is None else error_object(error, first.request_id)
    return {
        "id": first.request_id,
        "object": "request",
        "status": stored.status,
        "model": first.model_name,
        "created": int(first.created),
        "background": first.background,
        "usage": usage_object(stored.usage),
        **failure,
    }


class RequestEndpoints:
    """Handlers of ``/v1/requests/{id}``: a stored request's state, the rest of its response, its end."""

    def __init__(self, service: ApiService, keepalive: KeepAlive, delete: Delete) -> None:
        self._service = service
        self._keepalive = keepalive
        self._delete_stored = delete

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """Sends the request's state, with its response once that is complete; for ``DELETE``, forgets it."""
        if exchange.scope["method"] == "DELETE":
            await self._delete(exchange)
            return
        with self._service.request_scope(f"GET {_PATH}", exchange.request_id, exchange.headers):
            await exchange.cancel_on_disconnect(self._show(exchange))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Cancels the request, and sends its state just before."""
        with self._service.request_scope(f"POST {_PATH}/cancel", exchange.request_id, exchange.headers):
            stored = await self._service.cancel(_id(exchange), exchange.caller)
            await exchange.response.send(200, to_json(request_object(stored)))

    async def _delete(self, exchange: HttpExchange) -> None:
        """Ends and forgets the request, and sends its state just before."""
        with self._service.request_scope(f"DELETE {_PATH}", exchange.request_id, exchange.headers):
            stored = await self._delete_stored(_id(exchange), exchange.caller)
            await exchange.response.send(200, to_json({**request_object(stored), "deleted": True}))

    async def events(self, exchange: HttpExchange) -> None:
        """Streams the response from the client's cursor on; its events have ids."""
        with self._service.request_scope(f"GET {_PATH}/events", exchange.request_id, exchange.headers):
            await exchange.cancel_on_disconnect(self._events(exchange))

    async def _show(self, exchange: HttpExchange) -> None:
        stored = await self._service.status(_id(exchange), exchange.caller)
        body_json, own = to_json(request_object(stored)), list[Header]()
        if stored.status is RequestStatus.COMPLETED:
            answer = await self._service.replay(stored, exchange.caller)
            whole, own = await collect(answer, format_of(stored.first))
            body_json = body_json[:-1] + b',"response":' + whole + b"}"
        await exchange.response.send(200, body_json, [*JSON_HEADERS, *own])

    async def _events(self, exchange: HttpExchange) -> None:
        with counting_rejections():
            options = options_from_headers(exchange.values)
            stored = await self._service.find(_id(exchange), exchange.caller)
            first = stored.first
            exchange.request_id, exchange.format = first.request_id, format_of(first)
            after, delivered = exchange.format.read_event_id(_after(exchange))
            answer = await self._service.resume(stored, after, exchange.caller, options)
            answer.delivered = delivered
        exchange.resumable = first.stream or first.background or bool(first.digest)
        await stream(exchange, exchange.format, answer, {}, self._keepalive)


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])


def _after(exchange: HttpExchange) -> str:
    """Returns the id of the last event that the client has: from the header, as clients that reconnect by themselves
    send it, or else from the query. Raises ``QuireError``.
    """
    query = _query(exchange)
    headers = exchange.values(LAST_EVENT_ID)
    if len(headers) > 1 or len(query) > 1:
        raise invalid(_AFTER, "There is more than one last event.")
    return headers[0] if headers else query[0] if query else ""


def _query(exchange: HttpExchange) -> list[str]:
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=2)
    except ValueError:
        raise _unknown() from None
    if any(name != _AFTER for name, _ in fields):
        raise _unknown()
    return [value for _, value in fields]


def _unknown() -> QuireError:
    return invalid(_AFTER, "The address takes one parameter, after.")


class FleetEndpoint:
    """Handler of ``/v1/fleet/events``, for those whom ``keys`` show the fleet."""

    def __init__(self, feed: FleetFeed, keys: Authenticator, keepalive: KeepAlive) -> None:
        self._feed = feed
        self._keys = keys
        self._keepalive = keepalive

    async def events(self, exchange: HttpExchange) -> None:
        """Streams the state of the fleet, for as long as the client reads. Raises ``QuireError``."""
        if not self._keys.shows_fleet(exchange.caller):
            raise fleet_forbidden()
        await exchange.cancel_on_disconnect(self._send(exchange))

    async def _send(self, exchange: HttpExchange) -> None:
        async with (
            aclosing(self._feed.watch()) as updates,
            SseStream(exchange.response, self._keepalive, ids=False) as events,
        ):
            async for data in updates:
                await events.write(data)
            await events.end(b": end\n\n")


_CHUNK = 4096  # entries
TokenizeBody = tuple[bytes, Sequence[str]]
"""The JSON of a response, and the parameters that were ignored."""


class TokenizeEndpoints:
    """Handlers of ``/tokenize`` and ``/detokenize``, and of ``/v1/messages/count_tokens``."""

    def __init__(self, service: ApiService, limits: BodyLimits) -> None:
        self._service = service
        self._limits = limits

    async def tokenize(self, exchange: HttpExchange) -> None:
        """Sends the tokens of a text or of a conversation."""
        await self._answer(exchange, "POST /tokenize", self._tokens)

    async def detokenize(self, exchange: HttpExchange) -> None:
        """Sends the text of tokens."""
        await self._answer(exchange, "POST /detokenize", self._text)

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """Sends the number of tokens of a conversation in the words of the Messages API."""
        await self._answer(exchange, "POST /v1/messages/count_tokens", self._count)

    async def _answer(
        self, exchange: HttpExchange, name: str, answer: Callable[[ReservedBody, Identity], Awaitable[TokenizeBody]]
    ) -> None:
        exchange.check_json_body(self._limits.max_bytes)
        with (
            self._service.request_scope(name, exchange.request_id, exchange.headers),
            self._service.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            body_json, ignored = await answer(body, exchange.caller)
            await exchange.response.send(
                200, body_json, [*JSON_HEADERS, *x_headers(ignored_parameters_header(ignored))]
            )

    async def _tokens(self, body: ReservedBody, caller: Identity) -> TokenizeBody:
        size = len(body)
        return await self._service.tokenize(
            lambda: TokenizeRequest.from_json(body.detach()), caller, _tokens_json, size=size
        )

    async def _count(self, body: ReservedBody, caller: Identity) -> TokenizeBody:
        size = len(body)
        return await self._service.tokenize(
            lambda: to_tokenize(CountTokensRequest.from_json(body.detach())), caller, _count_json, size=size
        )

    async def _text(self, body: ReservedBody, caller: Identity) -> TokenizeBody:
        size = len(body)
        text, ignored = await self._service.detokenize(
            lambda: DetokenizeRequest.from_json(body.detach()), caller, size=size
        )
        return to_json({"prompt": text}), ignored


def _tokens_json(result: TokenizeResult) -> TokenizeBody:
    """Returns the tokens as JSON. Lists are written in chunks, between which other threads can run."""
    names = None if result.token_strs is None else _list_items(result.token_strs)
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(result.tokens), result.max_model_len)
    middle = b'],"token_strs":'
    body = head + _list_items(result.tokens) + middle + (b"null" if names is None else b"[" + names + b"]") + b"}"
    return body, result.ignored


def _count_json(result: TokenizeResult) -> TokenizeBody:
    return to_json({"input_tokens": len(result.tokens)}), result.ignored


def _list_items(values: Sequence[object]) -> bytes:
    """Returns the entries of a list as JSON, without its brackets."""
    return b",".join(to_json(list(values[start : start + _CHUNK]))[1:-1] for start in range(0, len(values), _CHUNK))
