"""The connection of one stream of server-sent events: when it begins, and how it is kept from being taken for dead."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from quire_router.api.rest.answers import RECONNECT
from quire_router.api.rest.connection import SSE_HEADERS, ClientDisconnectedError, Header, HttpResponse
from quire_router.api.rest.direct import DirectWriter

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
    """Seconds of silence after which a stream has a comment; 0 for none. Streams ``with_ids`` have their own: clients
    that read ids bear comments, and of those that know only ``data:`` many do not.
    """

    seconds: float = 15.0
    with_ids: float = 5.0


KEEPALIVE: Final = KeepAlive()


class SseStream:
    """Begins with its first piece or, when that takes longer than ``keepalive`` says, with a comment; whenever nothing
    else was written for so long, another follows. An error before that can still have a status of its own. Pieces and
    comments never interleave. Says when to come back where its events have ``ids``. To be used as a context, by one
    task.
    """

    __slots__ = (
        "_comment",
        "_direct",
        "_gone",
        "_heartbeat_task",
        "_is_busy",
        "_last",
        "_loop",
        "_opening",
        "_reply",
        "_seconds",
        "_timer",
        "headers",
    )

    def __init__(self, reply: HttpResponse, keepalive: KeepAlive, *, ids: bool) -> None:
        self.headers: list[Header] = []
        self._reply = reply
        self._seconds = keepalive.with_ids if ids else keepalive.seconds
        self._comment, self._opening = (HEARTBEAT_WITH_IDS, RECONNECT) if ids else (HEARTBEAT, b"")
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_busy = False  # something is being written, or nothing can be any more
        self._gone = False
        self._direct: DirectWriter | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_at(self._last + self._seconds, self._check_idle) if self._seconds else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop_looking()
        if self._heartbeat_task is not None:
            if kind is not None and not issubclass(kind, Exception):
                self._heartbeat_task.cancel()
            await asyncio.wait([self._heartbeat_task])

    async def write(self, data: bytes) -> None:
        """Some events."""
        await self._reply.write(await self._prepare() + data)
        self._is_busy = False

    @property
    def is_open(self) -> bool:
        """Whether events can be written without waiting."""
        direct = self._direct
        return direct is not None and not self._is_busy and direct.is_open

    def write_now(self, data: bytes) -> None:
        """Some events. Only while it is open."""
        assert self._direct is not None  # else it was not open
        self._last = self._loop.time()
        self._direct.write(data)

    async def end(self, data: bytes) -> None:
        """The last events."""
        await self._reply.end(await self._prepare() + data)

    async def _prepare(self) -> bytes:
        """Before anything is written: waits for a comment on its way, and begins the answer; gives what comes first."""
        self._last = self._loop.time()
        if self._heartbeat_task is not None and not self._heartbeat_task.done():
            await asyncio.wait([self._heartbeat_task])
        if self._gone:
            raise ClientDisconnectedError
        self._is_busy = True
        return b"" if self._reply.started else await self._start()

    async def _start(self) -> bytes:
        await self._reply.start(200, (*SSE_HEADERS, *self.headers))
        if self._reply.direct is not None and self._reply.direct.is_streaming:
            self._direct = self._reply.direct
        return self._opening

    def _check_idle(self) -> None:
        """Writes a comment if it is time, and looks again later."""
        now = self._loop.time()
        if now >= self._last + self._seconds:
            self._last = now
            if not self._is_busy:
                self._is_busy = True
                self._heartbeat_task = self._loop.create_task(self._heartbeat(), name="heartbeat")
        self._timer = self._loop.call_at(self._last + self._seconds, self._check_idle)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _heartbeat(self) -> None:
        try:
            first = b"" if self._reply.started else await self._start()
            await self._reply.write(first + self._comment)
        except ClientDisconnectedError:
            self._gone = True  # whoever writes the next piece is told
            self._stop_looking()
        finally:
            self._is_busy = self._gone
