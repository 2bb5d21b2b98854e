"""Tasks that live as long as their process: failures are logged, counted and followed by a restart."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY
from quire_proto.supervise import RestartSettings, SupervisedTask, forget_cancellations
from quire_router import background_jobs
from quire_router.api.rpc.grpc_server import RpcServer
from quire_router.autoscale.load_totals import LoadPublisher, LoadSettings
from quire_router.core.retry import failing_tasks, supervise
from quire_router.discovery.base import Endpoint
from quire_router.discovery.combined import CombinedDiscovery
from quire_router.engines import pool as fleets
from quire_router.engines.engine_registry import EngineRegistry
from quire_router.engines.load import LoadLedger
from quire_router.engines.load_messages import SpeculativeBlocks
from quire_router.engines.load_sharing import LoadSharing, LoadSharingSettings
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

from tests.support.scripted_api import ask, open_stage
from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

QUICK = RestartSettings(backoff=0.001, max_backoff=0.002, steady=60.0, most=3)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_proto.supervise.RestartSettings", lambda: QUICK)


def restarts(task: str) -> float:
    return REGISTRY.get_sample_value("quire_router_task_restarts_total", {"task": task}) or 0.0


def failing_once(function: Callable, error: BaseException | None = None) -> Callable:
    """What ``function`` does, but for the first call, which raises."""
    calls: list[object] = []

    def call(*arguments: object, **named: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise error or ZeroDivisionError("once")
        return function(*arguments, **named)

    return call


# The helper


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), asyncio.CancelledError(), TimeoutError()])
async def test_an_exception_of_a_task_is_logged_and_counted_and_the_task_restarts(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    again, before = asyncio.Event(), restarts("a test")

    async def work() -> None:
        if restarts("a test") < before + 2:
            raise error
        again.set()
        await asyncio.Event().wait()

    task = supervise("a test", work, of="which")
    await again.wait()
    assert restarts("a test") == before + 2
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("a test of which" in record.getMessage() and record.exc_info for record in errors)
    await task.stop()
    assert task.done


async def test_a_task_that_returns_is_not_restarted() -> None:
    calls = []

    async def work() -> None:
        calls.append(1)

    task = supervise("a test", work)
    await until(lambda: task.done)
    await asyncio.sleep(0.02)
    assert (calls, task.failing) == ([1], False)
    await task.stop()


async def test_a_task_group_that_failed_leaves_no_cancellation_behind() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
    task.cancel()  # as before 3.13, where a group leaves its own counted
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert task.cancelling()
    forget_cancellations()
    assert not task.cancelling()


async def test_a_task_that_is_cancelled_from_outside_ends_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    task = SupervisedTask("watched", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for running in asyncio.all_tasks():
        if running.get_name() == "watched":
            running.cancel()
    await until(lambda: task.done)
    assert task.failing
    assert "watched was cancelled from outside, and ends" in caplog.text


async def test_stopping_ends_a_task_that_swallows_its_cancellation_and_one_that_waits_to_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_proto.supervise._CANCEL_INTERVAL", 0.01)

    async def deaf() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        await asyncio.sleep(60)

    async def broken() -> None:
        raise ZeroDivisionError

    slow = RestartSettings(backoff=60.0, max_backoff=60.0)
    tasks = [SupervisedTask("deaf", deaf), SupervisedTask("broken", broken, settings=slow)]
    await asyncio.sleep(0.01)
    for task in tasks:
        await task.stop()
        assert task.done
        assert not task.failing


async def test_a_task_that_ran_steadily_resets_its_failures() -> None:
    steady, runs = RestartSettings(backoff=0.001, max_backoff=0.002, steady=0.0, most=2), []

    async def work() -> None:
        runs.append(1)
        raise ZeroDivisionError

    task = SupervisedTask("steady", work, settings=steady)
    await until(lambda: len(runs) > 5)
    assert not task.failing
    await task.stop()


async def test_only_a_vital_task_that_keeps_failing_is_listed_as_failing() -> None:
    async def broken() -> None:
        if not mended:
            raise ZeroDivisionError
        await asyncio.sleep(60)

    mended: list[bool] = []
    before = restarts("vital")
    tasks = [supervise("vital", broken), supervise("one of many", broken, of="each", vital=False)]
    await until(lambda: failing_tasks() == ["vital"])
    assert restarts("vital") >= before + QUICK.most
    for task in tasks:
        await task.stop()
    assert failing_tasks() == []


async def test_a_task_that_works_again_is_not_failing_any_more() -> None:
    settings = RestartSettings(backoff=0.001, max_backoff=0.001, steady=0.05, most=3)
    mended = asyncio.Event()

    async def work() -> None:
        if not mended.is_set():
            raise ZeroDivisionError
        await asyncio.sleep(60)

    task = SupervisedTask("moody", work, settings=settings)
    await until(lambda: task.failing)
    mended.set()
    await until(lambda: not task.failing)
    await task.stop()


async def test_a_router_whose_vital_task_keeps_failing_is_not_live_and_still_serves() -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    async with open_stage() as stage:
        assert (await ask(stage.admin_port, "GET", "/live")).status == 200
        task = supervise("vital", broken)
        await until(lambda: bool(failing_tasks()))
        assert (await ask(stage.admin_port, "GET", "/live")).status == 503
        assert (await ask(stage.admin_port, "GET", "/ready")).status == 200
        await task.stop()
        assert (await ask(stage.admin_port, "GET", "/live")).status == 200


# What lives as long as a router


@asynccontextmanager
async def found_engine() -> AsyncIterator[tuple[ScriptedEngine, ScriptedDiscovery, Endpoint]]:
    engine, announced = ScriptedEngine(), ScriptedDiscovery()
    try:
        yield engine, announced, Endpoint(await engine.start())
    finally:
        await engine.stop()


async def test_discovery_continues_after_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = restarts("engine discovery")
    monkeypatch.setattr(EngineRegistry, "update", failing_once(EngineRegistry.update))
    async with found_engine() as (_, announced, there):
        source = CombinedDiscovery({"announced": announced})
        fleet = EnginePool(source, ["m"], ConnectionSettings(backoff=0.01))
        await fleet.start()
        announced.publish(there)
        await until(lambda: fleet.ready("m") == 1)
        assert restarts("engine discovery") == before + 1
        await fleet.close()


async def test_an_engine_that_cannot_be_added_does_not_block_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = EngineRegistry._connect

    def picky(self: EngineRegistry, address: str) -> None:
        if address == "127.0.0.1:1":
            raise ZeroDivisionError
        connect(self, address)

    monkeypatch.setattr(EngineRegistry, "_connect", picky)
    async with found_engine() as (_, announced, there):
        fleet = EnginePool(announced, ["m"], ConnectionSettings(backoff=0.01))
        await fleet.start()
        announced.publish(Endpoint("127.0.0.1:1"), there)
        await until(lambda: fleet.ready("m") == 1)
        await fleet.close()
    assert "cannot add or remove engine 127.0.0.1:1" in caplog.text


async def test_a_failed_discovery_source_is_not_reported_connected() -> None:
    """Of a source that fails, and of one whose listener does."""

    class Source:
        def __init__(self) -> None:
            self.fail = asyncio.Event()

        async def watch(self):
            fleets.metrics.DISCOVERY_CONNECTED.labels("source").set(1)
            yield [Endpoint("127.0.0.1:1")]
            await self.fail.wait()
            raise ZeroDivisionError

    def connected() -> float | None:
        return REGISTRY.get_sample_value("quire_discovery_connected", {"source": "source"})

    source = Source()
    views = CombinedDiscovery({"source": source}).watch()
    assert await anext(views) == (Endpoint("127.0.0.1:1"),)
    assert connected() == 1
    await views.aclose()
    assert connected() == 0
    views = CombinedDiscovery({"source": source}).watch()
    assert await anext(views)
    source.fail.set()
    source.watch = failing_once(Source.watch)  # type: ignore[method-assign]
    await until(lambda: connected() == 0)
    await views.aclose()


async def test_grpc_health_continues_after_a_failure_and_stopping_skips_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = restarts("grpc health")
    async with open_stage() as stage:
        server = RpcServer(stage.service, "127.0.0.1:0", max_message_bytes=1000, client_timeout=1.0)
        await server.start()
        calls: list[int] = []

        async def broken() -> None:
            calls.append(1)
            raise ZeroDivisionError

        monkeypatch.setattr(server, "_publish_health", broken)
        await until(lambda: len(calls) > 1)
        assert restarts("grpc health") > before
        await server.stop(0.1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_leases_of_other_routers_end_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ticks = EngineTable(), []
    ledger = LoadLedger(table)
    monkeypatch.setattr(ledger, "tick", failing_once(lambda: ticks.append(1)))
    expectations, settings = SpeculativeBlocks(table, PrefixIndex()), LoadSharingSettings(tick=0.001)
    peers = LoadSharing("redis://127.0.0.1:1", ledger, expectations, settings=settings)
    peers.start()
    await until(lambda: len(ticks) > 1)
    await peers.close()


async def test_the_load_is_published_to_autoscalers_after_a_failure() -> None:
    calls: list[int] = []
    teller = LoadPublisher(
        "redis://127.0.0.1:1", failing_once(lambda: calls.append(1) or {}), LoadSettings(interval=0.01)
    )
    teller.start()
    await until(lambda: bool(calls))
    await teller.close()


async def test_upkeep_continues_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_jobs, "SWEEP_PERIOD", 0.001)
    index, swept = PrefixIndex(), []

    class Life:
        async def adopt(self) -> int:
            return 0

    monkeypatch.setattr(index, "sweep", failing_once(swept.append))
    keeping = background_jobs.BackgroundJobs(Life(), index, MemoryJournal())  # type: ignore[arg-type]
    keeping.start()
    await until(lambda: len(swept) > 1)
    await keeping.stop()
