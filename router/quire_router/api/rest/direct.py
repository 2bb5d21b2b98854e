"""The body of one HTTP answer, written straight to its connection where that needs no waiting."""

from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION: Final = "quire"
DIRECT: Final = "direct"
"""Where it is among a scope's ``extensions``."""


class Direct:
    """Chunks of the answer of ``cycle``: the same bytes that the server writes when it is sent a message for each,
    without the message and the coroutine.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether the answer has begun in chunks and has not ended, and its client keeps up with reading."""
        cycle = self._cycle
        begun = bool(cycle.chunked_encoding) and not cycle.response_complete
        return begun and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Some of the body, not empty. Only while it is open."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def direct_of(scope: Mapping[str, Any]) -> Direct | None:
    """The direct way to a request's connection, where its server gives one."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get(DIRECT)
    return found if isinstance(found, Direct) else None
