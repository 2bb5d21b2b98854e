"""``/v1/completions`` and ``/v1/chat/completions``: one handler in two formats, and how a response is sent, as events
while it is generated or whole.
"""

from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

from quire_proto.errors import QuireError, internal, invalid

from quire_router.api.prepared_request import PreparedRequest, RequestOptions, options_from_headers
from quire_router.api.request_limits import ReservedBody
from quire_router.api.responses import Response
from quire_router.api.rest.http import (
    JSON_HEADERS,
    LAST_EVENT_ID,
    BodyLimits,
    Header,
    HttpExchange,
    cancel_on_disconnect,
    read_body,
    to_json,
)
from quire_router.api.rest.openai_format import CompletionBuilder, OpenAiFormat, request_object
from quire_router.api.rest.sse import KeepAlive, SseDeltaSink, SseEncoder, SseStream
from quire_router.api.schemas.openai import GenerationBody
from quire_router.api.service import ApiService, counting_rejections
from quire_router.api.validation import check_stream
from quire_router.core.generation import Delta, DeltaStream


async def stream(
    exchange: HttpExchange, style: OpenAiFormat, answer: Response, headers: Mapping[str, str], keepalive: KeepAlive
) -> None:
    """Sends each delta as it comes. An error before anything is sent has a status of its own. Raises ``QuireError``,
    INTERNAL for deltas that end without the usage: an incomplete response is never passed on as complete.
    """
    encoder = SseEncoder(style, answer.prepared, answer.cursor)
    exchange.event_ids = answer.prepared.event_ids
    opening = SseStream(exchange.response, keepalive, ids=exchange.event_ids)
    async with aclosing(answer.deltas) as deltas, opening as events:
        events.headers += x_headers(headers)
        async for delta in deltas:
            if encoder.logprobs is not None:
                await encoder.logprobs.read_prompt(delta)
            data = encoder.encode(delta) if exchange.has_output else _begin(exchange, events, encoder, delta)
            if delta.usage is not None:
                await events.end(data)
                return
            if data:
                await events.write(data)
            if isinstance(deltas, DeltaStream) and deltas.direct_path.sink is None and encoder.logprobs is None:
                deltas.direct_path.sink = SseDeltaSink(events, encoder)
    raise internal()


def _begin(exchange: HttpExchange, events: SseStream, encoder: SseEncoder, delta: Delta) -> bytes:
    """Returns the events of the first delta, behind those that open the stream."""
    exchange.has_output = True
    events.headers += route_headers(delta)
    return encoder.opening() + encoder.encode(delta)


async def collect_completion(answer: Response, style: OpenAiFormat) -> tuple[bytes, list[Header]]:
    """Returns the whole response as JSON, and headers that belong to it. Raises as ``stream`` does."""
    builder, headers = CompletionBuilder(style, answer.prepared), list[Header]()
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            if builder.logprobs is not None:
                await builder.logprobs.read_prompt(delta)
            builder.add(delta)
            headers = headers or route_headers(delta)
            if delta.usage is not None:
                return await builder.body(delta.usage), headers
    raise internal()


async def send_completion(
    exchange: HttpExchange, style: OpenAiFormat, answer: Response, headers: Mapping[str, str]
) -> None:
    """Sends a response once it is complete. Raises as ``stream`` does."""
    body, route = await collect_completion(answer, style)
    await exchange.response.send(200, body, [*JSON_HEADERS, *x_headers(headers), *route])


def route_headers(delta: Delta) -> list[Header]:
    """Returns the header that explains the request's placement, where the delta has it."""
    return [(b"x-quire-route", delta.route.encode("ascii", "replace"))] if delta.route else []


def x_headers(headers: Mapping[str, str]) -> list[Header]:
    """Returns response headers by names without ``x-``."""
    return [(b"x-" + name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]


class GenerateHandler:
    """One of the two routes. ``path`` names its span, ``schema`` parses its body, ``style`` formats its response."""

    def __init__(
        self,
        service: ApiService,
        path: str,
        schema: type[GenerationBody],
        style: OpenAiFormat,
        *,
        limits: BodyLimits,
        keepalive: KeepAlive,
    ) -> None:
        self._service = service
        self._name = f"POST {path}"
        self._schema = schema
        self._style = style
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, exchange: HttpExchange) -> None:
        """Handles one request. Raises what the application turns into an error response or a last event."""
        exchange.check_json_body(self._limits.max_bytes)
        with counting_rejections():
            options = options_from_headers(exchange.values)
            keyed_id = options.request_id(exchange.caller)
            if exchange.headers.get(LAST_EVENT_ID):
                raise _resume_hint(keyed_id)
        exchange.request_id = keyed_id or exchange.request_id
        with (
            self._service.request_scope(self._name, exchange.request_id, exchange.headers),
            self._service.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            await cancel_on_disconnect(exchange.receive, self._answer(exchange, body, options))

    async def _answer(self, exchange: HttpExchange, body: ReservedBody, options: RequestOptions) -> None:
        request_id, caller = exchange.request_id, exchange.caller
        read = partial(self._read, body)
        prepared = await self._service.prepare(read, request_id, caller, options, size=len(body))
        body.hold_until_queued(prepared.first.request_id)
        if prepared.first.background:
            await self._start(exchange, prepared)
            return
        answer = await self._service.responses.open(prepared, caller)
        if answer.replayed:
            body.release()  # nothing is queued, and the first request's response may take long
        exchange.resumable = bool(prepared.first.digest)
        headers = self._service.response_headers(prepared, replayed=answer.replayed)
        if prepared.first.stream:
            await stream(exchange, self._style, answer, headers, self._keepalive)
        else:
            await send_completion(exchange, self._style, answer, headers)

    async def _start(self, exchange: HttpExchange, prepared: PreparedRequest) -> None:
        stored, replayed = await self._service.responses.start_background(prepared)
        location = (b"location", f"/v1/requests/{stored.first.request_id}".encode("ascii"))
        headers = x_headers(self._service.response_headers(prepared, replayed=replayed))
        await exchange.response.send(202, to_json(request_object(stored)), [*JSON_HEADERS, location, *headers])

    def _read(self, body: ReservedBody) -> GenerationBody:
        request = self._schema.from_json(body.detach())
        check_stream(request)
        return request


def _resume_hint(request_id: str) -> QuireError:
    """Refuses a new request with Last-Event-ID: its client means to resume, and running it would be charged again."""
    address = f"/v1/requests/{request_id or '{id}'}/events"
    which = "" if request_id else " with the id in the x-request-id of the answer that broke off"
    message = f"This route begins a new answer. To read on, send {LAST_EVENT_ID} with GET {address}{which}."
    return invalid(LAST_EVENT_ID, message)
