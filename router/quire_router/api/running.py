"""Requests in progress: how many there may be."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.stopping import shutting_down

RETRY_BUSY = 1.0  # seconds


class Running:
    """The places for requests in progress, of both APIs: at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._accepting = True
        self._leaving = False

    def __len__(self) -> int:
        return self._taken

    @property
    def leaving(self) -> bool:
        """Whether clients had better go elsewhere with what is new, even if it is still accepted."""
        return self._leaving

    @contextmanager
    def enter(self) -> Iterator[None]:
        """A place for one request. Raises ``QuireError`` OVERLOADED or, when stopping, UNAVAILABLE."""
        self._check_door()
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    def leave(self) -> None:
        """Everybody is told from now on that this router leaves."""
        self._leaving = True

    def stop_accepting(self) -> None:
        """Refuses new requests from now on; those in progress go on."""
        self._leaving, self._accepting = True, False

    def _check_door(self) -> None:
        if not self._accepting:
            raise shutting_down()
        if self._taken >= self._limit:
            message = f"{self._limit} requests are in progress, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_BUSY)
