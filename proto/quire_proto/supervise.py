"""``SupervisedTask``, an asyncio task that lives as long as its process and is restarted when it fails, and
``Backoff``, the growing delay between two tries of anything.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

log = logging.getLogger(__name__)
_CANCEL_INTERVAL = 1.0  # seconds after which a task that is being stopped is cancelled again


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """Times in seconds. A task that failed is restarted after ``backoff``, which doubles up to ``max_backoff``. After a
    run of at least ``steady``, it is ``backoff`` again. A task that failed ``most`` times without such a run is
    ``failing``, and is still restarted.
    """

    backoff: float = 0.1
    max_backoff: float = 5.0
    steady: float = 10.0
    most: int = 8


class SupervisedTask:
    """Runs ``work`` until it returns or ``stop`` is called. An exception is logged with its traceback under ``name``,
    ``on_restart`` is called, and ``work`` is called again after a pause. A ``CancelledError`` although this task was
    not cancelled is such a failure too, as some libraries let theirs escape.

    Must be created on a running event loop.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        on_restart: Callable[[], None] = lambda: None,
        settings: RestartSettings | None = None,
    ) -> None:
        self.name = name
        self._work = work
        self._on_restart = on_restart
        self._settings = settings or RestartSettings()
        self._failures = 0
        self._started = monotonic()
        self._stopping = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    @property
    def failing(self) -> bool:
        """Whether it failed ``most`` times in a row, or ended without ``stop`` and without ``work`` returning."""
        if self._stopping:
            return False
        if self._task.done():
            return self._task.cancelled() or self._task.exception() is not None
        return self._failures >= self._settings.most and not self._is_steady

    @property
    def done(self) -> bool:
        """Whether it was stopped, or ``work`` has returned."""
        return self._task.done()

    def cancel(self) -> None:
        """Starts stopping it, for callers that cannot await ``stop``."""
        self._stopping = True
        self._task.cancel()

    async def stop(self) -> None:
        """Stops it and waits for its end. Does not raise what it raised. Cancels repeatedly, as a library can lose a
        cancellation that arrives together with a result.
        """
        self._stopping = True
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CANCEL_INTERVAL)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("%s ended with %r", self.name, error)

    @property
    def _is_steady(self) -> bool:
        return monotonic() - self._started >= self._settings.steady

    async def _run(self) -> None:
        backoff = Backoff(self._settings.backoff, self._settings.max_backoff)
        while not self._stopping:
            self._started = monotonic()
            try:
                return await self._work()
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                if _is_cancelled():
                    log.error("%s was cancelled from outside, and ends", self.name)
                    raise
                log.exception("%s cancelled itself; restarting it", self.name)
            except Exception:
                log.exception("%s failed; restarting it", self.name)
            forget_cancellations()
            if self._is_steady:
                self._failures = 0
                backoff.reset()
            self._failures += 1
            if self._failures == self._settings.most:
                log.error("%s failed %d times in a row", self.name, self._failures)
            self._on_restart()
            self._started = monotonic()  # the pause does not count as a steady run
            await asyncio.sleep(backoff.next())


def forget_cancellations() -> None:
    """Takes back the cancellations that the running task has outlived. A ``TaskGroup`` cancels the task that waits for
    it when a child fails, and leaves that counted; before Python 3.11.3 each later ``asyncio.timeout`` of the task then
    ends it with ``CancelledError`` in place of ``TimeoutError`` (https://github.com/python/cpython/issues/102780).
    """
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Backoff:
    """Waits from ``first`` up to ``last`` seconds, doubling, and less than that by up to a half, so that many that
    failed together do not try again together.
    """

    def __init__(self, first: float, last: float) -> None:
        self._first = first
        self._last = last
        self._delay = first

    def next(self, last: float = 0.0, most: float = inf) -> float:
        """Returns the seconds until the next try. They may grow up to ``last`` now if that is more, and are at most
        ``most`` this time, or the first delay if that is more.
        """
        delay = jittered(min(self._delay, max(most, self._first)))
        self._delay = min(2 * self._delay, max(last, self._last))
        return delay

    def reset(self) -> None:
        """Starts again from ``first``, after a success."""
        self._delay = self._first


def jittered(seconds: float) -> float:
    """Returns between a half and all of ``seconds``, at random, so that what many wait for does not come at once."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreads tries, hides nothing
