"""How an answer is written over HTTP: as events while it comes, or whole."""

from collections.abc import Mapping
from contextlib import aclosing

from quire_proto.errors import internal

from quire_router.api.answer import Response
from quire_router.api.rest.answers import OpenAiFormat
from quire_router.api.rest.chunks import SseEncoder
from quire_router.api.rest.connection import JSON_HEADERS, Header
from quire_router.api.rest.events import KeepAlive, SseStream
from quire_router.api.rest.exchange import HttpExchange
from quire_router.api.rest.whole import CompletionBuilder
from quire_router.generation import Delta
from quire_router.shortcut import DeltaStream


async def stream(
    exchange: HttpExchange, style: OpenAiFormat, answer: Response, notes: Mapping[str, str], keepalive: KeepAlive
) -> None:
    """Sends each piece as it comes. What goes wrong before anything is sent has its own status. Raises
    ``QuireError``, INTERNAL for an answer that ends before its usage: it is never passed on as a complete one.
    """
    chunks = SseEncoder(style, answer.prepared, answer.cursor)
    exchange.event_ids = answer.prepared.event_ids
    opening = SseStream(exchange.reply, keepalive, ids=exchange.event_ids)
    async with aclosing(answer.deltas) as deltas, opening as events:
        events.headers += x_headers(notes)
        async for delta in deltas:
            if chunks.shown.anything:
                await chunks.shown.read(delta)
            data = chunks.encode(delta) if exchange.has_output else _begin(exchange, events, chunks, delta)
            if delta.usage is not None:
                await events.end(data)
                return
            if data:
                await events.write(data)
            if isinstance(deltas, DeltaStream) and deltas.direct_path.sink is None and not chunks.shown.anything:
                deltas.direct_path.sink = _SseDeltaSink(events, chunks)
    raise internal()


class _SseDeltaSink:
    """Writes pieces that come by the shortcut, after the first."""

    __slots__ = ("_chunks", "_events")

    def __init__(self, events: SseStream, chunks: SseEncoder) -> None:
        self._events = events
        self._chunks = chunks

    @property
    def is_open(self) -> bool:
        """See ``shortcut.Writer``."""
        return self._events.is_open

    def write(self, delta: Delta) -> None:
        """See ``shortcut.Writer``."""
        data = self._chunks.encode(delta)
        if data:
            self._events.write_now(data)


def _begin(exchange: HttpExchange, events: SseStream, chunks: SseEncoder, delta: Delta) -> bytes:
    """The first piece, with what comes before it."""
    exchange.has_output = True
    events.headers += route_headers(delta)
    return chunks.opening() + chunks.encode(delta)


async def collect_completion(answer: Response, style: OpenAiFormat) -> tuple[bytes, list[Header]]:
    """The whole answer as JSON, and headers that belong to it. Raises as ``stream`` does."""
    whole, headers = CompletionBuilder(style, answer.prepared), list[Header]()
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            if whole.shown.anything:
                await whole.shown.read(delta)
            whole.add(delta)
            headers = headers or route_headers(delta)
            if delta.usage is not None:
                return await whole.body(delta.usage), headers
    raise internal()


async def send_completion(
    exchange: HttpExchange, style: OpenAiFormat, answer: Response, notes: Mapping[str, str]
) -> None:
    """Sends an answer once it is complete. Raises as ``stream`` does."""
    body, headers = await collect_completion(answer, style)
    await exchange.reply.send(200, body, [*JSON_HEADERS, *x_headers(notes), *headers])


def route_headers(delta: Delta) -> list[Header]:
    """Where the request runs, where a piece tells it."""
    return [(b"x-quire-route", delta.route.encode("ascii", "replace"))] if delta.route else []


def x_headers(notes: Mapping[str, str]) -> list[Header]:
    """What an answer says of itself."""
    return [(b"x-" + name.encode("ascii"), value.encode("ascii")) for name, value in notes.items()]
