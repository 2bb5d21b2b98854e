"""The fleet's tables for placement and the API; requests in flight are counted exactly as long as they run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_router.discovery.base import Endpoint
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines import pool
from quire_router.engines.attempt import EngineLost, EngineSilent
from quire_router.engines.engine import Engine
from quire_router.engines.model_matcher import ModelIdentity
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.placement.prefix_index import BlockNamespace

from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until

QUICK = ConnectionSettings(grace=0.05, backoff=0.01)


def submit(request_id: str, **sampled: int) -> engine_pb2.Submit:
    sampling = types_pb2.SamplingParams(max_tokens=20, best_of=sampled.get("n", 1), **sampled)
    return engine_pb2.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling)


def load(**fields: Any) -> engine_pb2.Load:
    return engine_pb2.Load(**fields)


def counted(fleet: EnginePool) -> tuple[float, ...]:
    """Requests, pending tokens and decoding sequences of the only engine."""
    ((_, row),) = fleet.table
    return fleet.table.requests[row], fleet.table.pending_tokens[row], fleet.table.decoding[row]


@asynccontextmanager
async def fleet_of(
    *engines: ScriptedEngine, models: Sequence[str] = ("m",), **options: Any
) -> AsyncIterator[EnginePool]:
    addresses = [await engine.start() for engine in engines]
    fleet = EnginePool(StaticDiscovery(addresses), models, QUICK, **options)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()
        for engine in engines:
            await engine.stop()


async def all_ready(fleet: EnginePool, count: int, model: str = "m") -> None:
    await until(lambda: fleet.ready(model) == count)


async def test_an_engine_belongs_to_the_models_that_it_names() -> None:
    async with fleet_of(ScriptedEngine(models=["m", "alias"]), ScriptedEngine(models=["other"])) as fleet:
        await all_ready(fleet, 1)
        await all_ready(fleet, 1, "other")
        assert fleet.ready("alias") == 1
        assert fleet.ready("unknown") == 0
        assert fleet.rows("m").tolist() == fleet.rows("alias").tolist()
        assert fleet.are_names_of_one(["m", "alias"])
        assert not fleet.are_names_of_one(["m", "other"])
        assert not fleet.are_names_of_one([])
        assert not set(fleet.rows("m")) & set(fleet.rows("other"))


async def test_names_with_one_folder_are_those_of_one_model_before_an_engine_says_so() -> None:
    known = {name: ModelIdentity(Path(folder), b"") for name, folder in {"m": "/x", "n": "/x", "o": "/y"}.items()}
    async with fleet_of(models=known, vocabularies=known) as fleet:
        assert fleet.are_names_of_one(["m", "n"])
        assert not fleet.are_names_of_one(["m", "o"])
        assert not fleet.are_names_of_one(["m", "unknown"])
        assert not fleet.are_names_of_one([])


async def test_limits_are_the_smallest_and_are_kept_after_the_engines_left() -> None:
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


async def test_the_first_engine_that_is_back_waits_for_those_that_left_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GATHER_SECONDS", 600.0)
    first, second = ScriptedEngine(), ScriptedEngine()
    async with fleet_of(first, second) as fleet:
        await all_ready(fleet, 2)
        await first.stop()
        await second.stop()
        await all_ready(fleet, 0)
        held = asyncio.create_task(fleet.wait_ready(20, "m"))
        await first.start()
        await until(lambda: first_of(fleet).connection.ready)
        assert (fleet.ready("m"), len(fleet.rows("m")), fleet.has_capacity("m")) == (0, 0, False)
        await second.start()
        assert await held
        assert fleet.ready("m") == 2


async def test_an_engine_does_not_wait_for_long_for_one_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GATHER_SECONDS", 0.05)
    first, second = ScriptedEngine(), ScriptedEngine()
    async with fleet_of(first, second) as fleet:
        await all_ready(fleet, 2)
        await first.stop()
        await second.stop()
        await all_ready(fleet, 0)
        await first.start()
        assert await fleet.wait_ready(20, "m")
        assert fleet.ready("m") == 1
        await first.stop()
        await all_ready(fleet, 0)
        monkeypatch.setattr(pool, "GATHER_SECONDS", 600.0)
        await first.start()
        await until(lambda: first_of(fleet).connection.ready)
        await first.stop()  # it waits no more for the other, and what comes next begins anew
        await until(lambda: not first_of(fleet).connection.ready)
        await second.start()
        await first.start()
        await all_ready(fleet, 2)


def first_of(fleet: EnginePool) -> Engine:
    return fleet.engines()[0]


async def test_rows_are_the_same_array_until_an_engine_comes_or_goes() -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    async with fleet_of(first, second) as fleet:
        await all_ready(fleet, 2)
        rows = fleet.rows("m")
        assert fleet.rows("m") is rows
        assert [fleet.table.ids[row] for row in rows] == [first.address, second.address]
        await first.stop()
        await all_ready(fleet, 1)
        assert [fleet.table.ids[row] for row in fleet.rows("m")] == [second.address]
        with pytest.raises(ValueError, match="read-only"):
            fleet.rows("m")[0] = 0


async def test_an_engines_description_is_in_its_row() -> None:
    engine = ScriptedEngine(
        model_revision="r", block_size=32, kv_cache_groups=4, max_num_seqs=7, max_num_batched_tokens=10
    )
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        pace = engine_pb2.Pace(step_seconds=0.5, token_seconds=0.25, sequence_seconds=0.125, host_block_seconds=2)
        engine.send(load=load(waiting=3, swapped=2, blocks_free=5, blocks_total=9, uncomputed_tokens=40, pace=pace))
        (row,) = fleet.rows("m")
        await until(lambda: fleet.table.waiting[row] == 3)
        expected = {
            "requests": 0, "pending_tokens": 40, "decoding": 0, "waiting": 3, "swapped": 2, "blocks_free": 5,
            "blocks_total": 9, "max_sequences": 7, "step_tokens": 10, "block_size": 8, "step_seconds": 0.5,
            "token_seconds": 0.25, "sequence_seconds": 0.125, "host_block_seconds": 2,
        }  # fmt: skip
        assert {name: getattr(fleet.table, name)[row] for name in expected} == expected
        assert fleet.namespace(row) == BlockNamespace("r", 32)
        assert not fleet.has_capacity("m")
        engine.send(load=engine_pb2.Load())
        await until(lambda: fleet.has_capacity("m"))


async def test_a_dispatch_counts_as_load_from_begin_to_end() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        dispatch = fleet.dispatch(engine.address, submit("a", n=4), pending_tokens=2)
        assert counted(fleet) == (0, 0, 0)
        with dispatch as outputs:
            assert counted(fleet) == (1, 2, 0)
            await engine.submit()
            engine.send(output("a", [7], 0, index=2))
            await anext(outputs)
            assert counted(fleet) == (1, 0, 4)
        assert counted(fleet) == (0, 0, 0)


async def test_a_dispatch_that_fails_gives_its_count_back_and_cancels() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        with pytest.raises(ZeroDivisionError), fleet.dispatch(engine.address, submit("a"), pending_tokens=3):
            await fail_after(engine.submit())
        assert counted(fleet) == (0, 0, 0)
        assert (await engine.cancel()).request_id == "a"


async def test_a_dispatch_that_cannot_begin_is_not_counted() -> None:
    engine = ScriptedEngine()
    async with fleet_of(engine) as fleet:
        await all_ready(fleet, 1)
        with fleet.dispatch(engine.address, submit("a"), pending_tokens=3) as outputs:
            await engine.stop()
            with pytest.raises(EngineLost):
                await anext(outputs)
            with pytest.raises(EngineLost), fleet.dispatch(engine.address, submit("b"), pending_tokens=3):
                pass
        await engine.start()
        await all_ready(fleet, 1)
        assert counted(fleet) == (0, 0, 0)
        with pytest.raises(EngineLost):
            fleet.dispatch("nowhere:1", submit("c"), pending_tokens=3)


async def test_capacity_appears_as_requests_end_and_prompts_are_computed() -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    async with fleet_of(engine) as fleet:
        assert not fleet.has_capacity("m")
        await all_ready(fleet, 1)
        signals: list[bool] = []
        fleet.on_capacity = lambda: signals.append(fleet.has_capacity("m"))
        engine.send(load=load(pace=engine_pb2.Pace(token_seconds=1)))
        await until(lambda: fleet.table.token_seconds[fleet.rows("m")[0]] == 1)
        with fleet.dispatch(engine.address, submit("a"), pending_tokens=2):
            assert not fleet.has_capacity("m")  # two seconds of computing
            await engine.submit()
            engine.send(output("a", [7], 0))
            await until(lambda: fleet.has_capacity("m"))
            with fleet.dispatch(engine.address, submit("b"), pending_tokens=1):
                assert not fleet.has_capacity("m")  # as many requests as it runs at once
            assert signals[-1]
            signals.clear()
        assert signals[-1]


async def test_the_load_of_a_lost_engine_is_cleared() -> None:
    engine = ScriptedEngine()
    heard: list[tuple[str, Any]] = []
    async with fleet_of(engine, on_kv_event=lambda *change: heard.append(change)) as fleet:
        await all_ready(fleet, 1)
        (row,) = fleet.rows("m")
        engine.send(load=load(uncomputed_tokens=40, waiting=1))
        await until(lambda: counted(fleet)[1] == 40)
        heard.clear()
        await engine.stop()
        await until(lambda: fleet.table.pending_tokens[row] == 0)
        assert fleet.table.waiting[row] == 0
        assert heard == [(engine.address, engine_pb2.Snapshot())]


async def fail_after(moment: Awaitable[object]) -> None:
    await moment
    raise ZeroDivisionError


async def test_requests_leave_a_silent_engine_only_for_one_that_gives_a_sign_of_life() -> None:
    """Where none does, all are short of processors: each move would cost them a prompt more."""
    silent, other = ScriptedEngine(), ScriptedEngine()
    addresses = [await engine.start() for engine in (silent, other)]
    settings = ConnectionSettings(silence=0.3, stall=3600)
    fleet = EnginePool(StaticDiscovery(addresses), ["m"], settings)
    fleet._registry._next_probes = inf  # all were asked a moment ago, when they were alive
    await fleet.start()
    try:
        await all_ready(fleet, 2)
        with fleet.dispatch(silent.address, submit("a"), pending_tokens=1) as outputs:
            await silent.submit()
            silent.freeze()
            other.freeze()
            await until(lambda: fleet.ready("m") == 0)  # neither gets anything new
            await asyncio.sleep(0.5)
            assert fleet._engines[silent.address].connection.session.in_flight == 1
            other.thaw()
            with pytest.raises(EngineSilent):
                await asyncio.wait_for(anext(outputs), 20)
    finally:
        await fleet.close()
        for engine in (silent, other):
            await engine.stop()


async def test_an_engine_that_leaves_the_list_gets_nothing_new_and_finishes_what_it_has() -> None:
    engine, discovery = ScriptedEngine(), ScriptedDiscovery()
    address = await engine.start()
    fleet = EnginePool(discovery, ["m"], QUICK)
    await fleet.start()
    discovery.publish(Endpoint(address))
    await all_ready(fleet, 1)
    with fleet.dispatch(address, submit("a"), pending_tokens=3) as outputs:
        await engine.submit()
        discovery.publish()
        await all_ready(fleet, 0)
        assert counted(fleet) == (1, 3, 0)
        engine.send(output("a", [7], 0, STOP))
        assert (await anext(outputs)).token_ids == [7]
    with pytest.raises(EngineLost):
        fleet.dispatch(address, submit("b"), pending_tokens=3)
    assert not list(fleet.table)
    discovery.publish(Endpoint(address))
    await all_ready(fleet, 1)
    await fleet.close()
    await engine.stop()
