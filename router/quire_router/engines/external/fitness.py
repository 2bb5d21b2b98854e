"""``Fitness``: whether a server that answers polls also does its work. One that fails fast always looks idle, and would
draw all requests; one that hangs keeps those that it has. Such a server is set aside, and probed until it generates.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from quire_proto.supervise import Backoff

from quire_router.engines.connection import LivenessMonitor

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Choices that a server may fail in a row. More than one, as a single request may be what is wrong."""

FIRST_PROBE, LAST_PROBE = 1.0, 30.0
"""Seconds until a server that was set aside is probed, doubling."""

STALL_STEPS = 10
"""A slow server's streams stand still for at least so many of its steps before that is a stall."""

_LOOK_SECONDS = 1.0


class Fitness:
    """Of the server at ``address``. It is set aside only where ``has_substitute``, so that never all servers are, and
    comes back once ``generates`` has returned True, or no other server is left. ``on_change`` is called when ``is_fit``
    has changed. Its streams stand still if none of them had an output for ``stall_timeout`` seconds.
    """

    def __init__(
        self,
        address: str,
        stall_timeout: float,
        *,
        generates: Callable[[], Awaitable[bool]],
        has_substitute: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self.is_fit = True
        self._address = address
        self._stall_timeout = stall_timeout
        self._generates = generates
        self._has_substitute = has_substitute
        self._on_change = on_change
        self._progress = LivenessMonitor(stall_timeout, stall_timeout)
        self._failures = 0
        self._set_aside = asyncio.Event()

    def on_output(self) -> None:
        """One of its streams had an output."""
        self._progress.on_message()

    def on_success(self) -> None:
        """It has completed a choice."""
        self._failures = 0

    def on_failure(self, problem: str) -> None:
        """A choice ended because the server failed."""
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._doubt(f"it failed {self._failures} times in a row, last: {problem}")

    async def wait(self) -> float:
        """Waits until ``is_stalled`` is to be asked again; returns how many seconds that took."""
        return await self._progress.wait()

    def is_stalled(self, took: float, *, begun: bool, step_seconds: float) -> bool:
        """Counts a period that took so many seconds. Returns whether the server's streams stand still and can go
        elsewhere; then it is set aside. ``begun``: some have had an output. Others may wait for their prompts.
        """
        if not begun:
            self._progress.on_message()
            return False
        self._progress.tick(took, expecting=True)
        timeout = max(self._stall_timeout, STALL_STEPS * step_seconds)
        if self._progress.seconds < timeout or not self._has_substitute():
            return False
        self._doubt(f"it answers polls, and none of its streams had a token for {self._progress.seconds:.0f} seconds")
        return True

    async def probe(self) -> None:
        """Probes the server whenever it is set aside, until it is fit again."""
        while True:
            await self._set_aside.wait()
            backoff = Backoff(FIRST_PROBE, LAST_PROBE)
            while not self.is_fit:
                await self._pause(backoff.next())
                if not self._has_substitute():
                    self._trust("no other server is left")
                elif await self._generates():
                    self._trust("it generates")

    async def _pause(self, seconds: float) -> None:
        """Waits so long, or until no other server is left."""
        while seconds > 0 and self._has_substitute():
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))
            seconds -= _LOOK_SECONDS

    def _doubt(self, reason: str) -> None:
        if self.is_fit and self._has_substitute():
            log.warning("engine %s is set aside: %s; it is probed until it generates", self._address, reason)
            self.is_fit = False
            self._set_aside.set()
            self._on_change()

    def _trust(self, reason: str) -> None:
        log.info("engine %s gets requests again: %s", self._address, reason)
        self._failures = 0
        self._progress.on_message()
        self._set_aside.clear()
        self.is_fit = True
        self._on_change()
