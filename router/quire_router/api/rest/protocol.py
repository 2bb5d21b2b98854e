"""One HTTP connection below the application: how much a head may be, how long it may take, how many requests may wait
behind one, and how many connections there are. What it refuses is told as the application would.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from httptools import HttpParserUpgrade, HttpRequestParser
from quire_proto.errors import ErrorCode, QuireError
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire_router.api.frontend import new_request_id
from quire_router.api.rest.answers import error_answer
from quire_router.api.rest.direct import DIRECT, EXTENSION, Direct
from quire_router.api.rest.refusals import HttpError, head_too_large, head_too_slow, not_http
from quire_router.api.running import RETRY_BUSY

MAX_HEAD_BYTES = 16 * 1024
_OFFERS = (b"connection", b"upgrade", b"http2-settings")
MAX_PIPELINED = 16  # requests that wait on one connection for the answer to another


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """At most ``connections`` at once on one port. A request's head arrives within ``head`` seconds, and a connection
    may wait ``idle`` seconds for its next request: longer than load balancers keep one that they may still use.
    """

    connections: int = 4096
    head: float = 30.0
    idle: float = 75.0


class LimitedConfig(Config):
    """uvicorn's configuration, which its protocols are given, with our limits in it."""

    limits: ConnectionLimits


class Declining(Protocol):
    """A connection on which a client may offer another protocol."""

    def decline(self) -> HttpRequestParser:
        """The client offers one in the head that is complete just now: a new parser, which was given the same head
        without that.
        """
        ...


class DecliningParser(HttpRequestParser):
    """The parser alone would take a request that offers another protocol for the last one on its connection, and for
    one without a body. Some clients offer HTTP/2 with their first request, whatever it is.
    """

    def __init__(self, connection: Declining) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn has it: what comes behind a request that asks to be the last one is nobody's, and no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """See ``HttpRequestParser``."""
        parser: HttpRequestParser = self
        while True:
            try:
                HttpRequestParser.feed_data(parser, data)
            except HttpParserUpgrade as offer:
                parser, data = self._connection.decline(), memoryview(data)[offer.args[0] :]
            else:
                return


class LimitedHttpProtocol(HttpToolsProtocol):
    """The parser alone would collect a head without end, and wait for the rest of it, or for the next one, for ever;
    and requests that come before the answer to another would wait in any number.

    One timer runs while no request is being answered: until the first head is complete, and again from each answer on.
    """

    def __init__(
        self,
        config: LimitedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = DecliningParser(self)
        self._limits = config.limits
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            message = f"{self._limits.connections} connections are open, which is the most that this router takes."
            self._refuse(QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_BUSY))
        else:
            self._wait(self._limits.head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what arrives before a head is complete, and behind a body what belongs to none."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(head_too_large(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_begun = True
        if not self._answering:
            self._wait(self._limits.head)

    def decline(self) -> HttpRequestParser:
        """See ``Declining``. It is as if the client had offered nothing, as RFC 9110 (7.8) allows."""
        old, self.parser = self.parser, DecliningParser(self)
        version = old.get_http_version().encode("ascii")
        head = b"%b %b HTTP/%b\r\n" % (old.get_method(), self.url, version)
        kept = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in _OFFERS]
        last = b"" if old.should_keep_alive() else b"connection: close\r\n"
        self.parser.feed_data(b"".join([head, *kept, last, b"\r\n"]))
        return self.parser

    def on_headers_complete(self) -> None:
        """A head is complete; the application judges its size."""
        if self._offers_another:
            return  # ``decline`` comes next
        self._head_begun, self._head_bytes = False, 0
        self._stop_waiting()
        if self.transport.is_closing():
            return  # the parser goes on with what came together
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"{MAX_PIPELINED} requests wait on this connection, which is the most that this router takes."
            self._refuse(QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_BUSY))
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: {DIRECT: Direct(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        """The application judges how much of it there is."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request's head may come."""
        self._head_bytes = 0
        if not self._offers_another:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered, also one whose body is still coming."""
        super().on_response_complete()
        if not self._answering and not self.transport.is_closing():
            self._wait(self._limits.head if self._head_begun else self._limits.idle)

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser could not read; its own words are of no use to a client."""
        del msg
        self._refuse(not_http())

    @property
    def _offers_another(self) -> bool:
        """Whether the head that was read last offers another protocol, which can be declined."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HttpError | QuireError) -> None:
        """Ends the connection, with an answer where one can still begin."""
        if not (self._answering and self.cycle.response_started):
            request_id = new_request_id()
            status, body, headers = error_answer(error, request_id)
            fields = [*headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
            head = b"".join(b"%s: %s\r\n" % field for field in fields)
            self.transport.write(b"%s%scontent-length: %d\r\n\r\n%s" % (STATUS_LINE[status], head, len(body), body))
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._waited)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self) -> None:
        if self._head_begun:
            self._refuse(head_too_slow(self._limits.head))
        else:
            self.transport.close()
