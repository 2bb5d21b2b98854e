"""An engine that is told to sleep waits for its requests, and is told apart from one that sleeps while it does."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from quire_engine.core.engine_core import Command, Sleep, WakeUp
from quire_engine.server.sleep_control import SleepControl
from quire_proto.errors import ErrorCode, QuireError

from tests.support.waiting import until


class FakeSessions:
    """As many live requests as are set, and who was told that the engine is falling asleep."""

    in_progress = 0
    falling = 0

    @contextmanager
    def falling_asleep(self) -> Iterator[None]:
        self.falling += 1
        try:
            yield
        finally:
            self.falling -= 1


class FakeCore:
    """Answers on another thread, as the core does. ``busy`` times it has work of its own."""

    def __init__(self) -> None:
        self.is_sleeping = False
        self.busy = 0
        self.failure: QuireError | None = None

    def send(self, command: Command) -> None:
        assert isinstance(command, Sleep | WakeUp)
        Thread(target=self._handle, args=(command,)).start()

    def _handle(self, command: Sleep | WakeUp) -> None:
        if self.failure is not None:
            return command.reply(self.failure)
        if isinstance(command, Sleep) and self.busy:
            self.busy -= 1
            return command.reply(QuireError(ErrorCode.OVERLOADED, "The engine has requests."))
        self.is_sleeping = isinstance(command, Sleep)
        return command.reply(None)


@pytest.fixture
def parts() -> tuple[SleepControl, FakeSessions, FakeCore]:
    sessions, core = FakeSessions(), FakeCore()
    return SleepControl(sessions, core), sessions, core  # type: ignore[arg-type]


Parts = tuple[SleepControl, FakeSessions, FakeCore]


async def test_an_idle_engine_sleeps_at_once_and_wakes_up(parts: Parts) -> None:
    control, sessions, _ = parts
    await control.sleep(0.0)
    assert control.is_sleeping
    assert sessions.falling == 0
    await control.wake_up()
    assert not control.is_sleeping


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("where", ["sessions", "core"])
async def test_one_with_requests_is_not_put_to_sleep_without_waiting(parts: Parts, where: str, seconds: float) -> None:
    control, sessions, core = parts
    sessions.in_progress, core.busy = (1, 0) if where == "sessions" else (0, 1)
    with pytest.raises(QuireError) as refused:
        async with asyncio.timeout(5.0):
            await control.sleep(seconds)
    assert refused.value.code is ErrorCode.OVERLOADED
    assert not control.is_sleeping
    assert sessions.falling == 0


async def test_routers_hear_that_it_is_falling_asleep_until_its_requests_have_ended(parts: Parts) -> None:
    control, sessions, core = parts
    sessions.in_progress, core.busy = 1, 1
    falling = asyncio.create_task(control.sleep(60.0))
    await until(lambda: sessions.falling == 1)
    sessions.in_progress = 0
    await falling
    assert control.is_sleeping
    assert sessions.falling == 0


async def test_one_that_is_woken_up_while_it_waits_does_not_sleep(parts: Parts) -> None:
    control, sessions, _ = parts
    sessions.in_progress = 1
    falling = asyncio.create_task(control.sleep(60.0))
    await until(lambda: sessions.falling == 1)
    await control.wake_up()
    with pytest.raises(QuireError) as refused:
        await falling
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert sessions.falling == 0


async def test_what_the_core_cannot_do_is_said_at_once(parts: Parts) -> None:
    control, _, core = parts
    core.failure = QuireError(ErrorCode.UNAVAILABLE, "The engine cannot sleep: there is no disk.")
    for call in (control.sleep(60.0), control.wake_up()):
        with pytest.raises(QuireError, match="there is no disk"):
            await call


async def test_a_caller_that_hangs_up_leaves_the_engine_awake_and_its_routers_told(parts: Parts) -> None:
    control, sessions, _ = parts
    sessions.in_progress = 1
    falling = asyncio.create_task(control.sleep(60.0))
    await until(lambda: sessions.falling == 1)
    falling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await falling
    assert sessions.falling == 0
    assert not control.is_sleeping
