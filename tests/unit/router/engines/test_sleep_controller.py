"""What the controller asks engines for, and what it does when they refuse or take their time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from quire.v1 import engine_pb2 as pb
from quire_proto.errors import ErrorCode, QuireError
from quire_router.engines import sleep_controller, sleep_plan
from quire_router.engines.attempt import EngineLost
from quire_router.engines.sleep_controller import SleepController
from quire_router.engines.sleep_plan import SleepSettings

from tests.support.waiting import until


@dataclass
class FakeLoad:
    sleep_state: int = pb.SLEEP_STATE_AWAKE
    has_work: bool = False

    @property
    def is_awake(self) -> bool:
        return self.sleep_state == pb.SLEEP_STATE_AWAKE


@dataclass
class FakeEngine:
    """An engine, and its own connection. It does what it is asked for once ``may_answer`` is set, or refuses it. What
    it says of that is heard once ``is_heard`` is set.
    """

    id: str
    load: FakeLoad = field(default_factory=FakeLoad)
    refuses: bool = False
    asked: list[str] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    models: frozenset[str] = frozenset({"m"})
    is_frozen: bool = False
    condition: str = "ready"
    shared_device: str = ""
    is_heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()
        self.is_heard.set()

    @property
    def ready(self) -> bool:
        return self.condition == "ready"

    can_sleep = ready

    async def probe(self) -> None:
        if self.is_frozen:
            self.condition = "silent"

    @property
    def connection(self) -> "FakeEngine":
        return self

    async def sleep(self, wait_seconds: float) -> None:
        await self._do(f"sleep {wait_seconds:g}", pb.SLEEP_STATE_ASLEEP)

    async def wake_up(self) -> None:
        await self._do("wake up", pb.SLEEP_STATE_AWAKE)

    async def _do(self, what: str, then: int) -> None:
        self.asked.append(what)
        await self.may_answer.wait()
        if self.refuses:
            raise EngineLost("it does not")
        if self.is_heard.is_set():
            self.load.sleep_state = then
        else:
            asyncio.create_task(self._say_later(then))  # noqa: RUF006 - it ends with the test

    async def _say_later(self, state: int) -> None:
        await self.is_heard.wait()
        self.load.sleep_state = state


def sleeper(id: str, **settings: Any) -> FakeEngine:
    return FakeEngine(id, FakeLoad(pb.SLEEP_STATE_ASLEEP), **settings)


class FakePool:
    def __init__(self, *engines: FakeEngine) -> None:
        self.all = list(engines)
        self.waiting = 0

    def engines(self) -> list[FakeEngine]:
        return self.all

    def has_capacity(self, model: str) -> bool:
        del model
        return any(engine.load.is_awake and not engine.load.has_work for engine in self.all)


@asynccontextmanager
async def controlling(
    pool: FakePool, settings: SleepSettings | None = None, load: int | None = 0
) -> AsyncIterator[SleepController]:
    async def read_load() -> dict[str, int]:
        if load is None:
            raise QuireError(ErrorCode.UNAVAILABLE, "Redis is away.")
        return {"m": load}

    controller = SleepController(
        pool,  # type: ignore[arg-type]
        ["m"],
        settings or SleepSettings(),
        num_waiting=lambda _: pool.waiting,
        read_load=read_load,
    )
    controller.start()
    try:
        yield controller
    finally:
        await controller.close()


async def test_a_request_that_waits_wakes_one_engine_at_once_and_no_other_meanwhile() -> None:
    first, second = sleeper("a"), sleeper("b")
    first.may_answer.clear()
    pool = FakePool(first, second)
    async with controlling(pool) as controller:
        pool.waiting = 1
        controller.ask()
        await until(lambda: first.asked == ["wake up"])
        for _ in range(3):
            controller.ask()
            await asyncio.sleep(2 * sleep_controller.MIN_PAUSE)
        assert (first.asked, second.asked) == (["wake up"], [])
        first.may_answer.set()
        await until(lambda: first.load.is_awake)


async def test_one_that_cannot_wake_up_leaves_it_to_the_next_and_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleep_controller, "RETRY_SECONDS", 0.3)
    first, second = sleeper("a", refuses=True), sleeper("b", refuses=True)
    pool = FakePool(first, second)
    async with controlling(pool) as controller:
        pool.waiting = 1
        controller.ask()
        await until(lambda: bool(first.asked and second.asked))
        await until(lambda: len(first.asked) > 1)


async def test_the_load_of_all_routers_wakes_engines_before_one_is_full() -> None:
    pool = FakePool(FakeEngine("a"), sleeper("b"), sleeper("c"))
    async with controlling(pool, SleepSettings(target_load=4), load=9) as controller:
        controller.ask()
        await until(lambda: all(engine.load.is_awake for engine in pool.all))


async def test_where_the_load_is_not_known_nothing_is_woken_up_for_it() -> None:
    pool = FakePool(FakeEngine("a"), sleeper("b"))
    async with controlling(pool, SleepSettings(target_load=1), load=None) as controller:
        controller.ask()
        await asyncio.sleep(4 * sleep_controller.MIN_PAUSE)
        assert pool.all[1].asked == []


async def test_an_engine_is_not_put_to_sleep_while_it_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_controller, "PERIOD", 0.05)
    busy, idle = FakeEngine("a", FakeLoad(has_work=True)), FakeEngine("b")
    async with controlling(FakePool(busy, idle), SleepSettings(sleep_after=0.1, min_awake=0)):
        await until(lambda: not idle.load.is_awake)
        assert busy.asked == []
        busy.load.has_work = False
        await until(lambda: not busy.load.is_awake)
        assert busy.asked == idle.asked == ["sleep 0"]


async def test_a_sleeper_that_does_not_answer_leaves_it_to_the_next_at_once() -> None:
    frozen, other = sleeper("a", is_frozen=True), sleeper("b")
    frozen.may_answer.clear()
    pool = FakePool(frozen, other)
    async with controlling(pool) as controller:
        pool.waiting = 1
        controller.ask()
        await until(lambda: other.load.is_awake)
        assert frozen.asked == []


@asynccontextmanager
async def sharing(*engines: FakeEngine, starved: str = "m") -> AsyncIterator[SleepController]:
    """The engines of one device, and requests for which there is no room."""
    for engine in engines:
        engine.shared_device = "gpu-0"
    pool = FakePool(*engines)
    pool.has_capacity = lambda model: False  # type: ignore[method-assign]
    controller = SleepController(
        pool,  # type: ignore[arg-type]
        ["m", "n"],
        SleepSettings(),
        num_waiting=lambda model: int(model in starved),
        read_load=None,  # type: ignore[arg-type]
    )
    controller.start()
    try:
        yield controller
    finally:
        await controller.close()


async def test_an_engine_of_the_device_finishes_its_turn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_controller, "PERIOD", 0.05)
    holder, other = FakeEngine("a", models=frozenset({"n"})), sleeper("b")
    holder.may_answer.clear()
    async with sharing(holder, other):
        await until(lambda: holder.asked == [f"sleep {sleep_controller.DRAIN_SECONDS:g}"])
        assert other.asked == []
        holder.may_answer.set()
        await until(lambda: other.load.is_awake)
        assert not holder.load.is_awake


@pytest.mark.parametrize("condition", ["silent", "reconnecting", "leaving"])
@pytest.mark.parametrize("model", ["n", "one of other routers"])
async def test_an_engine_that_is_not_ready_has_the_memory_of_its_device_until_it_is_lost(
    condition: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_controller, "PERIOD", 0.05)
    holder, other = FakeEngine("a", models=frozenset({model}), condition=condition), sleeper("b")
    async with sharing(holder, other) as controller:
        controller.ask()
        await asyncio.sleep(4 * sleep_controller.MIN_PAUSE)
        assert holder.asked == other.asked == []
        holder.condition = "lost"
        await until(lambda: other.load.is_awake)


async def test_no_other_has_the_device_of_one_that_woke_up_before_that_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleep_controller, "PERIOD", 0.05)
    first, second = sleeper("a"), sleeper("b", models=frozenset({"n"}))
    first.is_heard.clear()
    async with sharing(first, second, starved="mn"):
        await until(lambda: first.asked == ["wake up"])
        await asyncio.sleep(4 * sleep_controller.MIN_PAUSE)
        assert (first.asked, second.asked) == (["wake up"], [])
        first.is_heard.set()
        await until(lambda: first.load.is_awake)


async def test_an_engine_that_could_not_end_its_turn_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_controller, "PERIOD", 0.05)
    monkeypatch.setattr(sleep_controller, "RETRY_SECONDS", 0.0)
    holder, other = FakeEngine("a", FakeLoad(has_work=True), models=frozenset({"n"})), sleeper("b")
    async with sharing(holder, other) as controller:
        await until(lambda: "a" in controller._awake_since)
        controller._awake_since["a"] -= sleep_plan.TURN_SECONDS
        holder.refuses = True
        holder.may_answer.clear()
        await until(lambda: len(holder.asked) == 1)
        holder.load.sleep_state = pb.SLEEP_STATE_FALLING_ASLEEP
        await until(lambda: "a" not in controller._awake_since)
        holder.load.sleep_state = pb.SLEEP_STATE_AWAKE
        holder.may_answer.set()
        await until(lambda: "a" not in controller._running)
        await asyncio.sleep(4 * sleep_controller.MIN_PAUSE)
        assert len(holder.asked) == 1
