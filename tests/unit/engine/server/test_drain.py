"""How an engine shuts down: it serves on for the delay, drains, and does not wait for a core that has failed."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_engine.config import EngineConfig
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.data_parallel import DataParallel, DPMessage, DPMessageKind, Lockstep
from quire_engine.core.executor import ExecutorError
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core_client.client import LoadedCore
from quire_engine.core_client.core_thread import CoreThread
from quire_engine.server import grpc_server, session_manager
from quire_engine.server.grpc_options import server_options
from quire_engine.server.server import EngineServer
from quire_router.engines.connection import EngineConnection
from quire_router.engines.settings import ConnectionSettings

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.ports import cut_off, free_port
from tests.support.processes import fetch
from tests.support.slow_grammars import SlowSource
from tests.support.waiting import until

CAPACITY = KVCacheConfig(4, 4000, 0)
LONG = 600.0


class Executor(PagedExecutor):
    """Takes a millisecond a step, so that a long request runs for a while on any machine. Fails as a whole once
    ``broken``: then there is no core any more.
    """

    broken = False
    spins = False  # while it is held

    def __init__(self, capacity: KVCacheConfig) -> None:
        super().__init__(capacity)
        self.held = Event()  # a step takes until it is set
        self.held.set()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        if self.broken:
            raise ExecutorError("a block copy failed")
        time.sleep(0.001)
        while self.spins and not self.held.is_set():
            pass
        if not self.held.wait(20) or self.broken:
            raise ExecutorError("the others are gone")
        return super().execute_model(scheduler_output)


class Served:
    """An engine's service in this process, with a router's link to it."""

    def __init__(
        self,
        *,
        shutdown_delay: float,
        data_parallel: DataParallel | None = None,
        settings: ConnectionSettings | None = None,
        **flags: Any,
    ) -> None:
        self.executor = Executor(CAPACITY)
        self.port, self.metrics_port = free_port(), free_port()
        config = EngineConfig(
            model=Path("demo"),
            host="127.0.0.1",
            port=self.port,
            metrics_port=self.metrics_port,
            session_grace=5,
            shutdown_delay=shutdown_delay,
            shutdown_timeout=LONG,
            stall_timeout=60,
            trace_step_interval=1000,
            **flags,
        )
        scheduler = Scheduler(SchedulerConfig(max_model_len=4000, vocab_size=VOCAB_SIZE), KVCacheManager(CAPACITY))
        description = engine_pb2.DescribeResponse(served_model_names=["m"], max_model_len=4000, vocab_size=VOCAB_SIZE)
        core = CoreThread(scheduler, self.executor, data_parallel=data_parallel)
        self.server = EngineServer(config, LoadedCore(core, description, SlowSource()))
        self.serving = self.server.serve()
        self.load = engine_pb2.Load()
        self.link = EngineConnection(f"127.0.0.1:{self.port}", settings, on_load=self.load.CopyFrom)

    async def probes(self) -> list[int]:
        pages = ("/started", "/ready", "/live")
        return [(await asyncio.to_thread(fetch, self.metrics_port, page))[0] for page in pages]

    async def tokens(self, request_id: str, count: int) -> list[int]:
        sampling = types_pb2.SamplingParams(max_tokens=count, ignore_eos=True)
        outputs = self.link.submit(
            engine_pb2.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling)
        )
        return [token async for output in outputs for token in output.token_ids]


@asynccontextmanager
async def served(
    *,
    shutdown_delay: float = 0.0,
    data_parallel: DataParallel | None = None,
    settings: ConnectionSettings | None = None,
    **flags: Any,
) -> AsyncIterator[tuple[Served, asyncio.Task[None]]]:
    """One that is ready, and the task that ends with it. ``settings`` are those of the link, ``flags`` the engine's."""
    engine = Served(shutdown_delay=shutdown_delay, data_parallel=data_parallel, settings=settings, **flags)
    serving = asyncio.create_task(engine.serving)
    engine.link.start()
    try:
        await until(lambda: engine.link.ready)
        yield engine, serving
    finally:
        await engine.link.close()
        while not serving.done():
            signal.raise_signal(signal.SIGTERM)  # the second ends the first stage
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asyncio.wait([serving])


async def test_an_engine_in_its_shutdown_delay_still_serves_and_is_not_ready() -> None:
    async with served(shutdown_delay=LONG) as (engine, serving):
        assert await engine.probes() == [200, 200, 200]
        signal.raise_signal(signal.SIGTERM)
        await until_probes(engine, [200, 503, 200])
        assert len(await engine.tokens("late", 4)) == 4
        assert engine.link.ready
        signal.raise_signal(signal.SIGINT)
        await serving
        assert not engine.link.ready


@pytest.mark.parametrize("busy", [False, True])
async def test_an_engine_is_heard_however_long_a_step_takes(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the core's thread computes in Python all the time."""
    monkeypatch.setattr(session_manager, "HEARTBEAT_INTERVAL", 0.01)
    async with served() as (engine, _):
        engine.executor.spins = busy
        engine.executor.held.clear()
        running = asyncio.create_task(engine.tokens("a", 1))
        await until(lambda: engine.link.session.sequence >= 20)
        assert not running.done()
        engine.executor.held.set()
        assert len(await running) == 1


async def test_a_client_path_on_an_engine_points_to_the_router() -> None:
    async with served() as (engine, _):
        status, said = await asyncio.to_thread(fetch, engine.metrics_port, "/v1/models")

    assert (status, "through a router" in json.loads(said)["error"]) == (404, True)


@pytest.mark.parametrize("port", ["port", "metrics_port"])
async def test_an_engine_whose_port_is_taken_ends_with_its_address(port: str) -> None:
    engine = Served(shutdown_delay=0)
    address = f"127.0.0.1:{getattr(engine, port)}"
    with socket.create_server(("127.0.0.1", getattr(engine, port))), pytest.raises(OSError, match=address):
        await engine.serving


async def test_a_draining_engine_finishes_its_requests_and_admits_no_new_ones() -> None:
    async with served() as (engine, serving):
        running = asyncio.create_task(engine.tokens("a", 300))
        await until(lambda: engine.load.running > 0)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: not engine.link.ready)
        assert len(await running) == 300
        await serving


@pytest.mark.parametrize("delay", [0.0, LONG])
async def test_an_engine_whose_core_fails_during_shutdown_does_not_wait_for_requests(delay: float) -> None:
    async with served(shutdown_delay=delay) as (engine, serving):
        running = asyncio.create_task(engine.tokens("a", 3000))
        await until(lambda: engine.load.running > 0)
        signal.raise_signal(signal.SIGTERM)
        engine.executor.broken = True
        with pytest.raises(ExecutorError):
            await serving
        await engine.link.close()
        await asyncio.wait([running])
        assert running.exception() is not None


async def test_an_engine_whose_group_has_lost_another_does_not_say_that_it_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It hears of the loss in the middle of a step, which fails later."""
    caplog.set_level("INFO")
    lockstep = Lockstep(lambda _: None)
    async with served(data_parallel=DataParallel(lockstep, lambda: None)) as (engine, serving):
        engine.executor.held.clear()
        running = asyncio.create_task(engine.tokens("a", 3000))
        await until(lambda: engine.server._sessions.in_progress > 0)
        lockstep.receive(DPMessage(DPMessageKind.LOST, reason="Engine 1 is gone."))
        await asyncio.to_thread(lockstep.wait_until_leaving)
        await asyncio.wait([serving], timeout=0.2)  # in which it would have begun to leave
        engine.executor.broken = True
        engine.executor.held.set()
        with pytest.raises(ExecutorError):
            await serving
        await engine.link.close()
        await asyncio.gather(running, return_exceptions=True)
    assert "stops with it" not in caplog.text
    assert "is shutting down" not in caplog.text


async def until_probes(engine: Served, expected: list[int]) -> None:
    async with asyncio.timeout(20):
        while await engine.probes() != expected:
            pass


async def test_a_router_that_vanishes_leaves_no_session_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open on the engine's side, and nothing more comes over it."""
    monkeypatch.setattr(grpc_server, "server_options", partial(server_options, 0.2))
    async with served() as (engine, _), cut_off(engine.port) as (port, dead):
        manager = engine.server._sessions
        vanishing = EngineConnection(f"127.0.0.1:{port}")
        vanishing.start()
        try:
            await until(lambda: vanishing.ready)
            await asyncio.sleep(1.0)
            assert manager._sessions.get(vanishing.session.id) is not None  # one that is there answers
            dead.set()
            await until(lambda: manager._sessions.get(vanishing.session.id) is None)
            assert engine.link.ready
        finally:
            await vanishing.close()
