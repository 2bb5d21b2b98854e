"""Exponential back-off with jitter. Does no I/O."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from time import monotonic, thread_time
from typing import Any
from weakref import WeakSet

from quire_proto.supervise import RestartSettings, SupervisedTask

from quire_router.core import metrics


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


# What is done whenever something changes, and takes long in a large fleet.


_PAUSE_RATIO = 20
_MAX_PAUSE = 0.25  # seconds


def pause_after(seconds: float) -> float:
    """How long to rest after what took so many ``seconds`` of CPU, so that it takes a twentieth of the time, however
    often there is a reason for it; a quarter of a second at most, as what changed has to be seen within one.
    """
    return min(_PAUSE_RATIO * seconds, _MAX_PAUSE)


class CpuThrottle:
    """Calls ``function`` when it is asked to: at once where it has rested, else once for all who ask meanwhile."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._ready_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """There is a reason for it."""
        if self._timer is not None:
            return
        if monotonic() >= self._ready_at:
            self.run_now()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._ready_at - monotonic(), self.run_now)

    def run_now(self) -> None:
        """Does it now, and for all who asked."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began = thread_time()
        self._function()
        self._ready_at = monotonic() + pause_after(thread_time() - began)


# How often a router tells the others its share: at once after a quiet spell, and seldom enough on average. Has no
# clock.


BURST = 10
"""Shares that may be told at once if none was told for as many intervals."""

ENGINES_PER_INTERVAL = 100
"""Telling of so many engines is worth another interval: that is what takes time, here and at those who hear it."""


PEERS_PER_INTERVAL = 4
"""With more peers than these the interval grows with their number: each of them hears all others, so that what one
hears would grow with it, and what all hear with its square.
"""


class PublishRate:
    """On average a share is told every ``interval``, or less often where it is long or goes to many: the generic cell
    rate algorithm (ITU-T I.371). Times are numbers of any one unit.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._theoretical_arrival = 0.0

    def next_at(self, now: float) -> float:
        """From when on the next may be told; what is not after ``now`` means at once."""
        return max(now, self._theoretical_arrival - (BURST - 1) * self._interval)

    def on_published(self, now: float, engines: int, peers: int = 0) -> None:
        """A share of so many ``engines`` was published now, for so many ``peers``."""
        intervals = (1 + engines / ENGINES_PER_INTERVAL) * max(1.0, peers / PEERS_PER_INTERVAL)
        self._theoretical_arrival = max(self._theoretical_arrival, now) + self._interval * intervals


# The router's tasks that live as long as it does. ``supervise`` is the only way to begin one.


_vital: WeakSet[SupervisedTask] = WeakSet()


def supervise(
    kind: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    of: str = "",
    vital: bool = True,
    settings: RestartSettings | None = None,
) -> SupervisedTask:
    """Begins a task that runs ``work``, again whenever it fails, until it is stopped (see ``SupervisedTask``).

    ``kind`` is its label in ``quire_router_task_restarts_total``, one of a few words of the code; ``of`` tells tasks of
    one kind apart in the log. While a ``vital`` one keeps failing, ``failing_tasks`` names it and ``/live`` says no:
    those of which there is one each, so that no single engine can have a router restarted.
    """
    restarts = metrics.TASK_RESTARTS.labels(kind)
    task = SupervisedTask(f"{kind} of {of}" if of else kind, work, restarts.inc, settings)
    if vital:
        _vital.add(task)
    return task


def failing_tasks() -> list[str]:
    """The vital tasks of this process that starting again did not mend."""
    return sorted(task.name for task in _vital if task.failing)
