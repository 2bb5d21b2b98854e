"""How long a client may leave its answer unread. Costs next to nothing for a write that does not wait."""

import asyncio
from collections.abc import Awaitable
from typing import Any


class WriteTimeout:
    """Bounds every write of one answer by ``seconds``, with one timer for all of them: a timer for each token would
    cost more than the token. ``close`` it when the answer has ended.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[Any] | None = None
        self._started_at = 0.0
        self._timed_out = False

    async def wait(self, write: Awaitable[None]) -> None:
        """Waits for one write. Raises ``TimeoutError`` when it takes too long."""
        if self._timer is None:
            self._arm(self._loop.time())
        self._started_at = self._loop.time()
        self._writer = asyncio.current_task()
        try:
            await write
        except asyncio.CancelledError:
            if not self._timed_out or self._writer is None:
                raise
            self._writer.uncancel()
            raise TimeoutError from None
        finally:
            self._writer = None

    def close(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, since: float) -> None:
        self._timer = self._loop.call_at(since + self.seconds, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._writer is None:
            self._arm(now)
        elif now < self._started_at + self.seconds:
            self._arm(self._started_at)
        else:
            self._timed_out = True
            self._writer.cancel()
