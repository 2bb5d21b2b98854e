"""A light HTTP/1.1 client for streams: it notes when each piece of a body arrives, and nothing more.

On a machine that also runs the server, the client competes with what it measures. An event costs this one about 3 µs
of processor time, most of it the kernel's; aiohttp's client took 5 to 7 µs and httpx 25 to 32 µs (64 streams, an event
each 20 ms, uvloop), before either has parsed an event.
"""

import asyncio
import json
import os
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from quire_cli.bench.stream import Recording
from quire_cli.machine.server import WRONG_KEY, no_server, not_http, other_server

NOT_HTTP = "The answer is not HTTP"  # how a failure begins
MAX_IDLE = 2.0  # seconds; servers close idle connections after 5 or more
MAX_BODY = 1 << 30  # bytes of one response


class ServerError(Exception):
    """The server cannot be reached, or does not answer as it should. The text is one sentence."""


class HttpClient:
    """Connections to one server. ``headers`` are sent with every request. A request may take ``timeout`` seconds in
    all. ``now`` is the clock that recordings are made with.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        timeout: float = 3600.0,
        insecure: bool = False,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.now = now
        self._url = _parse_url(base_url)
        self._timeout = timeout
        self._tls = _tls_context(insecure) if self._url.scheme == "https" else None
        self._headers = {"Host": self._url.netloc.rpartition("@")[2], "User-Agent": "quire-bench", **headers}
        self._idle: deque[Connection] = deque()

    async def post(self, path: str, body: bytes, recording: Recording) -> None:
        """Sends ``body`` to ``path``, which is below the base URL, and records what comes back. Never raises for what
        the server does: that is the recording's ``failure``.
        """
        recording.start = self.now()
        try:
            async with asyncio.timeout(self._timeout or None):
                await self._exchange(self._head("POST", path, len(body)) + body, recording)
        except TimeoutError:
            recording.failure = f"No complete answer within {self._timeout:g} s (--request-timeout)."
        except OSError as error:
            recording.failure = _describe(error)
        recording.end = self.now()

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at ``path``. Raises ``ServerError``."""
        recording = Recording()
        try:
            async with asyncio.timeout(min(self._timeout, 30.0) or None):
                await self._exchange(self._head("GET", path, 0), recording)
        except ConnectionRefusedError:
            raise ServerError(no_server(self._url.geturl())) from None
        except OSError as error:  # TimeoutError is one
            recording.failure = _describe(error)
        where = f"{self._url.geturl()}{path}"
        if recording.status == 401:
            raise ServerError(f"{where} refuses the key: {WRONG_KEY}.")
        if recording.failure.startswith(NOT_HTTP):
            raise ServerError(not_http(self._url.geturl()))
        if recording.failure:
            raise ServerError(f"{where}: {recording.failure.rstrip('.')}.")
        if recording.status != 200:
            raise ServerError(other_server(self._url.geturl(), recording.status))
        try:
            body = json.loads(b"".join(recording.pieces))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ServerError(f"{where} is not a JSON object.")
        return body

    def close(self) -> None:
        """Closes all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, recording: Recording) -> None:
        connection = await self._connect()
        try:
            await connection.exchange(request, recording)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> "Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and self.now() - connection.idle_since < MAX_IDLE:
                return connection
            connection.close()
        port = self._url.port or (443 if self._tls else 80)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: Connection(self.now), self._url.hostname or "", port, ssl=self._tls
        )
        return made

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self._url.path.rstrip('/')}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._transport: asyncio.Transport | None = None
        self._recording = Recording()
        self._done: asyncio.Future[None] | None = None
        self._read_at = 0.0
        self._size = 0
        self._framed = False
        self._keep_alive = False
        self.idle_since = 0.0

    @property
    def is_reusable(self) -> bool:
        """Whether it is open and idle, after a response that allows another request."""
        return self._keep_alive and self._done is None and self._transport is not None

    async def exchange(self, request: bytes, recording: Recording) -> None:
        """Sends a whole request and records the response until its end, or until the connection is lost. Raises
        ``OSError`` if it is lost already.
        """
        if self._transport is None:
            raise ConnectionResetError("The connection was closed at once")
        self._recording, self._size, self._framed, self._keep_alive = recording, 0, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._done
        finally:
            self._done, self.idle_since = None, self._now()

    def close(self) -> None:
        """Closes it at once."""
        self._keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._done is None:  # nothing was asked, so nothing can be answered
            self.close()
            return
        self._read_at = self._now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"{NOT_HTTP}: {str(error).rstrip('.')}.")

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``. Without a length or chunks, the body ends with the connection."""
        self._transport, self._keep_alive = None, False
        if exc is None and self._recording.status and not self._framed:
            self._end("")
        elif self._recording.status:
            self._end("The connection was closed within the answer.")
        else:
            self._end("The connection was closed before an answer.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools.HttpResponseParser``."""
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lower == b"retry-after":
            self._recording.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """See ``httptools.HttpResponseParser``."""
        self._recording.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """See ``httptools.HttpResponseParser``."""
        self._recording.times.append(self._read_at)
        self._recording.pieces.append(body)
        self._size += len(body)
        if self._size > MAX_BODY:
            self._end(f"The answer is larger than {MAX_BODY} bytes.")

    def on_message_complete(self) -> None:
        """See ``httptools.HttpResponseParser``."""
        self._keep_alive = self._parser.should_keep_alive()
        self._end("")

    def _end(self, failure: str) -> None:
        if self._done is not None and not self._done.done():
            self._recording.failure = failure
            self._done.set_result(None)


def _parse_url(base_url: str) -> SplitResult:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ServerError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000.")
    return url


def _describe(error: OSError) -> str:
    number = error.errno or 0  # negative where a name is not found
    return f"{type(error).__name__}: {os.strerror(number) if number > 0 else error}"


def _tls_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
