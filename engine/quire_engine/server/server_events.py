"""``ServerEvents``: what an engine's server waits for while it serves."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from quire_engine.core.engine_core import EngineCoreOutputs


class ServerEvents:
    """Signals, and what the core reports, as events of the running loop. Implements ``CoreListener``; ``on_step`` gets
    the core's outputs on the loop. ``failure`` made the core end; None while it runs, or after ``Shutdown``.
    """

    def __init__(self, on_step: Callable[[EngineCoreOutputs], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._core_ended = asyncio.Event()
        self._core_leaves = asyncio.Event()
        self.failure: BaseException | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)

    async def wait_until_leaving(self) -> None:
        """Waits for a signal, for the end of the core, or until the core was asked to leave."""
        await _first_completed(self._stop_requested.wait(), self._core_ended.wait(), self._core_leaves.wait())

    async def wait_delay(self, seconds: float) -> None:
        """Waits for ``seconds``, or until a second signal or the end of the core."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first_completed(self._stop_now.wait(), self._core_ended.wait())

    async def wait_while_core_runs(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Waits for ``work``, but at most for ``seconds`` and until the end of the core."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first_completed(work, self._core_ended.wait())

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Hands the outputs of a step to the loop, which keeps their order."""
        self._loop.call_soon_threadsafe(self._on_step, outputs)

    def on_leaving(self) -> None:
        """See ``CoreListener.on_leaving``."""
        self._set(self._core_leaves)

    def on_end(self, failure: BaseException | None) -> None:
        """See ``CoreListener.on_end``."""
        self.failure = failure
        self._set(self._core_ended)

    def _set(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # a hung step ended after the loop was closed
            self._loop.call_soon_threadsafe(event.set)

    def _on_signal(self) -> None:
        """Requests a stop. A second signal skips the shutdown delay."""
        (self._stop_now if self._stop_requested.is_set() else self._stop_requested).set()


async def _first_completed(*awaited: Coroutine[Any, Any, object]) -> None:
    """Waits until one of the coroutines returns, and cancels the others."""
    tasks = [asyncio.create_task(each) for each in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
