"""``LoadReport`` and ``UpdateTimer``: the load that routers get, and when they get it without outputs."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from quire.v1 import engine_pb2 as pb

from quire_engine.core.outputs import EngineLoad
from quire_engine.server.messages import load_to_proto


class LoadReport:
    """The engine's last load, as ``message``, and whether it is falling asleep, which the core does not know."""

    def __init__(self) -> None:
        self.message = pb.Load()
        self._num_falling_asleep = 0

    def set(self, load: EngineLoad) -> bool:
        """Takes the load after a step. Returns whether the engine fell asleep or woke up."""
        before, self.message = self.message.sleep_state, load_to_proto(load)
        self._set_sleep_state()
        return self.message.sleep_state != before

    @contextmanager
    def falling_asleep(self, send: Callable[[], None]) -> Iterator[None]:
        """Within this context the engine is falling asleep, until it sleeps. Calls ``send`` at its beginning and
        end.
        """
        self._num_falling_asleep += 1
        self._set_sleep_state()
        send()
        try:
            yield
        finally:
            self._num_falling_asleep -= 1
            self._set_sleep_state()
            send()

    def _set_sleep_state(self) -> None:
        if self.message.sleep_state != pb.SLEEP_STATE_ASLEEP:
            falling = self._num_falling_asleep > 0
            self.message.sleep_state = pb.SLEEP_STATE_FALLING_ASLEEP if falling else pb.SLEEP_STATE_AWAKE


class UpdateTimer:
    """Calls ``send`` at one time in the future, on the loop's clock."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._handle: asyncio.TimerHandle | None = None
        self._due = inf

    def set(self, due: float) -> None:
        """Sets the time; infinity for none. Keeps the timer if it is in the future and early enough."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due <= due:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = loop.call_at(due, self._send) if due < inf else None
        self._due = due
