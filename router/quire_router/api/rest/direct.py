"""One HTTP answer's own way to its connection: its body, where that needs no waiting, and its end before its time."""

from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION: Final = "quire"
DIRECT: Final = "direct"
"""Where it is among a scope's ``extensions``."""
_UNWRITTEN = 16 * 1024
"""Bytes that may wait in the transport. uvloop counts what it writes at the end of a turn, and one step of an engine
may bring pieces of several choices; far more than that means that the client does not read.
"""


class DirectWriter:
    """Chunks of the answer of ``cycle``: the same bytes that the server writes when it is sent a message for each,
    without the message and the coroutine.
    """

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    @property
    def is_streaming(self) -> bool:
        """Whether the answer has begun in chunks, and has not ended."""
        return bool(self._cycle.chunked_encoding) and not self._cycle.response_complete

    @property
    def is_open(self) -> bool:
        """Whether its client is there and has taken all that was written, or nearly all."""
        transport = self._transport
        return not (transport.is_closing() or transport.get_write_buffer_size() > _UNWRITTEN)

    def write(self, data: bytes) -> None:
        """Some of the body, not empty. Only once it has begun and while it is open."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Lets go of a client that left or does not read, and of all that was written and not taken."""
        self._cycle.disconnected = True  # else the server takes the answer for one that was forgotten
        self._transport.abort()


def direct_writer(scope: Mapping[str, Any]) -> DirectWriter | None:
    """The direct way to a request's connection, where its server gives one."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get(DIRECT)
    return found if isinstance(found, DirectWriter) else None
