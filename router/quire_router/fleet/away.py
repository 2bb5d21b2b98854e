"""How many links have no stream to their engine, and how seldom each should try again therefore. Does no I/O."""

from collections.abc import Iterator
from contextlib import contextmanager

TRIES_A_SECOND = 100
"""Of all links together, once each has tried a few times: one costs about 2 ms of CPU, over TLS up to 7."""


class Away:
    """The links of one fleet that wait for their next try."""

    def __init__(self) -> None:
        self._links = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """One more does, until the block ends."""
        self._links += 1
        try:
            yield
        finally:
            self._links -= 1

    @property
    def spacing(self) -> float:
        """Seconds between two tries of one link with which they make ``TRIES_A_SECOND`` together."""
        return self._links / TRIES_A_SECOND
