"""What a router knows of its engines' adapters: which there are, who can run a request for one, and who is busy with
others; and adapters that are loaded and unloaded at all engines, those that join later included.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from quire.v1 import types_pb2
from quire_proto.errors import ErrorCode, QuireError
from quire_router.core.errors import journal_unavailable
from quire_router.core.generation import LoRA
from quire_router.discovery.base import Endpoint
from quire_router.engines import lora_updates
from quire_router.engines.attempt import LoRAMissing
from quire_router.engines.loaded_loras import LoadedLoRAs
from quire_router.engines.lora_updates import LoRAUpdater
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ServedLoRA
from quire_router.journal.objects import MemoryObjectStore, ObjectStore, StoredObject

from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.scripted_engine import ERROR, ScriptedEngine, output
from tests.support.waiting import until
from tests.unit.router.engines.test_pool import QUICK, all_ready, fleet_of, submit

OLD, NEW = LoRA("x", b"old"), LoRA("x", b"new")


def engine(loras: dict[str, bytes], max_loras: int = 1, **more: object) -> ScriptedEngine:
    made = ScriptedEngine(max_loras=max_loras, **more)  # type: ignore[arg-type]
    made.loras = loras
    return made


async def hears(fleet: EnginePool, *names: str) -> None:
    await until(lambda: set(fleet.loras()) == set(names))


async def test_a_request_for_an_adapter_can_run_where_that_very_adapter_is() -> None:
    engines = engine({"x": b"old"}), engine({"x": b"new", "m": b"m"}), engine({"x": b"new"}), engine({})
    async with fleet_of(*engines) as fleet:
        await all_ready(fleet, 4)
        await until(lambda: fleet.loras() == {"x": ServedLoRA("m", NEW)})  # and a model's name is no adapter's
        assert fleet.ready("m", NEW) == 2
        assert fleet.rows("m", NEW) is fleet.rows("m", NEW)
        assert [fleet.table.ids[row] for row in fleet.rows("m", OLD)] == [engines[0].address]
        assert fleet.ready("m", LoRA("x", b"")) == fleet.ready("other", NEW) == 0


async def test_changes_are_heard_while_sessions_last_and_when_they_are_resumed() -> None:
    changing = engine({"x": b"old"})
    async with fleet_of(changing) as fleet:
        await hears(fleet, "x")
        changing.set_loras({"x": b"new", "y": b"y"})
        await hears(fleet, "x", "y")
        assert fleet.ready("m", OLD) == 0
        assert await fleet.wait_ready(1, "m", NEW)
        assert not await fleet.wait_ready(0.01, "m", OLD)
        changing.break_stream()
        changing.loras = {}
        await hears(fleet)


async def test_adapters_of_a_model_that_has_lost_its_last_engine_are_remembered() -> None:
    """A request for one is then held, and counts for the autoscaler."""
    leaving, other = engine({"x": b"old"}), engine({"y": b"y"}, models=["other"])
    async with fleet_of(leaving, other, models=["m", "other"]) as fleet:
        await hears(fleet, "x", "y")
        fleet._registry.update([each.endpoint for each in fleet.engines() if "other" in each.models])
        await all_ready(fleet, 0)
        assert set(fleet.loras()) == {"x", "y"}


async def test_it_is_known_which_engines_use_an_adapter_and_which_have_no_slot_for_another() -> None:
    engines = [engine({"x": b"new", "y": b"y"}, max_loras=2) for _ in range(3)]
    async with fleet_of(*engines) as fleet:
        await all_ready(fleet, 3)
        await hears(fleet, "x", "y")
        rows = fleet.rows("m", NEW)

        def columns() -> list[list[bool]]:
            found = fleet.lora_columns(rows, NEW)
            return [found.active.tolist(), found.full.tolist()]

        assert columns() == [[False] * 3, [False] * 3]
        engines[0].send(active_loras=["x"])
        engines[1].send(active_loras=["y", "z"])
        await until(lambda: columns() == [[True, False, False], [False, True, False]])
        message = submit("r")
        message.lora_name = "x"
        with fleet.dispatch(engines[2].address, message, pending_tokens=0):
            assert columns()[0] == [True, False, True], "until the engine says so itself"
        engines[0].send()
        engines[1].send(active_loras=[])
        await until(lambda: columns() == [[True, False, True], [False] * 3])


async def test_a_request_whose_adapter_was_just_unloaded_is_refused_by_that_engine_alone() -> None:
    only = engine({"x": b"new"})
    async with fleet_of(only) as fleet:
        await all_ready(fleet, 1)
        with fleet.dispatch(only.address, submit("r"), pending_tokens=0) as outputs:
            await only.submit()
            missing = types_pb2.Error(code=types_pb2.ERROR_CODE_NOT_FOUND, message="This engine has no adapter x.")
            only.send(output("r", finish_reason=ERROR, error=missing))
            with pytest.raises(LoRAMissing):
                await anext(aiter(outputs))


async def test_an_adapter_is_loaded_and_unloaded_at_all_engines_of_its_model() -> None:
    engines = [engine({}), engine({}), ScriptedEngine(), engine({}, models=["other"])]
    async with fleet_of(*engines, models=["m", "other"]) as fleet:
        await all_ready(fleet, 3)
        await all_ready(fleet, 1, "other")
        updater = LoRAUpdater(fleet, ["m", "other"], LoadedLoRAs(MemoryObjectStore()))
        with pytest.raises(QuireError, match=r"of which model .* m, other") as several:
            await updater.load("x", "new")
        assert several.value.param == "base_model_name"
        await updater.load("x", "new", "m")
        assert fleet.loras() == {"x": ServedLoRA("m", NEW)}
        await until(lambda: fleet.ready("m", NEW) == 2)  # and not where none are served
        await updater.unload("x")
        await hears(fleet)
        for name, code in {"x": ErrorCode.NOT_FOUND, "y": ErrorCode.NOT_FOUND}.items():
            with pytest.raises(QuireError) as missing:
                await updater.unload(name)
            assert missing.value.code is code


async def test_a_failure_at_one_engine_says_where_and_leaves_the_others() -> None:
    good, bad = engine({}), engine({})
    bad.lora_refusal = grpc.StatusCode.INVALID_ARGUMENT
    async with fleet_of(good, bad) as fleet:
        await all_ready(fleet, 2)
        with pytest.raises(QuireError, match=rf"No such folder\. That is so at {bad.address}; 1 of 2") as refused:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load("x", "new")
        assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, "lora_path")
        await hears(fleet, "x")
        assert fleet.ready("m", NEW) == 1


async def test_an_engine_that_is_gone_is_named_where_the_others_have_unloaded() -> None:
    stays, leaves = engine({}), engine({})
    async with fleet_of(stays, leaves) as fleet:
        await all_ready(fleet, 2)
        updater = LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore()))
        await updater.load("x", "new")
        await leaves.stop()
        await until(lambda: fleet.ready("m") == 1)
        with pytest.raises(QuireError, match=rf"not connected\. That is so at {leaves.address}; 1 of 2") as refused:
            await updater.unload("x")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert stays.unloaded == ["x"]


@pytest.mark.parametrize(
    ("name", "model", "code"),
    [("m", None, ErrorCode.CONFLICT), ("x", "nowhere", ErrorCode.NOT_FOUND), ("x", "m", ErrorCode.INVALID)],
)
async def test_what_cannot_be_loaded_is_refused(name: str, model: str | None, code: ErrorCode) -> None:
    async with fleet_of(ScriptedEngine()) as fleet:
        await all_ready(fleet, 1)
        with pytest.raises(QuireError) as refused:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load(name, "new", model)
        assert refused.value.code is code


async def test_without_an_engine_loading_may_be_tried_again() -> None:
    async with fleet_of() as fleet:
        with pytest.raises(QuireError) as refused:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load("x", "new")
        assert refused.value.code is ErrorCode.UNAVAILABLE


async def dies(engine: ScriptedEngine) -> None:
    await until(lambda: len(engine.lora_requests) == 1)
    await engine.stop()


@pytest.mark.parametrize("others", [0, 1])
async def test_an_engine_that_dies_while_it_loads_an_adapter_is_a_typed_error(others: int) -> None:
    """A channel that closes makes its calls look cancelled: the caller's task is not."""
    dying, living = engine({}), [engine({}) for _ in range(others)]
    dying.lora_gate.clear()
    async with fleet_of(dying, *living) as fleet:
        await all_ready(fleet, 1 + others)
        death = asyncio.create_task(dies(dying))
        with pytest.raises(QuireError) as failed:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load("x", "new")
        await death
        assert (failed.value.code, failed.value.retry_after) == (ErrorCode.UNAVAILABLE, 5.0)
        assert (dying.address in failed.value.message) is bool(others)
        await hears(fleet, *["x"] * others)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.CANCELLED, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.OVERLOADED),
        (grpc.StatusCode.UNKNOWN, ErrorCode.INTERNAL),
    ],
)
async def test_each_status_that_a_load_can_end_with_is_a_typed_error(status: grpc.StatusCode, code: ErrorCode) -> None:
    only = engine({})
    only.lora_refusal = status
    async with fleet_of(only) as fleet:
        await all_ready(fleet, 1)
        with pytest.raises(QuireError) as failed:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load("x", "new")
        assert failed.value.code is code


async def test_what_is_cancelled_stays_cancelled() -> None:
    only = engine({})
    only.lora_gate.clear()
    async with fleet_of(only) as fleet:
        await all_ready(fleet, 1)
        loading = asyncio.create_task(LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).load("x", "new"))
        await until(lambda: len(only.lora_requests) == 1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading


# What is not known yet


async def test_adapters_are_known_once_each_source_and_each_engine_has_answered() -> None:
    discovery, complete = ScriptedDiscovery(), asyncio.Event()
    first, late = engine({}), engine({"x": b"new"})
    fleet = EnginePool(discovery, ["m"], QUICK, is_complete=complete.is_set)
    await fleet.start()
    try:
        assert not fleet.knows_loras()
        addresses = [await first.start(), await late.start()]
        await late.stop()
        discovery.publish(*map(Endpoint, addresses))
        await all_ready(fleet, 1)
        complete.set()
        await fleet.wait_for_lora("x", 0.05)
        assert not fleet.knows_loras()
        waiting = asyncio.create_task(fleet.wait_for_lora("x", 20))
        await late.start()
        await waiting
        assert set(fleet.loras()) == {"x"}
        await until(fleet.knows_loras)
    finally:
        await fleet.close()
        await first.stop()
        await late.stop()


async def test_an_engine_that_never_answers_is_waited_for_as_long_as_a_start_takes() -> None:
    discovery, first, gone = ScriptedDiscovery(), engine({}), engine({})
    fleet = EnginePool(discovery, ["m"], replace(QUICK, start_patience=0.2))
    await fleet.start()
    try:
        addresses = [await first.start(), await gone.start()]
        await gone.stop()
        discovery.publish(Endpoint(addresses[1]))
        await asyncio.sleep(0.3)
        fleet.refresh_loras()
        assert not fleet.knows_loras(), "nobody has said anything"
        discovery.publish(*map(Endpoint, addresses))
        await all_ready(fleet, 1)
        await until(fleet.knows_loras)
    finally:
        await fleet.close()
        await first.stop()


async def test_an_adapter_is_not_unloaded_before_it_is_known_where_it_is() -> None:
    """Neither is it unknown: an engine may still say that it has it."""
    first, late = engine({}), engine({"x": b"new"})
    late.lora_paths["x"] = "new"
    await late.start()
    await late.stop()
    async with fleet_of(first) as fleet:
        await all_ready(fleet, 1)
        join(fleet, first, late)
        with pytest.raises(QuireError) as unknown:
            await LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore()), hold_timeout=0.05).unload("x")
        assert (unknown.value.code, unknown.value.reason) == (ErrorCode.UNAVAILABLE, "model_not_known_yet")
        unloading = asyncio.create_task(LoRAUpdater(fleet, ["m"], LoadedLoRAs(MemoryObjectStore())).unload("x"))
        await late.start()
        await asyncio.wait_for(unloading, 20)
        assert late.unloaded == ["x"]
    await late.stop()


async def test_an_engine_that_begins_again_has_not_unloaded_its_adapters() -> None:
    only = engine({"x": b"new"})
    async with fleet_of(only) as fleet:
        await hears(fleet, "x")
        only.loras = {}
        only.restart_as(2)
        only.break_stream()
        await until(lambda: not fleet.engines()[0].connection.loras)
        assert fleet.has_lora("m", NEW)
        only.set_loras({"x": b"new"})
        await hears(fleet, "x")
        only.set_loras({})
        await hears(fleet)
        assert not fleet.has_lora("m", NEW)
        only.set_loras({"x": b"new"})
        await until(lambda: fleet.has_lora("m", NEW))
        only.set_loras({"x": b"old"})
        await until(lambda: not fleet.has_lora("m", NEW))


# Engines that join the others


@asynccontextmanager
async def updating(
    *engines: ScriptedEngine, ready: int | None = None, store: ObjectStore | None = None
) -> AsyncIterator[tuple[EnginePool, LoRAUpdater]]:
    """A router that keeps its engines up with each other."""
    async with fleet_of(*engines) as fleet:
        await all_ready(fleet, len(engines) if ready is None else ready)
        updater = LoRAUpdater(fleet, ["m"], LoadedLoRAs(store or MemoryObjectStore()))
        updater.start()
        try:
            yield fleet, updater
        finally:
            await updater.close()


class DistantStore(MemoryObjectStore):
    """One to which there is a way, so that others come in between."""

    away = False

    async def get(self, name: str) -> StoredObject | None:
        await asyncio.sleep(0)
        if self.away:
            raise journal_unavailable()
        return await super().get(name)


def join(fleet: EnginePool, *engines: ScriptedEngine) -> None:
    fleet._registry.update([Endpoint(each.address) for each in engines])


def asked(of: ScriptedEngine) -> list[tuple[str, str, bytes]]:
    return [(each.lora_name, each.lora_path, each.digest) for each in of.lora_requests]


async def test_an_engine_that_joins_gets_what_others_have_loaded_but_not_what_they_began_with() -> None:
    first, joining = engine({"given": b"given"}), engine({})
    await joining.start()
    try:
        async with updating(first) as (fleet, updater):
            await updater.load("x", "new")
            join(fleet, first, joining)
            await until(lambda: fleet.ready("m", NEW) == 2)
            assert asked(joining) == [("x", "new", b"new")]
            assert fleet.ready("m", LoRA("given", b"given")) == 1
    finally:
        await joining.stop()


async def test_an_engine_that_begins_again_gets_them_and_requests_wait_for_that() -> None:
    only = engine({})
    async with updating(only) as (fleet, updater):
        await updater.load("x", "new")
        only.loras = {}
        only.restart_as(2)
        only.break_stream()
        await until(lambda: fleet.ready("m", NEW) == 0)
        assert fleet.loras() == {"x": ServedLoRA("m", NEW)}
        assert fleet.has_lora("m", NEW)
        assert await fleet.wait_ready(5, "m", NEW)
        assert asked(only)[1:] == [("x", "new", b"new")]


async def test_a_router_that_starts_later_knows_what_others_have_loaded() -> None:
    first, joining = engine({"x": b"new"}), engine({})
    first.lora_paths["x"] = "new"
    async with updating(first, joining) as (fleet, _):
        await until(lambda: fleet.ready("m", NEW) == 2)
    assert asked(joining) == [("x", "new", b"new")]


async def test_what_clients_have_loaded_outlives_all_engines_and_all_routers() -> None:
    store, first = MemoryObjectStore(), engine({})
    async with updating(first, store=store) as (_, updater):
        await updater.load("x", "new")
        await updater.load("y", "new")
        await updater.unload("y")
    successor = engine({})
    async with updating(successor, store=store) as (fleet, _):
        assert await fleet.wait_ready(5, "m", NEW)
        assert asked(successor) == [("x", "new", b"new")]


async def test_what_another_router_loads_and_unloads_is_known_without_an_engine() -> None:
    store, only = MemoryObjectStore(), engine({})
    only.lora_refusal = grpc.StatusCode.UNAVAILABLE
    other = LoadedLoRAs(store)
    other.change("x", ServedLoRA("m", NEW))
    await other.sync()
    async with updating(only, store=store) as (fleet, updater):
        await until(lambda: fleet.has_lora("m", NEW))
        other.change("x", None)
        await other.sync()
        await updater._sync()
        assert not fleet.loras()


async def test_adapters_are_not_known_before_the_store_has_been_read() -> None:
    """What could not be written is written once the store is there again."""
    store, only = DistantStore(), engine({})
    store.away = True
    loaded = LoadedLoRAs(store)
    async with fleet_of(only, is_complete=lambda: loaded.is_read) as fleet:
        await all_ready(fleet, 1)
        updater = LoRAUpdater(fleet, ["m"], loaded)
        await updater.load("x", "new")
        assert set(fleet.loras()) == {"x"}
        assert not fleet.knows_loras()
        waiting = asyncio.create_task(fleet.wait_for_lora("y", 20))
        await asyncio.sleep(0.1)
        store.away = False
        await updater._sync()
        async with asyncio.timeout(5):
            await waiting
        assert fleet.knows_loras()
    assert await LoadedLoRAs(store).sync() == {"x": ServedLoRA("m", NEW)}


async def test_the_same_adapter_in_another_folder_is_loaded_from_there() -> None:
    store, only = MemoryObjectStore(), engine({})
    moved = LoadedLoRAs(store)
    async with updating(only, store=store) as (fleet, updater):
        await updater.load("x", "new")
        moved.change("x", ServedLoRA("m", replace(NEW, path="moved")))
        await moved.sync()
        await updater._sync()
        assert fleet.expected_loras["x"].lora.path == "moved"


async def test_two_routers_that_write_at_once_lose_nothing() -> None:
    store = DistantStore()
    lists = [LoadedLoRAs(store) for _ in range(8)]
    for number, each in enumerate(lists):
        each.change(f"x{number}", ServedLoRA("m", LoRA(f"x{number}", b"new", "new")))
    await asyncio.gather(*(each.sync() for each in lists))
    assert set(await LoadedLoRAs(store).sync()) == {f"x{number}" for number in range(8)}


async def test_what_is_unloaded_does_not_come_back_whoever_unloads_it() -> None:
    engines = engine({}), engine({}), engine({})
    await engines[2].start()
    try:
        async with updating(*engines[:2]) as (fleet, updater):
            await updater.load("x", "new")
            await updater.load("y", "new")
            await updater.unload("x")
            assert set(fleet.loras()) == {"y"}, "no later than the answer"
            engines[0].set_loras({})  # as another router has it unload y, first here and then there
            await hears(fleet, "y")
            await until(lambda: not fleet.expected_loras)
            engines[1].set_loras({})
            await hears(fleet)
            join(fleet, *engines)
            await all_ready(fleet, 3)
            await asyncio.sleep(0.1)
            assert [len(each.lora_requests) for each in engines] == [2, 2, 0]
    finally:
        await engines[2].stop()


async def test_an_adapter_that_is_unloaded_while_an_engine_loads_it_leaves_that_too() -> None:
    first, joining = engine({"x": b"new"}), engine({})
    first.lora_paths["x"] = "new"
    joining.lora_gate.clear()
    async with updating(first, joining) as (fleet, updater):
        await until(lambda: len(joining.lora_requests) == 1)
        await updater.unload("x")
        joining.lora_gate.set()
        await until(lambda: joining.unloaded == ["x"])
        await hears(fleet)


async def test_an_engine_that_cannot_load_one_is_left_in_peace_and_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, joining = engine({"x": b"new"}), engine({})
    first.lora_paths["x"] = "new"
    joining.lora_refusal = grpc.StatusCode.INVALID_ARGUMENT
    monkeypatch.setattr(lora_updates, "_RETRY_SECONDS", 1.5)
    monkeypatch.setattr(lora_updates, "_SEEN_TIMEOUT", 0.1)
    async with updating(first, joining) as (fleet, _):
        await until(lambda: f"engine {joining.address} cannot load the adapter x" in caplog.text)
        for _ in range(5):
            fleet._on_change()
            await asyncio.sleep(0.1)
        assert caplog.text.count("cannot load the adapter") == 1
        joining.lora_refusal = None
        await until(lambda: fleet.ready("m", NEW) == 2)


async def test_an_adapter_whose_model_has_no_engine_can_be_unloaded() -> None:
    only = engine({})
    async with updating(only) as (fleet, updater):
        await updater.load("x", "new")
        join(fleet)
        await all_ready(fleet, 0)
        assert set(fleet.loras()) == {"x"}
        await updater.unload("x")
        assert not fleet.loras()


async def test_other_files_under_an_old_name_are_named_by_the_next_request() -> None:
    """What engines say on their streams is late: the answer waits for it."""
    slow = engine({"x": b"old"})
    slow.lora_paths["x"] = "old"
    async with updating(slow) as (fleet, updater):
        await hears(fleet, "x")
        slow.says_loras_after = 0.2
        await updater.unload("x")
        assert not fleet.loras()
        await updater.load("x", "new")
        assert fleet.loras() == {"x": ServedLoRA("m", NEW)}


async def test_an_adapter_that_an_engine_cannot_read_is_told_from_a_full_queue() -> None:
    only = engine({"x": b"new"})
    async with fleet_of(only) as fleet:
        await all_ready(fleet, 1)
        with fleet.dispatch(only.address, submit("r"), pending_tokens=0) as outputs:
            await only.submit()
            error = types_pb2.Error(code=types_pb2.ERROR_CODE_UNAVAILABLE, message="It cannot be read.", param="model")
            only.send(output("r", finish_reason=ERROR, error=error))
            with pytest.raises(LoRAMissing, match="It cannot be read") as refused:
                await anext(aiter(outputs))
            assert refused.value.error.code is ErrorCode.UNAVAILABLE
