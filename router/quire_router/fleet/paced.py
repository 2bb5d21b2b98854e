"""What is done whenever something changes, and takes long in a large fleet. Knows no fleet."""

import asyncio
from collections.abc import Callable
from time import monotonic, thread_time

_RESTS = 20
_LONGEST = 0.25  # seconds


def rest_after(seconds: float) -> float:
    """How long to rest after what took so many ``seconds`` of CPU, so that it takes a twentieth of the time, however
    often there is a reason for it; a quarter of a second at most, as what changed has to be seen within one.
    """
    return min(_RESTS * seconds, _LONGEST)


class Paced:
    """Calls ``function`` when it is asked to: at once where it has rested, else once for all who ask meanwhile."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._rested = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """There is a reason for it."""
        if self._timer is not None:
            return
        if monotonic() >= self._rested:
            self.call()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._rested - monotonic(), self.call)

    def call(self) -> None:
        """Does it now, and for all who asked."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began = thread_time()
        self._function()
        self._rested = monotonic() + rest_after(thread_time() - began)
