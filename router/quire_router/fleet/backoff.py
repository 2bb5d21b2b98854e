"""Exponential back-off with jitter. Does no I/O."""

import random


class Backoff:
    """Waits from ``first`` up to ``last`` seconds, doubling, and less than that by up to a half, so that many that
    failed together do not try again together.
    """

    def __init__(self, first: float, last: float) -> None:
        self._first = first
        self._last = last
        self._delay = first

    def next(self, last: float = 0.0) -> float:
        """Seconds until the next try, where they may grow up to ``last`` now if that is more."""
        delay = self._delay * random.uniform(0.5, 1.0)  # noqa: S311 - spreads tries, hides nothing
        self._delay = min(2 * self._delay, max(last, self._last))
        return delay

    def reset(self) -> None:
        """Starts again from ``first``, after a success."""
        self._delay = self._first
