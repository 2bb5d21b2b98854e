"""One client's connection during one request: reading its body, noticing that it left, writing the answer."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Send

from quire_router.api.patience import WriteTimeout
from quire_router.api.rest.direct import DirectWriter
from quire_router.api.rest.refusals import body_too_large, body_too_slow
from quire_router.api.running import ReservedBody

T = TypeVar("T")
Header = tuple[bytes, bytes]
JSON_HEADERS: tuple[Header, ...] = ((b"content-type", b"application/json"),)
SSE_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to collect events
)
_AT_A_TIME = 256 * 1024  # bytes


class ClientDisconnectedError(Exception):
    """The client disconnected, or did not read for too long. There is nobody left to tell."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most bytes of a request's body, and the seconds within which it must arrive."""

    max_bytes: int
    patience: float


async def read_body(receive: Receive, limits: BodyLimits, body: ReservedBody) -> None:
    """Reads all of ``body``, whatever its length was said to be. Raises ``HttpError``, ``ClientDisconnectedError``, and
    ``QuireError`` OVERLOADED where more comes than there is room for.
    """
    try:
        async with asyncio.timeout(limits.patience):
            await _read(receive, limits.max_bytes, body)
    except TimeoutError:
        raise body_too_slow(limits.patience) from None


async def _read(receive: Receive, limit: int, body: ReservedBody) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        data, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(data) > limit:
            raise body_too_large(limit)
        body.append(data)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled at once when the client disconnects. The body must have been read.
    Raises ``ClientDisconnectedError``.
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        left.cancel()
        task.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class HttpResponse:
    """The answer on its way: it starts once, names the request that it answers, and every write ends within
    ``patience`` seconds or the client is given up.
    """

    def __init__(self, send: Send, patience: float, request_id: str, direct: DirectWriter | None = None) -> None:
        self.request_id = request_id
        self.direct = direct  # for what can be written without waiting
        self.extra_headers: Callable[[], Iterable[Header]] = tuple  # what its head says beside, as it is then
        self._send = send
        self._patience = WriteTimeout(patience)
        self.started = False
        self.ended = False

    async def send(self, status: int, body: bytes, headers: Iterable[Header] = JSON_HEADERS) -> None:
        """An answer whose length is known. A long one is written bit by bit, so that patience is for each of them."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, (*headers, length))
        last = max(0, len(body) - 1) // _AT_A_TIME * _AT_A_TIME
        for begin in range(0, last, _AT_A_TIME):
            await self.write(body[begin : begin + _AT_A_TIME])
        await self.end(body[last:])

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Status and headers."""
        self.started = True
        named = [*headers, *self.extra_headers(), (b"x-request-id", self.request_id.encode("ascii"))]
        await self._write({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes) -> None:
        """Some of the body."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last of the body."""
        self.ended = True
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Lets go of the client."""
        self._patience.close()

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            await self._patience.wait(self._send(message))
        except OSError:  # the connection broke, or (TimeoutError) the client does not read
            raise ClientDisconnectedError from None
