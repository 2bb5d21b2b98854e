"""What the fleet tells placement and the API, and that what is in flight is counted exactly as long as it runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_router.fleet.fleet import Fleet
from quire_router.fleet.output import EngineLost
from quire_router.fleet.settings import LinkSettings
from quire_router.fleet.static import StaticDiscovery

from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until

QUICK = LinkSettings(grace=0.05, backoff=0.01)


def submit(request_id: str) -> engine_pb2.Submit:
    sampling = types_pb2.SamplingParams(max_tokens=20)
    return engine_pb2.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling)


@asynccontextmanager
async def fleet_of(*engines: ScriptedEngine, models: Sequence[str] = ("m",)) -> AsyncIterator[Fleet]:
    addresses = [await engine.start() for engine in engines]
    fleet = Fleet(StaticDiscovery(addresses), models, QUICK)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()
        for engine in engines:
            await engine.stop()


async def all_ready(fleet: Fleet, count: int, model: str = "m") -> None:
    await until(lambda: fleet.ready(model) == count)


async def test_an_engine_belongs_to_the_models_that_it_names() -> None:
    async with fleet_of(ScriptedEngine(models=["m", "alias"]), ScriptedEngine(models=["other"])) as fleet:
        await all_ready(fleet, 1)
        await all_ready(fleet, 1, "other")
        assert fleet.ready("alias") == 1
        assert fleet.ready("unknown") == 0
        assert [view.engine_id for view in fleet.candidates("m")] == [
            view.engine_id for view in fleet.candidates("alias")
        ]


async def test_limits_are_the_smallest_and_are_remembered_when_the_engines_are_gone() -> None:
    small = ScriptedEngine(max_model_len=100, eos_token_ids=[2])
    large = ScriptedEngine(max_model_len=4000, eos_token_ids=[2])
    async with fleet_of(small, large) as fleet:
        assert fleet.limits("m") is None
        await all_ready(fleet, 2)
        await small.stop()
        await large.stop()
        await all_ready(fleet, 0)
        limits = fleet.limits("m")
    assert limits is not None
    assert (limits.max_model_len, limits.vocab_size, limits.eos_token_ids) == (100, 1000, (2,))


async def test_waiting_ends_when_an_engine_is_ready_or_the_time_is_over() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        assert await fleet.wait_ready(10)
        assert await fleet.wait_ready(10, "m")
        assert not await fleet.wait_ready(0.01, "other")


async def test_a_dispatch_counts_from_its_beginning_to_its_end() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        dispatch = fleet.dispatch(engine.address, submit("a"))
        assert fleet.candidates("m")[0].in_flight == 0
        with dispatch:
            view = fleet.candidates("m")[0]
            assert (view.in_flight, view.in_flight_tokens) == (1, 23)
        view = fleet.candidates("m")[0]
        assert (view.in_flight, view.in_flight_tokens) == (0, 0)


async def test_a_dispatch_that_fails_gives_its_count_back_and_cancels() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        with pytest.raises(ZeroDivisionError), fleet.dispatch(engine.address, submit("a")):
            await fail_after(engine.submit())
        assert fleet.candidates("m")[0].in_flight == 0
        assert (await engine.cancel()).request_id == "a"


async def test_a_dispatch_that_cannot_begin_is_not_counted() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        with fleet.dispatch(engine.address, submit("a")) as outputs:
            await engine.stop()
            with pytest.raises(EngineLost):
                await anext(outputs)
            with pytest.raises(EngineLost), fleet.dispatch(engine.address, submit("b")):
                pass
        await engine.start()
        await all_ready(fleet, 1)
        assert fleet.candidates("m")[0].in_flight == 0
        with pytest.raises(EngineLost):
            fleet.dispatch("nowhere:1", submit("c"))


async def fail_after(moment: Awaitable[object]) -> None:
    await moment
    raise ZeroDivisionError


class Announced:
    """Discovery by announcement."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[Sequence[str]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[Sequence[str]]:
        while True:
            yield await self.lists.get()


async def test_an_engine_that_leaves_the_list_gets_nothing_new_and_finishes_what_it_has() -> None:
    engine, discovery = ScriptedEngine(), Announced()
    address = await engine.start()
    fleet = Fleet(discovery, ["m"], QUICK)
    await fleet.start()
    discovery.lists.put_nowait([address])
    await all_ready(fleet, 1)
    with fleet.dispatch(address, submit("a")) as outputs:
        await engine.submit()
        discovery.lists.put_nowait([])
        await all_ready(fleet, 0)
        engine.send(output("a", [7], 0, STOP))
        assert (await anext(outputs)).token_ids == [7]
    with pytest.raises(EngineLost):
        fleet.dispatch(address, submit("b"))
    discovery.lists.put_nowait([address])
    await all_ready(fleet, 1)
    await fleet.close()
    await engine.stop()
