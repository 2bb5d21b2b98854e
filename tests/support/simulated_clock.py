"""A simulated clock, and a machine that serves what routers ask of it in the order in which it comes."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf


class Clock:
    """Simulated time, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        while self._events and not until() and self.now < limit:
            self.now, _, action = heappop(self._events)
            action()


class Machine:
    """Serves ``rate`` halves of a join a second, one after the other, also of joins that were given up; none between
    the two times of ``frozen``.
    """

    def __init__(self, clock: Clock, rate: float, frozen: tuple[float, float] = (inf, inf)) -> None:
        self._clock, self._rate, self._frozen = clock, rate, frozen
        self._free_at = 0.0

    def serve(self, action: Callable[[], None]) -> None:
        done = max(self._clock.now, self._free_at) + 1 / self._rate
        if self._frozen[0] <= done < self._frozen[1]:
            done = self._frozen[1] + 1 / self._rate
        self._free_at = done
        self._clock.after(done - self._clock.now, action)
