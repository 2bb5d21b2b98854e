"""When something is done again: after a failure (``supervise``), after a change (``CpuThrottle``), at a bounded rate
(``PublishRate``), or after a time at the latest (``wait_at_most``, ``fair_timeout``); and when a client is asked to do
it again (``spread``, ``retry_after``). The growing delay between two tries is ``quire_proto.supervise.Backoff``.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from random import randint
from time import monotonic, thread_time
from typing import Any
from weakref import WeakSet

from quire_proto.supervise import RestartSettings, SupervisedTask

from quire_router.core import metrics


def first_error(error: BaseException) -> BaseException:
    """Returns the first error of a group, and of groups in it: what a log says of a try that failed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Returns when ``event`` is set, and after so many ``seconds`` at the latest."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


_LONGEST_RETRY_AFTER = 60  # seconds: the clients of OpenAI and Anthropic ignore a longer one


def spread(least: int) -> int:
    """Returns a wait for a client, at random from ``least`` to half as long again, and at least one longer: clients
    that were refused or cut off at one moment do not come back at one moment.
    """
    return randint(least, least + max(1, least // 2))  # noqa: S311 - spreads tries, hides nothing


def retry_after(seconds: float) -> int:
    """Returns the whole seconds of a Retry-After: ``seconds`` rounded up, and spread. A wait that clients heed is not
    made one that they ignore.
    """
    least = math.ceil(seconds)
    return min(spread(least), max(least, _LONGEST_RETRY_AFTER))


FAIR_TICKS = 6
"""Periods in which a time is counted that others have for an answer."""

_HELD_UP_FACTOR = 3
_MIN_HELD_UP = 0.1  # seconds


def was_held_up(seconds: float, period: float) -> bool:
    """Whether a wait for ``period`` that took so many ``seconds`` says that this process was frozen, or starved."""
    return seconds >= max(_HELD_UP_FACTOR * period, _MIN_HELD_UP)


@asynccontextmanager
async def fair_timeout(seconds: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, without the time in which this process was held up itself: an answer may have come
    meanwhile, and is read first.
    """
    loop, period, left = asyncio.get_running_loop(), seconds / FAIR_TICKS, FAIR_TICKS
    began = loop.time()
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal began, left, timer
        now = loop.time()
        left -= not was_held_up(now - began, period)
        if left > 0:
            began, timer = now, loop.call_later(period, tick)
        else:
            deadline.reschedule(now)

    timer = loop.call_later(period, tick)
    try:
        async with asyncio.timeout(None) as deadline:
            yield
    finally:
        timer.cancel()


_PAUSE_RATIO = 20
_MAX_PAUSE = 0.25  # seconds


def pause_after(seconds: float) -> float:
    """Returns how long to pause after work that took so many ``seconds`` of CPU, so that it takes a twentieth of the
    time, however often it is requested; a quarter of a second at most, as a change has to be seen within one.
    """
    return min(_PAUSE_RATIO * seconds, _MAX_PAUSE)


class CpuThrottle:
    """Calls ``function`` on request: at once if its pause is over, else once after it for all requests until then. For
    what is to be done whenever something changes, and takes long in a large fleet.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._ready_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Requests a call."""
        if self._timer is not None:
            return
        if monotonic() >= self._ready_at:
            self.run_now()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._ready_at - monotonic(), self.run_now)

    def run_now(self) -> None:
        """Calls the function now, for all requests so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began = thread_time()
        self._function()
        self._ready_at = monotonic() + pause_after(thread_time() - began)


BURST = 10
"""Messages that may be published at once if none was published for as many intervals."""

ENGINES_PER_INTERVAL = 100
"""A message with so many engines costs another interval: they are what takes time, here and at its receivers."""

PEERS_PER_INTERVAL = 4
"""With more peers than these the interval grows with their number: each receives the messages of all others, so that
what one receives would grow with it, and what all receive with its square.
"""


class PublishRate:
    """When a router publishes its load: at once after a quiet time, and on average every ``interval``, or less often if
    the message is long or has many receivers. The generic cell rate algorithm (ITU-T I.371). Times are in any one unit.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._theoretical_arrival = 0.0

    def next_at(self, now: float) -> float:
        """Returns the earliest time of the next message; ``now`` if that is at once."""
        return max(now, self._theoretical_arrival - (BURST - 1) * self._interval)

    def on_published(self, now: float, engines: int, peers: int = 0) -> None:
        """Records that a message of so many ``engines`` was published, for so many ``peers``."""
        intervals = (1 + engines / ENGINES_PER_INTERVAL) * max(1.0, peers / PEERS_PER_INTERVAL)
        self._theoretical_arrival = max(self._theoretical_arrival, now) + self._interval * intervals


_vital: WeakSet[SupervisedTask] = WeakSet()


def supervise(
    kind: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    of: str = "",
    vital: bool = True,
    settings: RestartSettings | None = None,
) -> SupervisedTask:
    """Starts a task that runs ``work``, again whenever it fails, until it is stopped (see ``SupervisedTask``). All
    tasks that live as long as the router are started here.

    ``kind`` is its label in ``quire_router_task_restarts_total``, one of a few constants; ``of`` distinguishes tasks of
    one kind in the log. While a ``vital`` task keeps failing, ``failing_tasks`` names it and ``/live`` fails. Only
    tasks of which there is one each are vital, so that no single engine can have a router restarted.
    """
    restarts = metrics.TASK_RESTARTS.labels(kind)
    task = SupervisedTask(f"{kind} of {of}" if of else kind, work, restarts.inc, settings)
    if vital:
        _vital.add(task)
    return task


def failing_tasks() -> list[str]:
    """Returns the names of the vital tasks of this process that keep failing."""
    return sorted(task.name for task in _vital if task.failing)
