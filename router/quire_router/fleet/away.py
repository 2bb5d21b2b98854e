"""How many links have no stream to their engine, and how seldom each should try again therefore. Does no I/O."""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_CONNECTS_PER_SECOND = 100
"""Of all links together, once each has tried a few times: one costs about 2 ms of CPU, over TLS up to 7."""


class ReconnectLimiter:
    """The links of one fleet that wait for their next try."""

    def __init__(self) -> None:
        self._disconnected = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """One more does, until the block ends."""
        self._disconnected += 1
        try:
            yield
        finally:
            self._disconnected -= 1

    @property
    def spacing(self) -> float:
        """Seconds between two tries of one link with which they make ``MAX_CONNECTS_PER_SECOND`` together."""
        return self._disconnected / MAX_CONNECTS_PER_SECOND
