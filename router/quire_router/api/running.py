"""Requests in progress: how many there may be, and whose they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire_proto.errors import ErrorCode, QuireError

from quire_router.api.identity import Caller

RETRY_BUSY = 1.0  # seconds
RETRY_STOPPING = 5.0  # seconds: another replica, or the next start


class Running:
    """The table of requests in progress, of both APIs, at most ``limit`` at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._callers: dict[str, Caller] = {}
        self._accepting = True

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def accepting(self) -> bool:
        """Whether new requests may enter."""
        return self._accepting

    @contextmanager
    def enter(self, request_id: str, caller: Caller) -> Iterator[None]:
        """A place for one request. Raises ``QuireError`` OVERLOADED or, when stopping, UNAVAILABLE."""
        self._check_door()
        self._callers[request_id] = caller
        try:
            yield
        finally:
            del self._callers[request_id]

    def belongs(self, request_id: str, caller: Caller) -> bool:
        """Whether this request is running and is this caller's."""
        return self._callers.get(request_id) == caller

    def stop_accepting(self) -> None:
        """Refuses new requests from now on; those in progress go on."""
        self._accepting = False

    def _check_door(self) -> None:
        if not self._accepting:
            raise QuireError(ErrorCode.UNAVAILABLE, "The service is shutting down.", retry_after=RETRY_STOPPING)
        if len(self._callers) >= self._limit:
            message = f"{self._limit} requests are in progress, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_BUSY)
