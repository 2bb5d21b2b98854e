"""What is done whenever something changes, and takes long in a large fleet."""

import asyncio
from collections.abc import Callable
from time import monotonic, thread_time

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
