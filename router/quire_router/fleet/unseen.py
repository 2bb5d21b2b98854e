"""How much work the other routers have sent to engines that this one has not heard of yet. Does no I/O."""

from collections.abc import Callable
from math import exp

_MEMORY = 2.0
"""Seconds over which the others' dispatches are averaged."""

_LATEST = 1 / 16
"""What the latest share counts in the mean of how long shares take."""


class UnseenLoadEstimate:
    """By Little's law it is what the others dispatch in a second times the seconds until a share is heard. How long
    that takes a router sees by its own shares, as it hears those too. ``clock`` is monotonic, in seconds.
    """

    __slots__ = ("_age", "_changed", "_clock", "_dispatched", "_noted", "_told")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._dispatched = 0.0
        self._noted = clock()
        self._age = 0.0
        self._changed: float | None = None
        self._told: tuple[int, float] | None = None

    def tokens(self) -> float:
        """Prompt tokens, on average."""
        return self._age * self._dispatched * self._decay() / _MEMORY

    def on_remote_dispatch(self, tokens: int) -> None:
        """Another router told that it had sent so many more to engines."""
        self._dispatched = self._dispatched * self._decay() + tokens
        self._noted = self._clock()

    def on_local_change(self) -> None:
        """What this router has in flight changed; it was not told yet."""
        if self._changed is None:
            self._changed = self._clock()

    def on_published(self, sequence: int) -> None:
        """This router's share of this number is on its way, with all changes so far."""
        if self._told is None and self._changed is not None:
            self._told = sequence, self._changed
        self._changed = None

    def on_received(self, sequence: int) -> None:
        """This router's own share arrived, as it did at the others."""
        if self._told is not None and sequence >= self._told[0]:
            age = self._clock() - self._told[1]
            self._age += (age - self._age) * (_LATEST if self._age else 1.0)
            self._told = None

    def _decay(self) -> float:
        return exp((self._noted - self._clock()) / _MEMORY)
