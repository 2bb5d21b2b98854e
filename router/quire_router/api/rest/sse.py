"""How a response is sent, as events while it is generated or whole. Of server-sent events ``SseEncoder`` writes deltas
as the OpenAI API's chunks, and ``SseStream`` sends them on one connection and keeps it alive.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quote  # as json.dumps writes a string, in a quarter of the time
from types import TracebackType
from typing import Any, Final, Self

from quire_proto.errors import QuireError, internal

from quire_router.api.output_parser import ParsedDelta, create_parsers
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.rest.http import (
    JSON_HEADERS,
    SSE_HEADERS,
    ClientDisconnectedError,
    DirectWriter,
    Header,
    HttpExchange,
    HttpResponse,
    json_text,
    to_json,
    x_headers,
)
from quire_router.api.rest.logprobs import LogprobLists, LogprobsRenderer, number
from quire_router.api.rest.openai_format import (
    CompletionBuilder,
    OpenAiFormat,
    delta_json,
    error_object,
    usage_object,
)
from quire_router.api.service import Response, started_choices
from quire_router.core.generation import Delta, DeltaStream, StreamCursor, Usage

DONE: Final = b"data: [DONE]\n\n"
_NO_USAGE: Final = b',"usage":null}\n\n'

RECONNECT: Final = b"retry: 1000\n"
"""The milliseconds that a client waits before it reconnects; a line of the event that follows it. Only where events
have ids: many clients that know only ``data:`` fail on any other line.
"""


async def stream(
    exchange: HttpExchange, style: OpenAiFormat, answer: Response, headers: Mapping[str, str], keepalive: "KeepAlive"
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


def _begin(exchange: HttpExchange, events: "SseStream", encoder: "SseEncoder", delta: Delta) -> bytes:
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


class SseEncoder:
    """Encodes each delta as one event, also the last of its choice: the event id, where ids were requested, is the
    client's cursor after the delta, so that it can resume with Last-Event-ID. Parts that do not change between tokens
    are rendered once. Does no I/O.
    """

    __slots__ = (
        "_advances_cursor",
        "_after",
        "_before",
        "_choices",
        "_closed",
        "_continuous_usage",
        "_cursor",
        "_end",
        "_has_ids",
        "_head",
        "_parsers",
        "_prompts",
        "_starts",
        "_style",
        "_usage",
        "logprobs",
    )

    def __init__(self, style: OpenAiFormat, prepared: PreparedRequest, cursor: StreamCursor) -> None:
        self.logprobs: LogprobsRenderer | None = None
        if prepared.has_logprobs:
            started = started_choices(cursor, prepared.num_choices)
            self.logprobs = LogprobsRenderer(prepared, style.logprobs_format, started)
        self._parsers = create_parsers(prepared) if prepared.is_parsed else None
        self._style = style
        self._cursor = cursor
        self._has_ids = prepared.event_ids
        self._continuous_usage = prepared.response_options.continuous_usage
        self._advances_cursor = self._has_ids or self._continuous_usage
        self._prompts = [len(each.prompt_token_ids) for each in prepared.generations for _ in range(each.params.n)]
        self._choices = prepared.num_choices
        first = prepared.first
        self._head: dict[str, Any] = {
            "id": style.id_prefix + first.request_id,
            "object": style.chunk_object_type,
            "created": int(first.created),
            "model": first.model_name,
        }
        self._usage: dict[str, Any] = {"usage": None} if prepared.response_options.include_usage else {}
        opening = _unclosed(self._head)
        starts = [f'data: {opening},"choices":[{{"index":{index},' for index in range(self._choices)]
        self._before = [start + style.delta_prefix for start in starts]
        self._starts = [f'{start}"delta":' for start in starts]
        no_usage = ',"usage":null' if self._usage else ""
        self._closed = f"}}]{no_usage}}}\n\n"
        self._end = f',"finish_reason":null{self._closed}'
        self._after = f'{style.delta_suffix},"logprobs":null{self._end}'

    def opening(self) -> bytes:
        """Returns the first chunks of a chat: the role of each choice that the client has had nothing of."""
        if self._style.first_choice is None:
            return b""
        return b"".join(self._open(index) for index in range(self._choices) if not self._cursor.started(index))

    def encode(self, delta: Delta) -> bytes:
        """Returns the events of a delta: none, text, the end of its choice. A delta with the usage ends the stream."""
        logprobs = self.logprobs.logprobs(delta) if self.logprobs is not None else ()
        if self._parsers is not None:
            data = self._encode_parsed(self._parsers[delta.index].parse(delta), delta, logprobs)
        else:
            data = b"" if delta.replayed else self._encode_text(delta, logprobs)
        if data and self._continuous_usage:
            data = self._with_usage(data, delta.index)
        return data if delta.usage is None else data + self._closing(delta.usage)

    def encode_token(self, index: int, token_id: int, text: str) -> bytes:
        """As ``encode`` of a delta that is one token of choice ``index`` and its text."""
        if self._advances_cursor or self._parsers is not None or self.logprobs is not None:
            return self.encode(Delta(text, [token_id], index=index))
        if text:
            return f"{self._before[index]}{_quote(text)}{self._after}".encode("ascii")
        return b""

    def _encode_text(self, delta: Delta, logprobs: LogprobLists) -> bytes:
        line = self._advance(delta) if self._advances_cursor else ""
        if delta.finish_reason is not None:
            return self._encode_last(line, delta, logprobs)
        if any(logprobs):  # also without text: tokens may come before their text
            text = self._before[delta.index] + _quote(delta.text) + self._style.delta_suffix
            text += f',"logprobs":{self._logprobs_object(logprobs)}{self._end}'
            return f"{line}{text}".encode("ascii")
        if delta.text:
            return f"{line}{self._before[delta.index]}{_quote(delta.text)}{self._after}".encode("ascii")
        return b""

    def _encode_parsed(self, parsed: ParsedDelta, delta: Delta, logprobs: LogprobLists) -> bytes:
        """Encodes a delta of a choice that may have reasoning or tool calls. It is one event too, whatever it holds."""
        if delta.replayed:
            return b""
        line = self._advance(delta) if self._advances_cursor else ""
        if not (parsed.has_output or any(logprobs)):
            return b""
        start = f"{line}{self._starts[delta.index]}{delta_json(parsed)}"
        if not any(logprobs) and parsed.finish_reason is None:
            return f'{start},"logprobs":null{self._end}'.encode("ascii")
        logprobs_json = self._logprobs_object(logprobs)
        score = "" if delta.score is None else f',"score":{number(delta.score)}'
        end = f',"logprobs":{logprobs_json},"finish_reason":{json_text(parsed.finish_reason)}{score}{self._closed}'
        return f"{start}{end}".encode("ascii")

    def _encode_last(self, line: str, delta: Delta, logprobs: LogprobLists) -> bytes:
        """Encodes the last delta of a choice, behind the ``line`` with its id."""
        logprobs_json = self._logprobs_object(logprobs)
        if delta.text or logprobs_json != "null":
            choice = self._before[delta.index] + _quote(delta.text) + self._style.delta_suffix
        else:
            closing = _unclosed({"index": delta.index, **self._style.last_choice})
            choice = f'data: {_unclosed(self._head)},"choices":[{closing}'
        score = "" if delta.score is None else f',"score":{number(delta.score)}'
        end = f',"logprobs":{logprobs_json},"finish_reason":"{delta.finish_reason}"{score}{self._closed}'
        return f"{line}{choice}{end}".encode("ascii")

    def _logprobs_object(self, logprobs: LogprobLists) -> str:
        return self.logprobs.logprobs_object(logprobs) if self.logprobs is not None and any(logprobs) else "null"

    def _closing(self, usage: Usage) -> bytes:
        """Returns the usage, where it was requested and not sent before, and the end mark."""
        if not self._usage or self._cursor.usage:
            return DONE
        self._cursor.usage = True
        return self._event({**self._head, "choices": [], "usage": usage_object(usage)}) + DONE

    def _open(self, index: int) -> bytes:
        self._cursor.open(index)
        choice = {"index": index, **(self._style.first_choice or {}), "logprobs": None, "finish_reason": None}
        data = self._event({**self._head, "choices": [choice], **self._usage})
        return self._with_usage(data, index) if self._continuous_usage else data

    def _with_usage(self, data: bytes, index: int) -> bytes:
        """Adds to an event the usage of its choice so far: as in vLLM, the tokens of its prompt and its own."""
        prompt, completion = self._prompts[index], self._cursor.position(index)
        tokens = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d' % (
            prompt,
            completion,
            prompt + completion,
        )
        return data.removesuffix(_NO_USAGE) + b',"usage":{' + tokens + b"}}\n\n"

    def _event(self, chunk: dict[str, Any]) -> bytes:
        line = f"id: {self._cursor}\n".encode("ascii") if self._has_ids else b""
        return line + event(chunk)

    def _advance(self, delta: Delta) -> str:
        """Advances the cursor by ``delta``; returns the line with the id of its event, empty without ids."""
        self._cursor.advance(delta)
        return f"id: {self._cursor!s}\n" if self._has_ids else ""


def event(value: object) -> bytes:
    """Returns one server-sent event with ``value`` as JSON."""
    return b"data: " + to_json(value) + b"\n\n"


def error_event(error: QuireError, request_id: str, *, resumable: bool, event_ids: bool) -> bytes:
    """Returns the last event of a stream that fails. ``resumable`` says whether it can be resumed, here or at another
    router; with ``event_ids`` the event then says after which time.
    """
    fields = error_object(error, request_id)
    fields["error"]["resumable"] = resumable
    return (RECONNECT if resumable and event_ids else b"") + event(fields)


def _unclosed(value: dict[str, Any]) -> str:
    """Returns a JSON object without its closing brace."""
    return json_text(value)[:-1]


HEARTBEAT_WITH_IDS: Final = b": waiting\n"
"""A comment between events with ids: one line, with no empty line behind it. That would end an event, and clients that
repeat the last id (openai-python, httpx-sse) take it for one without data.
"""

HEARTBEAT: Final = b": keep-alive\n\n"
"""A comment between events without ids, with an empty line of its own: clients that split at empty lines would take it
for a part of the event behind it.
"""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Seconds without an event after which a comment is sent; 0 for never. Streams ``with_ids`` have their own: clients
    that read ids accept comments, and of those that know only ``data:`` many do not.
    """

    seconds: float = 15.0
    with_ids: float = 5.0


KEEPALIVE: Final = KeepAlive()


class SseStream:
    """Sends events on one response. The response starts with its first event or, when that takes longer than
    ``keepalive`` says, with a comment; until then an error can still have a status of its own. Whenever nothing was
    written for so long, a comment follows. Events and comments never interleave. With ``ids`` the stream begins with
    the time after which a client reconnects. To be used as a context, by one task.
    """

    __slots__ = (
        "_comment",
        "_disconnected",
        "_heartbeat_task",
        "_opening",
        "_response",
        "_seconds",
        "_timer",
        "direct",
        "headers",
        "is_busy",
        "last_write",
        "loop",
    )

    def __init__(self, response: HttpResponse, keepalive: KeepAlive, *, ids: bool) -> None:
        self.headers: list[Header] = []
        self._response = response
        self._seconds = keepalive.with_ids if ids else keepalive.seconds
        self._comment, self._opening = (HEARTBEAT_WITH_IDS, RECONNECT) if ids else (HEARTBEAT, b"")
        self.loop = asyncio.get_running_loop()
        self.last_write = self.loop.time()
        self.is_busy = False  # a write is in progress, or the client has disconnected
        self._disconnected = False
        self.direct: DirectWriter | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._timer = self.loop.call_at(self.last_write + self._seconds, self._check_idle) if self._seconds else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop_timer()
        if self._heartbeat_task is not None:
            if kind is not None and not issubclass(kind, Exception):
                self._heartbeat_task.cancel()
            await asyncio.wait([self._heartbeat_task])

    async def write(self, data: bytes) -> None:
        """Writes some events."""
        await self._response.write(await self._prepare() + data)
        self.is_busy = False

    def write_now(self, data: bytes) -> None:
        """Writes some events without waiting. Only while ``SseDeltaSink.is_open``."""
        assert self.direct is not None  # else the sink is not open
        self.last_write = self.loop.time()
        self.direct.write(data)

    async def end(self, data: bytes) -> None:
        """Writes the last events."""
        await self._response.end(await self._prepare() + data)

    async def _prepare(self) -> bytes:
        """Waits for a comment that is being written, and starts the response; returns what comes before its first
        event.
        """
        self.last_write = self.loop.time()
        if self._heartbeat_task is not None and not self._heartbeat_task.done():
            await asyncio.wait([self._heartbeat_task])
        if self._disconnected:
            raise ClientDisconnectedError
        self.is_busy = True
        return b"" if self._response.started else await self._start()

    async def _start(self) -> bytes:
        await self._response.start(200, (*SSE_HEADERS, *self.headers))
        if self._response.direct is not None and self._response.direct.is_streaming:
            self.direct = self._response.direct
        return self._opening

    def _check_idle(self) -> None:
        """Writes a comment if nothing was written for long enough, and checks again later."""
        now = self.loop.time()
        if now >= self.last_write + self._seconds:
            self.last_write = now
            if not self.is_busy:
                self.is_busy = True
                self._heartbeat_task = self.loop.create_task(self._heartbeat(), name="heartbeat")
        self._timer = self.loop.call_at(self.last_write + self._seconds, self._check_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _heartbeat(self) -> None:
        try:
            first = b"" if self._response.started else await self._start()
            await self._response.write(first + self._comment)
        except ClientDisconnectedError:
            self._disconnected = True  # the next write raises
            self._stop_timer()
        finally:
            self.is_busy = self._disconnected


class SseDeltaSink:
    """Writes deltas as events, without waiting: the direct path's end (``core.generation.DeltaSink``)."""

    __slots__ = ("_encoder", "_stream")

    def __init__(self, stream: SseStream, encoder: SseEncoder) -> None:
        self._stream = stream
        self._encoder = encoder

    @property
    def is_open(self) -> bool:
        """Whether an event can be written without waiting."""
        stream = self._stream
        if stream.is_busy or (direct := stream.direct) is None:
            return False
        return direct.is_open

    def write(self, delta: Delta) -> None:
        """Writes what a delta adds, if that is anything."""
        data = self._encoder.encode(delta)
        if data:
            self._stream.write_now(data)

    def write_token(self, index: int, token_id: int, text: str) -> None:
        """Writes what a token adds, if that is anything."""
        data = self._encoder.encode_token(index, token_id, text)
        stream = self._stream
        if data and (direct := stream.direct) is not None:
            stream.last_write = stream.loop.time()
            direct.write(data)
