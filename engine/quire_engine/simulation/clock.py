"""``VirtualClock``: time that passes only in ``sleep`` and ``advance_to``."""

from math import ceil

NANOSECONDS = 1_000_000_000


class VirtualClock:
    """Starts at 0."""

    def __init__(self) -> None:
        self._now = 0

    def __call__(self) -> int:
        """The time in nanoseconds, as from ``time.time_ns``."""
        return self._now

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self._now / NANOSECONDS

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self._now += round(seconds * NANOSECONDS)

    def advance_to(self, seconds: float) -> None:
        """Lets time pass until ``seconds``, if that has not come yet."""
        self._now = max(self._now, ceil(seconds * NANOSECONDS))
