"""Tasks that live as long as their process: what fails in one is logged and counted, and it is started again."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any

log = logging.getLogger(__name__)
_INSIST = 1.0  # seconds after which a task that is to stop is cancelled once more


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """Times in seconds. A task that failed is started again after ``backoff``, which doubles up to ``max_backoff``. One
    that ran for ``steady`` begins anew with ``backoff``. One that failed ``most`` times without that is ``failing``,
    and is still tried.
    """

    backoff: float = 0.1
    max_backoff: float = 5.0
    steady: float = 10.0
    most: int = 8


class SupervisedTask:
    """Runs ``work`` until ``stop``. ``work`` may return, and has then done what it is for; whatever it raises is logged
    with its traceback under ``name``, ``on_restart`` is called, and it is called again after a pause. A
    ``CancelledError`` although this task was not cancelled is such a failure too: libraries let their own escape.

    Must be made on a running event loop.
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
        self._began = monotonic()
        self._stopping = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    @property
    def failing(self) -> bool:
        """Whether it failed ``most`` times in a row, or ended without ``stop`` before its work was done."""
        if self._stopping:
            return False
        if self._task.done():
            return self._task.cancelled() or self._task.exception() is not None
        return self._failures >= self._settings.most and not self._is_steady

    @property
    def done(self) -> bool:
        """Whether it was stopped, or has done what it is for."""
        return self._task.done()

    def cancel(self) -> None:
        """Begins to stop it, for callers that cannot await ``stop``."""
        self._stopping = True
        self._task.cancel()

    async def stop(self) -> None:
        """Ends it, whatever it does just now, and raises nothing of what it raised. A library can lose a cancellation
        that comes together with an answer, so it is repeated.
        """
        self._stopping = True
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_INSIST)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("%s ended with %r", self.name, error)

    @property
    def _is_steady(self) -> bool:
        return monotonic() - self._began >= self._settings.steady

    async def _run(self) -> None:
        delay = self._settings.backoff
        while not self._stopping:
            self._began = monotonic()
            try:
                return await self._work()
            except asyncio.CancelledError:
                if self._stopping or _is_cancelled():
                    raise
                log.exception("%s was cancelled by itself and is started again", self.name)
            except Exception:
                log.exception("%s failed and is started again", self.name)
            if self._is_steady:
                self._failures, delay = 0, self._settings.backoff
            self._failures += 1
            if self._failures == self._settings.most:
                log.error("%s failed %d times in a row", self.name, self._failures)
            self._on_restart()
            self._began = monotonic()  # a pause is no steady run
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads tries, hides nothing
            delay = min(2 * delay, self._settings.max_backoff)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
