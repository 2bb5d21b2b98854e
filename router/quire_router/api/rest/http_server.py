"""The HTTP server: ``HttpServer`` runs an ASGI application in the router's own event loop with uvicorn, and
``LimitedHttpProtocol`` adds the limits that uvicorn lacks: the size of a head and the time that it takes, the requests
that are pipelined on one connection, and the number of connections. Refusals look as the application's.
"""

import asyncio
import errno
import logging
import math
import os
import re
import select
import socket
from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, ClassVar

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from quire_proto.cli import describe_listen_error
from quire_proto.errors import QuireError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire_router.api.request_limits import ConnectionShares, peer_key
from quire_router.api.rest.http import (
    DIRECT,
    EXTENSION,
    DirectWriter,
    HttpError,
    head_too_large,
    head_too_slow,
    no_tunnel,
    not_http,
    too_many_headers,
    unknown_coding,
    unknown_version,
    wrong_host,
)
from quire_router.api.rest.openai_format import error_response
from quire_router.api.service import new_request_id
from quire_router.core.errors import router_busy

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 128  # each costs the loop a microsecond or two before any key is looked at
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
MAX_PIPELINED = 16  # requests that wait on one connection for the response to another
_DISCONNECT_CHECK_PERIOD = 1.0  # seconds between checks of a client from which nothing is read
_EVICT_TIMEOUT = 1.0  # seconds in which an evicted connection sends what was written
_POLL_DISCONNECT = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere poll still reports a broken connection


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """At most ``connections`` at once on one port, shared between peers' addresses as ``ConnectionShares`` says. A
    request's head arrives within ``head`` seconds, and a connection may wait ``idle`` seconds for its next request:
    longer than load balancers keep one that they may still use, of which Google's keep it for 600.
    """

    connections: int = 4096
    head: float = 30.0
    idle: float = 620.0
    peer_share: float = 0.5


class LimitedConfig(Config):
    """uvicorn's configuration, which it hands to each connection's protocol, with the limits and shares of the port."""

    limits: ConnectionLimits
    shares: ConnectionShares


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol alone would collect a head without end, wait for the rest of it, or for the next one, for
    ever, and take any number of pipelined requests.

    One timer runs while no request is being answered: until the first head is complete, and again from each response
    on. While requests wait, nothing is read from the client, and ``_disconnect_timer`` checks whether it is still
    connected. ``_abort_timer`` ends a connection that is closing: a transport waits for its client to take what was
    written.

    A response that starts before the request's body has arrived, as errors do, is the last one on its connection: some
    proxies then send no more of the body, and another request in its place (HAProxy 2.6 between HTTP/2 and 1.1). The
    rest of the body is read and thrown away (``_linger``): the kernel answers what nobody reads with a reset, for which
    proxies drop the response and say 502.
    """

    def __init__(
        self,
        config: LimitedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits, self._shares = config.limits, config.shares
        self._timer: asyncio.TimerHandle | None = None
        self._disconnect_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._head_begun = False
        self._in_body = False
        self._lingering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, unless there are too many and none of them is idle."""
        super().connection_made(transport)
        if self._shares.add(self, peer_key(self.client[0] if self.client else "")):
            self._start_timer(self._limits.head)
        else:
            self._refuse(router_busy(f"{self._limits.connections} connections are open"))

    def evict(self) -> None:
        """Closes this connection in favour of another one; only while nothing is answered on it."""
        self._close(_EVICT_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every request on this connection, of which uvicorn ends only the last one, and stops the timers."""
        self._stop_timer()
        self._shares.remove(self)
        for timer in (self._disconnect_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses ``data``, and sends errors that the callbacks below raise. Ignores it on a closing connection."""
        if self._lingering or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, (HttpError, QuireError)) else not_http())
        else:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))

    def _feed(self, data: bytes) -> None:
        """Parses all of ``data``. At a head that offers another protocol the parser stops, and a new one goes on behind
        it. Raises ``HttpParserError``.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                self._ignore_upgrade()
            else:
                return

    def _ignore_upgrade(self) -> None:
        """Reads the head that is complete just now once more, without its offer of another protocol: it is as if the
        client had offered nothing, as RFC 9110 (7.8) allows. The parser would take such a request for the last one on
        its connection, and for one without a body; some clients offer HTTP/2 with their first request, whatever it is.
        Raises ``HttpParserError``, and ``HttpParserUpgrade`` if there is still an offer.
        """
        old, self.parser = self.parser, HttpRequestParser(self)
        # As uvicorn sets it: bytes behind a request with ``Connection: close`` are ignored.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        version = old.get_http_version().encode("ascii")
        head = b"%b %b HTTP/%b\r\n" % (old.get_method(), self.url, version)
        kept = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        last = b"" if old.should_keep_alive() else b"connection: close\r\n"
        self.parser.feed_data(b"".join([head, *kept, last, b"\r\n"]))

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_begun = True
        if not self._answering:
            self._start_timer(self._limits.head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Trailers are left out: whatever decides about a request was decided before its body, by proxies
        too (RFC 9110, 6.5.1). Raises ``HttpError``.
        """
        if self._head_begun:
            if len(self.headers) == MAX_HEADERS:
                raise too_many_headers(MAX_HEADERS)
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise head_too_large(MAX_HEAD_BYTES)

    def on_headers_complete(self) -> None:
        """A head is complete; the application judges its size. Raises ``HttpError`` and ``QuireError``."""
        if self.parser.get_method() == b"CONNECT":
            raise no_tunnel()
        check_head(self.parser.get_http_version(), self.headers)
        if self.parser.should_upgrade():
            return  # ``_ignore_upgrade`` comes next
        self._head_begun, self._head_bytes, self._trailer_bytes, self._in_body = False, 0, 0, True
        self._stop_timer()
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.flow.read_paused and self._disconnect_timer is None:
            self._disconnect_timer = self.loop.call_later(_DISCONNECT_CHECK_PERIOD, self._check_disconnect)
        if len(self.pipeline) > MAX_PIPELINED:
            raise router_busy(f"{MAX_PIPELINED} requests wait on this connection")
        if self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: {DIRECT: DirectWriter(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        """The application judges how much of it there is."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request's head may come."""
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            self._in_body = False
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, partial(self._respond, cycle, app))

    async def _respond(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs the application for one request, with what uvicorn's way of sending lacks."""
        is_delimited = True  # by a length, or as chunks

        def sending(message: Message) -> Awaitable[None]:
            nonlocal is_delimited
            if message["type"] == "http.response.start":
                cycle.keep_alive = cycle.keep_alive and not cycle.more_body
                is_delimited = scope["http_version"] != "1.0" or any(
                    name == b"content-length" for name, _ in message["headers"]
                )
                if not is_delimited:
                    cycle.chunked_encoding = False
                return send(message)
            is_last = not message.get("more_body", False)
            if not is_delimited:  # chunks are not known in HTTP/1.0 (RFC 9112, 6.1): the connection's end is the body's
                cycle.expected_content_length = len(message.get("body", b"")) + (not is_last)
            if is_last and cycle.more_body:
                return self._send_and_linger(cycle, message, send)
            return send(message)

        await app(scope, receive, sending)

    async def _send_and_linger(self, cycle: RequestResponseCycle, message: Message, send: Send) -> None:
        cycle.keep_alive = True  # else uvicorn closes the connection; the response's head said that it is the last one
        self._lingering = True  # before this waits for the client: what it sends meanwhile is no other request
        await send(message)
        if not self.transport.is_closing():
            self._linger(self._limits.head)

    def _linger(self, seconds: float) -> None:
        """Says that nothing more will be sent, and takes no notice of what arrives until the client closes the
        connection, for at most ``seconds``.
        """
        self.transport.write_eof()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def on_response_complete(self) -> None:
        """A request is answered, also one whose body is still coming."""
        if self._unanswered:
            answered = self._unanswered.popleft()
            answered.body = bytearray()  # it would stay in memory as long as the connection idles
        super().on_response_complete()
        if self.transport.is_closing():
            self._close(self._limits.head)
        elif not self._answering:
            self._start_timer(self._limits.head if self._head_begun else self._limits.idle)

    @property
    def _answering(self) -> bool:
        return bool(self._unanswered)

    def _refuse(self, error: HttpError | QuireError) -> None:
        """Closes the connection, with an error response where one can still start: not within another one, and not
        behind the one to a request whose body is still arriving.
        """
        is_answered = self._in_body and self.cycle is not None and self.cycle.response_complete
        if not (is_answered or (self._answering and self._unanswered[0].response_started)):
            request_id = new_request_id()
            status, body, headers = error_response(error, request_id)
            fields = [*headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
            head = b"".join(b"%s: %s\r\n" % field for field in fields)
            self.transport.write(b"%s%scontent-length: %d\r\n\r\n%s" % (STATUS_LINE[status], head, len(body), body))
        self._close(self._limits.head)

    def _close(self, seconds: float) -> None:
        """Closes the connection once the client has taken what was written to it, or else after ``seconds``."""
        self.transport.close()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _check_disconnect(self) -> None:
        """Aborts the connection of a client that has left: while nothing is read, its end is not noticed either."""
        self._disconnect_timer = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _POLL_DISCONNECT)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._disconnect_timer = self.loop.call_later(_DISCONNECT_CHECK_PERIOD, self._check_disconnect)

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._on_timeout)
        self._shares.mark_idle(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._shares.mark_busy(self)

    def _on_timeout(self) -> None:
        if self._head_begun:
            self._refuse(head_too_slow(self._limits.head))
        else:
            self._close(self._limits.head)


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuses a head that another server or a proxy may read in another way than this one. Raises ``HttpError`` as
    RFC 9112 says: 505 for another HTTP version than 1.0 and 1.1, 400 where there is not exactly one valid Host (none
    is needed in 1.0) or a transfer coding in 1.0, 501 for another transfer coding than ``chunked``. Names of headers
    are in small letters.
    """
    if version not in ("1.0", "1.1"):
        raise unknown_version() if version != "0.9" else not_http()
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts) or not all(map(_HOST.fullmatch, hosts)):
        raise wrong_host()
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        raise not_http()
    if codings not in ([], [b"chunked"]):
        raise unknown_coding()


_TICKS = 10  # of the server, a second together
_LOG_PERIOD = 30.0  # seconds from one line about descriptors to the next


class HttpServer(uvicorn.Server):
    """Serves one application on one socket. Does not handle signals."""

    _next_log: ClassVar[float] = 0.0  # of the process: its servers share its descriptors

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: ConnectionLimits | None = None) -> None:
        super().__init__(http_config(app, limits or ConnectionLimits()))
        self._listener = listener
        self.port: int = listener.getsockname()[1]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process that runs the server."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Logs, at most every ``_LOG_PERIOD``, that no file descriptor is left: the event loop then closes new
        connections silently. Returns True when the server ends.
        """
        if counter % _TICKS == 0 and monotonic() >= HttpServer._next_log and not _is_descriptor_left():
            HttpServer._next_log = monotonic() + _LOG_PERIOD
            log.error("no file descriptor is left (ulimit -n): new connections are closed until some others end")
        return await super().on_tick(counter)

    async def run_until_stopped(self) -> None:
        """Serves until ``should_exit`` is set and the last responses are sent."""
        await self.serve([self._listener])


def http_config(app: ASGIApp, limits: ConnectionLimits) -> LimitedConfig:
    """Returns uvicorn's configuration for ``app``, with connections within ``limits``."""
    config = LimitedConfig(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    config.limits = limits
    config.shares = ConnectionShares(limits.connections, limits.peer_share)
    config.timeout_keep_alive = math.ceil(limits.idle)
    return config


def listen(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """Returns a socket that listens on ``host`` and ``port`` (0: any free one), which ``flag`` sets; with ``shared``
    other processes may listen on the same port. Raises ``OSError``, whose text names the flag.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former process may linger
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"{describe_listen_error(flag, host, port, error)}.") from error
    return listener


def _is_descriptor_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
