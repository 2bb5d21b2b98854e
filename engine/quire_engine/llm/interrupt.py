"""Ctrl-C while an engine steps: heard between two steps, so that none is left half done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_sigint() -> Iterator[Callable[[], None]]:
    """Holds SIGINT back until the yielded function is called, or the context ends without an exception; then whoever
    handled it before does. A second one is not held back: a step that hangs must not keep its caller. Outside of the
    main thread, which alone is interrupted, nothing changes.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1:
            previous(number, frame)

    def release() -> None:
        if held:
            previous(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, previous)
    release()
