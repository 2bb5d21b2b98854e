"""``SleepControl``: puts an engine to sleep when its requests have ended, and wakes it up. The names are vLLM's:
``sleep``, ``wake_up`` and ``is_sleeping``.
"""

import asyncio
from collections.abc import Callable

from quire_proto.errors import ErrorCode, QuireError

from quire_engine.core.engine_core import Command, Sleep, WakeUp
from quire_engine.core_client.client import EngineCoreClient
from quire_engine.server.session_manager import SessionManager

MAX_WAIT_SECONDS = 3600.0
_POLL_SECONDS = 0.05


class SleepControl:
    """Puts the engine to sleep and wakes it up. Use it on the event loop. Routers hear at once that the engine is to
    sleep, and then send no new requests, so that the running ones end. Requests that arrive all the same are run.
    """

    def __init__(self, sessions: SessionManager, core: EngineCoreClient) -> None:
        self._sessions = sessions
        self._core = core
        self._num_wake_ups = 0

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine has freed its memory."""
        return self._core.is_sleeping

    async def sleep(self, wait_seconds: float) -> None:
        """Returns when the engine sleeps. Raises ``QuireError``: OVERLOADED if requests are left after
        ``wait_seconds``, UNAVAILABLE if it cannot sleep or is woken up meanwhile.
        """
        loop, num_wake_ups = asyncio.get_running_loop(), self._num_wake_ups
        deadline = loop.time() + min(max(0.0, wait_seconds), MAX_WAIT_SECONDS)  # 0 for NaN
        with self._sessions.falling_asleep():
            while True:
                # A request whose grammar is being compiled is not in the core yet.
                error = _busy() if self._sessions.in_progress else await self._ask(Sleep)
                if error is None:
                    return
                if error.code is not ErrorCode.OVERLOADED or loop.time() >= deadline:
                    raise error
                await asyncio.sleep(_POLL_SECONDS)
                if self._num_wake_ups != num_wake_ups:
                    raise QuireError(ErrorCode.UNAVAILABLE, "The engine was woken up before it slept.")

    async def wake_up(self) -> None:
        """Returns when the engine is awake. Raises ``QuireError`` UNAVAILABLE if it cannot wake up."""
        self._num_wake_ups += 1
        if (error := await self._ask(WakeUp)) is not None:
            raise error

    async def _ask(self, kind: Callable[[Callable[[QuireError | None], None]], Command]) -> QuireError | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[QuireError | None] = loop.create_future()

        def settle(error: QuireError | None) -> None:
            if not answer.done():
                answer.set_result(error)

        def reply(error: QuireError | None) -> None:
            loop.call_soon_threadsafe(settle, error)

        self._core.send(kind(reply))
        return await answer


def _busy() -> QuireError:
    return QuireError(ErrorCode.OVERLOADED, "The engine has requests, and does not sleep before they end.")
