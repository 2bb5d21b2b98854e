"""How an answer is sent, in whatever format: whole, or as server-sent events while it is generated, which ``SseStream``
sends on one connection and keeps it alive.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

from quire_proto.errors import internal
from quire_proto.logs import one_line
from quire_proto.sampling import FinishReason

from quire_router.api.response_opener import PENDING, Response
from quire_router.api.rest.answer_format import AnswerFormat, EventEncoder
from quire_router.api.rest.http import (
    JSON_HEADERS,
    SSE_HEADERS,
    ClientDisconnectedError,
    DirectWriter,
    Header,
    HttpExchange,
    HttpResponse,
    x_headers,
)
from quire_router.core.errors import answer_cancelled
from quire_router.core.generation import Delta, DeltaStream, Move
from quire_router.core.retry import spread

_PENDING: Final = (b"x-quire-journal", PENDING.encode("ascii"))
_RECONNECT: Final = 1000  # milliseconds


def reconnect() -> bytes:
    """Returns the line of an event that says how long a client waits before it reconnects. Only where events have ids:
    many clients that know only ``data:`` fail on any other line.
    """
    return b"retry: %d\n" % spread(_RECONNECT)


async def stream(
    exchange: HttpExchange,
    answer_format: AnswerFormat,
    answer: Response,
    headers: Mapping[str, str],
    keepalive: "KeepAlive",
) -> None:
    """Sends each delta as it comes. An error before anything is sent has a status of its own. Raises ``QuireError``,
    INTERNAL for deltas that end without the usage: an incomplete response is never passed on as complete.
    """
    encoder = answer_format.encoder(answer.prepared, answer.cursor, answer.delivered)
    exchange.event_ids, exchange.encoder = answer.prepared.event_ids, encoder
    opening = SseStream(exchange.response, keepalive, ids=exchange.event_ids, heartbeat=answer_format.heartbeat)
    async with aclosing(answer.deltas) as deltas, opening as events:
        events.headers += x_headers(headers)
        async for delta in deltas:
            if encoder.logprobs is not None:
                await encoder.logprobs.read_prompt(delta)
            if _is_cancelled(delta, answer_format):
                if exchange.has_output and (data := encoder.encode(replace(delta, finish_reason=None, usage=None))):
                    await events.write(data)
                raise answer_cancelled()
            data = encoder.encode(delta) if exchange.has_output else _begin(exchange, events, encoder, delta)
            if delta.move is not None and exchange.event_ids:
                data = move_comment(delta.move, named=exchange.shows_fleet) + data
            if delta.usage is not None:
                await events.end(data)
                return
            if data:
                await events.write(data)
            if isinstance(deltas, DeltaStream) and deltas.direct_path.sink is None and encoder.logprobs is None:
                deltas.direct_path.sink = SseDeltaSink(events, encoder)
    raise internal()


def move_comment(move: Move, *, named: bool) -> bytes:
    """Returns the comment that says that an answer left an engine and continues; ``named`` is whether the client may
    know the engines. A line of its own, as ``HEARTBEAT_WITH_IDS``: only clients that read ids accept comments.
    """
    if named:
        said = f"engine {move.lost} lost ({one_line(move.reason)}), continued on {move.engine}"
    else:
        said = "engine lost, continued on another one"
    return f": {said} after {move.seconds:.1f} s\n".encode("ascii", "replace")


def _is_cancelled(delta: Delta, answer_format: AnswerFormat) -> bool:
    """Whether a delta ends an answer because its request was cancelled, and its API knows no such end."""
    return delta.finish_reason is FinishReason.ABORT and not answer_format.tells_cancelled


def _begin(exchange: HttpExchange, events: "SseStream", encoder: EventEncoder, delta: Delta) -> bytes:
    """Returns the events of the first delta, behind those that open the stream."""
    exchange.has_output = True
    events.headers += route_headers(delta)
    return encoder.opening() + encoder.encode(delta)


async def collect(answer: Response, answer_format: AnswerFormat) -> tuple[bytes, list[Header]]:
    """Returns the whole answer as JSON, and headers that belong to it. Raises as ``stream`` does."""
    builder, headers = answer_format.builder(answer.prepared), list[Header]()
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            if _is_cancelled(delta, answer_format):
                raise answer_cancelled()
            if builder.logprobs is not None:
                await builder.logprobs.read_prompt(delta)
            builder.add(delta)
            headers = headers or route_headers(delta)
            if delta.pending:
                headers = [*headers, _PENDING]
            if delta.usage is not None:
                return await builder.body(delta.usage), headers
    raise internal()


async def send_whole(
    exchange: HttpExchange, answer_format: AnswerFormat, answer: Response, headers: Mapping[str, str]
) -> None:
    """Sends an answer once it is complete. Raises as ``stream`` does."""
    body, own = await collect(answer, answer_format)
    given = [header for header in x_headers(headers) if header[0] not in dict(own)]
    await exchange.response.send(200, body, [*JSON_HEADERS, *given, *own])


def route_headers(delta: Delta) -> list[Header]:
    """Returns the header that explains the request's placement, where the delta has it."""
    return [(b"x-quire-route", delta.route.encode("ascii", "replace"))] if delta.route else []


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
    ``keepalive`` says, with a comment, or the ``heartbeat`` of its format; until then an error can still have a status
    of its own. Whenever nothing was written for so long, another follows. Events and comments never interleave. With
    ``ids`` the stream begins with the time after which a client reconnects. To be used as a context, by one task.
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

    def __init__(
        self, response: HttpResponse, keepalive: KeepAlive, *, ids: bool, heartbeat: bytes | None = None
    ) -> None:
        self.headers: list[Header] = []
        self._response = response
        self._seconds = keepalive.with_ids if ids else keepalive.seconds
        comment, self._opening = (HEARTBEAT_WITH_IDS, reconnect()) if ids else (HEARTBEAT, b"")
        self._comment = heartbeat or comment
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

    def __init__(self, stream: SseStream, encoder: EventEncoder) -> None:
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
