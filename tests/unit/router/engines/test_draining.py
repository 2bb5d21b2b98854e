"""A draining engine gets no new requests from its first draining batch on; the engine that replaces it does."""

import logging
from dataclasses import replace

import pytest
from quire.v1 import types_pb2
from quire_router.engines.attempt import DrainExceeded, EngineDraining, EngineLost
from quire_router.engines.connection import EngineConnection
from quire_router.engines.settings import ConnectionSettings

from tests.support.scripted_engine import ABORT, ERROR, ScriptedEngine, output
from tests.support.waiting import until
from tests.unit.router.engines.test_connection import linked, rest, submit, submitted

SETTINGS = ConnectionSettings(grace=0.1, refused_grace=0.1, backoff=0.01, ack_interval=0.01, idle_ack_interval=0.01)

STOPPING = types_pb2.Error(code=types_pb2.ERROR_CODE_UNAVAILABLE, message="The engine is shutting down.")


async def drained(engine: ScriptedEngine, link: EngineConnection) -> None:
    engine.draining = True
    engine.send()
    await until(lambda: not link.ready)


async def test_an_empty_batch_announces_draining_and_running_requests_continue() -> None:
    changes: list[str] = []
    async with linked(on_change=lambda: changes.append("changed")) as (engine, link):
        stream = await submitted(engine, link, submit("a", max_tokens=2))
        changes.clear()
        await drained(engine, link)
        assert changes == ["changed"]
        engine.send(output("a", [1, 2], 0, 2))
        assert (await rest(stream))[0] == [1, 2]


async def test_an_engine_still_drains_when_its_session_is_resumed() -> None:
    async with linked() as (engine, link):
        await submitted(engine, link, submit("a"))
        await drained(engine, link)
        engine.break_stream()
        await engine.opened.get()
        engine.send(output("a", [1], 0))
        await until(lambda: link.session.sequence == engine.sequence)
        assert not link.ready


async def test_a_router_that_connects_late_gets_draining_first() -> None:
    engine = ScriptedEngine()
    engine.draining = True
    link = EngineConnection(await engine.start(), SETTINGS)
    link.start()
    try:
        await until(lambda: link.description is not None and link.session.engine_generation == 1)
        assert not link.ready
    finally:
        await link.close()
        await engine.stop()


async def test_a_draining_engine_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire_router")
    async with linked(SETTINGS) as (engine, link):
        await drained(engine, link)
        await engine.stop()
        await until(lambda: "has left" in caplog.text)
        engine.draining = False
        engine.restart_as(2)
        await engine.start()
        await until(lambda: link.ready)
    logged = [(record.levelname, record.getMessage().partition(engine.address)[2]) for record in caplog.records]
    assert logged == [
        ("INFO", " is connected (new session)"),
        ("INFO", " is shutting down: it finishes its requests and gets no new ones"),
        ("INFO", " has left"),
        ("INFO", " is connected (new session)"),
    ]


async def test_an_engine_that_drained_and_does_not_return_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with linked(replace(SETTINGS, start_patience=0.05)) as (engine, link):
        await drained(engine, link)
        await engine.stop()
        await until(lambda: "cannot be reached" in caplog.text)


async def test_requests_that_a_draining_engine_aborts_count_apart_from_lost_ones() -> None:
    async with linked(SETTINGS) as (engine, link):
        running = await submitted(engine, link, submit("a"))
        lost = await submitted(engine, link, submit("b"))
        engine.send(output("b", [], 0, ABORT))
        with pytest.raises(EngineLost) as loss:
            await rest(lost)
        assert loss.value.kind == "engine_lost"
        refused = await submitted(engine, link, submit("c"))
        engine.draining = True
        engine.send(output("c", [], 0, ERROR, STOPPING))
        with pytest.raises(EngineDraining):
            await rest(refused)
        await engine.stop()
        with pytest.raises(DrainExceeded):
            await rest(running)


async def test_a_restarted_engine_does_not_drain() -> None:
    async with linked() as (engine, link):
        await drained(engine, link)
        engine.draining = False
        engine.restart_as(2)
        engine.break_stream()
        await until(lambda: link.ready)
        assert link.session.engine_generation == 2
