"""What a link promises its requests: every token once and in order, or ``EngineLost``."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason
from quire_router.core.retry import FAIR_TICKS
from quire_router.engines.attempt import EngineFull, EngineLost, EngineSilent, Output
from quire_router.engines.connection import (
    MAX_PATIENCE,
    MAX_UNACKNOWLEDGED_BYTES,
    EngineConnection,
    LivenessMonitor,
    _yielding_to_loop,
)
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.rates import (
    MAX_PINGS_PER_SECOND,
    MAX_UPDATES_PER_SECOND,
    MIN_PING_INTERVAL,
    MIN_UPDATE_INTERVAL,
    UpdateRate,
)
from quire_router.engines.settings import ConnectionSettings

from tests.support.batches import take_all
from tests.support.ports import cut_off, free_port
from tests.support.scripted_engine import ABORT, ERROR, LENGTH, STOP, ScriptedEngine, output
from tests.support.waiting import until

PATIENT = ConnectionSettings(grace=30, refused_grace=30, backoff=0.01, ack_interval=0.01, idle_ack_interval=0.01)


def submit(
    request_id: str, *, prompt: int = 3, delivered: tuple[int, ...] = (), max_tokens: int = 100
) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        request_id=request_id,
        prompt_token_ids=range(prompt),
        output_token_ids=delivered,
        sampling=types_pb2.SamplingParams(max_tokens=max_tokens),
    )


@asynccontextmanager
async def linked(
    settings: ConnectionSettings = PATIENT, engine: ScriptedEngine | None = None, **options: Any
) -> AsyncIterator[tuple[ScriptedEngine, EngineConnection]]:
    engine = engine or ScriptedEngine()
    link = EngineConnection(await engine.start(), settings, **options)
    link.start()
    try:
        await connected(engine)
        await until(lambda: link.ready)
        yield engine, link
    finally:
        await link.close()
        await engine.stop()


async def connected(engine: ScriptedEngine) -> engine_pb2.Open:
    return await asyncio.wait_for(engine.opened.get(), 10)


async def rest(stream: OutputStream) -> tuple[list[int], Output]:
    """All tokens that are still to come, and the last output."""
    token_ids: list[int] = []
    last = Output([], 0)
    async with asyncio.timeout(10):
        async for last in stream:
            token_ids += last.token_ids
    return token_ids, last


async def submitted(engine: ScriptedEngine, link: EngineConnection, message: engine_pb2.Submit) -> OutputStream:
    stream = link.submit(message)
    await engine.submit()
    return stream


async def test_tokens_that_are_not_read_yet_are_merged() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [5], 0, cached_tokens=2))
        engine.send(output("a", [6, 7], 1))
        engine.send(output("a", [8], 3, STOP))
        await until(lambda: link.session.sequence == 3)
        token_ids, last = await rest(stream)
    assert token_ids == [5, 6, 7, 8]
    assert last == Output([5, 6, 7, 8], 0, FinishReason.STOP, None, 2)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_an_engine_is_reached_past_any_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")  # nobody listens there

    async with asyncio.timeout(10), linked() as (_, link):
        assert link.ready


async def test_each_request_gets_its_own_tokens() -> None:
    async with linked() as (engine, link):
        first, second = [await submitted(engine, link, submit(name)) for name in "ab"]
        engine.send(output("a", [1], 0), output("b", [2], 0))
        engine.send(output("b", [4], 1, LENGTH), output("a", [3], 1, STOP))
        await until(lambda: link.session.sequence == 2)
        assert await rest(first) == ([1, 3], Output([1, 3], 0, FinishReason.STOP))
        assert await rest(second) == ([2, 4], Output([2, 4], 0, FinishReason.LENGTH))


async def test_a_broken_stream_is_resumed_without_a_lost_token() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        assert (await anext(stream)).token_ids == [1]
        session_id = link.session.id
        engine.break_stream()
        engine.send(output("a", [2], 1))
        opening = await connected(engine)
        assert (opening.session_id, opening.last_sequence) == (session_id, 1)
        engine.send(output("a", [3], 2, STOP))
        assert (await rest(stream))[0] == [2, 3]


async def test_a_grace_that_was_not_needed_ends_nothing_later() -> None:
    async with linked(ConnectionSettings(grace=0.1, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await anext(stream)
        engine.break_stream()
        await connected(engine)
        await asyncio.sleep(0.2)
        engine.send(output("a", [2], 1, STOP))
        assert (await rest(stream))[0] == [2]


async def test_batches_that_are_replayed_are_not_delivered_twice() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await anext(stream)
        batch = engine_pb2.StepBatch(sequence=1, outputs=[output("a", [1], 0)])
        take_all(link.session, batch)
        engine.send(output("a", [1, 2], 0, STOP))  # the engine repeats itself under a new sequence
        assert (await rest(stream))[0] == [2]


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_large_batch_is_delivered_completely_and_yields_to_other_tasks(interrupted: bool) -> None:
    handed, turns = [], []

    def outputs() -> Iterator[None]:
        for number in range(5):
            handed.append(number)
            yield

    handing = asyncio.create_task(_yielding_to_loop(outputs()))
    while not handing.done():
        await asyncio.sleep(0)
        turns.append(len(handed))
        if interrupted and len(turns) == 2:
            handing.cancel()
    assert handing.cancelled() == interrupted
    assert handed == [*range(5)]
    assert turns[0] == 1


async def test_a_missing_batch_loses_what_is_in_flight_and_cancels_it() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        engine.send(output("a", [3], 2), skip=1)
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(EngineLost):
            await anext(stream)
        assert (await connected(engine)).last_sequence == 0  # a new session
        assert (await engine.cancel()).request_id == "a"


async def test_missing_tokens_lose_only_their_request() -> None:
    async with linked() as (engine, link):
        first, second = [await submitted(engine, link, submit(name)) for name in "ab"]
        engine.send(output("a", [9], 1), output("b", [2], 0, STOP))
        with pytest.raises(EngineLost):
            await anext(first)
        assert (await rest(second))[0] == [2]
        assert (await engine.cancel()).request_id == "a"


async def test_an_engine_that_restarted_gives_back_what_it_ran_after_the_tokens_that_were_saved() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1, 2], 0))
        await until(lambda: link.session.sequence == 1)
        engine.restart_as(generation=2)
        engine.break_stream()
        assert (await anext(stream)).token_ids == [1, 2]
        with pytest.raises(EngineLost):
            await anext(stream)
        await until(lambda: link.ready)
        again = await submitted(engine, link, submit("a2", delivered=(1, 2)))
        engine.send(output("a2", [3], 2, STOP))
        assert (await rest(again))[0] == [3]
        assert link.session.engine_generation == 2


async def test_an_engine_that_forgot_the_session_gives_back_what_it_ran() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.resumes = False
        engine.break_stream()
        with pytest.raises(EngineLost):
            await anext(stream)


async def test_an_engine_that_stays_away_longer_than_the_grace_is_lost() -> None:
    async with linked(ConnectionSettings(grace=0.05, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        await engine.stop()
        with pytest.raises(EngineLost):
            await anext(stream)
        assert not link.ready
        with pytest.raises(EngineLost):
            link.submit(submit("b"))


async def test_a_lost_engine_is_one_warning_with_the_number_of_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    async with linked(ConnectionSettings(grace=0.05, backoff=0.01)) as (engine, link):
        streams = [await submitted(engine, link, submit(name)) for name in "abc"]
        await engine.stop()
        for stream in streams:
            with pytest.raises(EngineLost):
                await anext(stream)
    lost = [record for record in caplog.records if "lost engine" in record.getMessage()]
    assert [record.levelno for record in lost] == [logging.WARNING]
    assert lost[0].getMessage() == f"lost engine {link.address} (connection refused); resubmitting 3 requests"


async def test_the_log_names_what_was_observed_and_the_engines_return(caplog: pytest.LogCaptureFixture) -> None:
    """At the level that an operator has, also where nothing was running."""
    async with linked(ConnectionSettings(grace=3600, silence=0.05, stall=0.2, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        with pytest.raises(EngineLost):  # it is there, says nothing, and then knows nothing
            await anext(stream)
        await until(lambda: link.ready)
    silence, lost, back = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert silence == f"engine {link.address} cannot be reached: the engine said nothing for 0.2 seconds"
    assert lost == f"lost engine {link.address} (it has forgotten the session); resubmitting 1 request"
    assert re.fullmatch(rf"engine {link.address} is back after \d+\.\d s", back)


async def test_an_engine_that_refuses_connections_is_lost_without_the_grace() -> None:
    async with linked(ConnectionSettings(grace=3600, refused_grace=0.05, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        await engine.stop()
        async with asyncio.timeout(10):
            with pytest.raises(EngineLost):
                await anext(stream)


async def test_a_silent_engine_gets_no_new_requests_until_its_next_batch() -> None:
    changes: list[None] = []
    settings = ConnectionSettings(silence=0.05, stall=3600)
    async with linked(settings, on_change=lambda: changes.append(None)) as (engine, link):
        await submitted(engine, link, submit("a"))
        changes.clear()
        await until(lambda: not link.ready)
        assert len(changes) == 1
        engine.send()
        await until(lambda: len(changes) == 2)
        assert engine.opened.empty()
        await until(lambda: not link.ready)  # speaking once is not enough


async def test_a_stream_that_stays_silent_is_left_for_a_new_one() -> None:
    async with linked(ConnectionSettings(silence=0.02, stall=0.05, grace=30, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await until(lambda: link.session.sequence == 1)
        assert (await connected(engine)).last_sequence == 1
        engine.send(output("a", [2], 1, STOP))
        assert (await rest(stream))[0] == [1, 2]


async def test_requests_leave_a_silent_engine_that_has_a_substitute_and_end_there_once_it_hears() -> None:
    substitutes: list[str] = []
    settings = ConnectionSettings(silence=0.05, stall=3600)
    async with linked(settings, has_substitute=lambda: bool(substitutes)) as (engine, link):
        stream, stays = [await submitted(engine, link, submit(name)) for name in "ab"]
        stays.stays_when_silent = True
        engine.send(output("a", [1], 0), output("b", [5], 0))
        assert (await anext(stream)).token_ids == [1]
        await until(lambda: not link.ready)
        assert link.session.in_flight == 2  # nobody else can take them
        substitutes.append("another engine")
        with pytest.raises(EngineSilent):
            await anext(stream)
        assert (await engine.cancel()).request_id == "a"
        assert not link.ready
        assert link.session.in_flight == 1
        engine.send(output("a", [2], 1), output("b", [6], 1))  # before it read the Cancel
        engine.send(output("a", [], 2, ABORT), output("b", [7], 2, STOP))
        assert (await rest(stays))[0] == [5, 6, 7]
        await until(lambda: link.ready)
        assert link.session.in_flight == 0
        assert engine.opened.empty()  # on the same stream


@pytest.mark.parametrize("stall", [0.1, 3600])
async def test_an_engine_that_was_silent_gets_nothing_new_before_it_is_heard_though_it_owes_nothing(
    stall: float,
) -> None:
    settings = ConnectionSettings(silence=0.05, stall=stall, backoff=0.01)
    async with linked(settings, has_substitute=lambda: True) as (engine, link):
        engine.send()
        await submitted(engine, link, submit("a"))
        engine.freeze()
        await until(lambda: not link.ready)
        await until(lambda: not link.session.in_flight)
        await asyncio.sleep(0.2)
        assert not link.ready
        engine.thaw()
        await until(lambda: link.ready)  # on the same stream, or on a new one of the same session
        assert link.session.sequence == 1


async def test_an_engine_that_owes_nothing_and_does_not_answer_gets_nothing_new_until_it_does() -> None:
    changes: list[None] = []
    settings = ConnectionSettings(silence=3, stall=3600)  # a third of it is how long it may take to answer
    async with linked(settings, on_change=lambda: changes.append(None)) as (engine, link):
        await link.probe()
        assert link.ready
        changes.clear()
        engine.freeze()
        await link.probe()
        assert (link.ready, link.condition, len(changes)) == (False, "silent", 1)
        engine.thaw()
        await until(lambda: link.ready)
        assert engine.opened.empty()


async def test_an_engine_that_speaks_while_it_is_asked_is_alive() -> None:
    async with linked(ConnectionSettings(silence=3, stall=3600)) as (engine, link):
        engine.freeze()
        probe = asyncio.create_task(link.probe())
        await asyncio.sleep(0)
        engine.send()
        await probe
        assert link.ready


async def test_requests_leave_an_engine_whose_stream_stays_broken_and_the_session_goes_on() -> None:
    substitutes: list[str] = []
    settings = replace(PATIENT, move_after=0.01)
    async with linked(settings, has_substitute=lambda: bool(substitutes)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        assert (await anext(stream)).token_ids == [1]
        await engine.stop()
        await until(lambda: not link.ready)
        await asyncio.sleep(0.05)
        assert link.session.in_flight == 1
        substitutes.append("another engine")
        with pytest.raises(EngineLost):
            await anext(stream)
        await engine.start()
        assert (await connected(engine)).last_sequence == 1  # what was known of it still is
        assert (await engine.cancel()).request_id == "a"


async def test_an_engine_that_breaks_every_session_is_tried_less_and_less_often() -> None:
    settings = ConnectionSettings(backoff=0.02, max_backoff=600)
    async with linked(settings) as (engine, link):
        for _ in range(5):
            engine.break_stream()
            await connected(engine)
        began = asyncio.get_running_loop().time()
        engine.break_stream()
        await until(lambda: link.condition == "reconnecting")
        await connected(engine)
        assert asyncio.get_running_loop().time() - began >= 0.02 * 2**5 / 2


async def test_an_engine_that_answers_late_gets_more_time_with_each_try() -> None:
    tries = list[float]()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(asyncio.get_running_loop().time())
        while await reader.read(1024):
            pass
        writer.close()

    listener = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    link = EngineConnection(address, ConnectionSettings(connect_timeout=0.06, backoff=0.001, max_backoff=0.001))
    link.start()
    try:
        await until(lambda: len(tries) == 5)
    finally:
        await link.close()
        listener.close()
    for number in range(4):
        assert tries[number + 1] - tries[number] >= 0.9 * 0.06 * min(MAX_PATIENCE, 2**number)


def test_an_engine_is_late_then_suspect_then_stalled_and_nothing_of_it_once_it_speaks() -> None:
    liveness = LivenessMonitor(silence=0.6, stall=1.2)
    found = []
    for _ in range(2 * FAIR_TICKS):
        liveness.tick(liveness.period, expecting=True)
        found.append((liveness.late, liveness.suspect, liveness.stalled))
    quiet, late, suspect = (False, False, False), (True, False, False), (True, True, False)
    assert found == [quiet] * 2 + [late] * 3 + [suspect] * 6 + [(True, True, True)]
    liveness.on_message()
    assert not liveness.late


def test_an_engine_that_is_asked_is_late_before_others_that_were_late_are_suspect() -> None:
    late, asked = LivenessMonitor(silence=0.6, stall=1.2), LivenessMonitor(silence=0.6, stall=1.2)
    while not late.late:
        late.tick(late.period, expecting=True)
    asked.on_asked()
    while not late.suspect:
        assert not asked.suspect
        for each in (late, asked):
            each.tick(each.period, expecting=each is late)
    assert asked.late
    asked.on_message()
    asked.tick(asked.period, expecting=False)
    assert not asked.late


def test_an_engine_that_owes_nothing_is_not_late_but_a_suspect_one_stays_so() -> None:
    liveness = LivenessMonitor(silence=0.6, stall=1.2)
    for owes in (True, True, True, False):
        liveness.tick(liveness.period, expecting=owes)
    assert not liveness.late
    for owes in (True,) * FAIR_TICKS + (False,):
        liveness.tick(liveness.period, expecting=owes)
    assert liveness.suspect


def test_a_router_that_was_held_up_itself_suspects_nobody() -> None:
    liveness = LivenessMonitor(silence=0.6, stall=1.2)
    for _ in range(10 * FAIR_TICKS):
        liveness.tick(10 * liveness.period, expecting=True)
    assert not liveness.late


async def test_an_idle_engine_whose_host_is_gone_is_found_by_a_ping() -> None:
    engine, rate = ScriptedEngine(), UpdateRate()
    rate.ping_interval = 0.1
    async with cut_off(int((await engine.start()).rpartition(":")[2])) as (port, dead):
        link = EngineConnection(f"127.0.0.1:{port}", PATIENT, update_rate=rate)
        link.start()
        try:
            await until(lambda: link.ready)
            await asyncio.sleep(0.5)
            assert link.ready  # its pings are answered
            dead.set()
            await until(lambda: link.condition == "reconnecting")
        finally:
            await link.close()
            await engine.stop()


async def test_an_engine_without_requests_may_be_silent() -> None:
    async with linked(ConnectionSettings(silence=0.01, stall=0.02)) as (engine, link):
        await asyncio.sleep(0.1)
        assert link.ready
        assert engine.opened.empty()


async def test_an_engine_that_is_still_starting_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire_router")
    assert await levels_told(ConnectionSettings(backoff=0.001, max_backoff=0.001), caplog, 1) == [logging.INFO]


async def test_an_engine_that_never_connects_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire_router")
    settings = ConnectionSettings(backoff=0.001, max_backoff=0.001, start_patience=0.05)
    assert await levels_told(settings, caplog, 2) == [logging.INFO, logging.WARNING]


async def levels_told(settings: ConnectionSettings, caplog: pytest.LogCaptureFixture, lines: int) -> list[int]:
    """What a link says of an engine that was never there, and that it goes on trying in silence."""
    link = EngineConnection(f"127.0.0.1:{free_port()}", settings)
    link.start()
    await until(lambda: len(told(caplog)) == lines)
    await asyncio.sleep(0.1)
    await link.close()
    return [record.levelno for record in told(caplog)]


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "connection refused" in record.getMessage()]


async def test_abandoned_requests_are_cancelled_when_the_engine_returns() -> None:
    async with linked(ConnectionSettings(grace=0.05, backoff=0.01)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineLost):
            await anext(stream)
        await engine.start()
        await connected(engine)
        assert (await engine.cancel()).request_id == "a"
        assert link.session.in_flight == 0


async def test_requests_that_may_not_have_arrived_are_sent_again_in_their_order() -> None:
    async with linked() as (engine, link):
        engine.send()
        streams = [await submitted(engine, link, submit(name)) for name in "ab"]
        await until(lambda: link.session.sequence == 1)
        engine.break_stream()
        assert [(await engine.submit()).request_id for _ in "ab"] == ["a", "b"]
        engine.send(output("a", [1], 0, STOP), output("b", [2], 0, STOP))
        assert [(await rest(stream))[0] for stream in streams] == [[1], [2]]


async def test_a_request_that_ended_before_it_came_again_is_cancelled() -> None:
    async with linked() as (engine, link):
        engine.send()
        stream = await submitted(engine, link, submit("a"))
        await until(lambda: link.session.sequence == 1)
        engine.break_stream()
        engine.send(output("a", [1], 0, STOP))  # after the break: the next stream replays it
        assert (await rest(stream))[0] == [1]
        command = await engine.cancel()
        assert (command.request_id, list(command.indexes)) == ("a", [])
        assert link.session.in_flight == 0


async def test_only_so_many_requests_are_kept_to_be_sent_again() -> None:
    async with linked(replace(PATIENT, max_unconfirmed=1)) as (engine, link):
        engine.send()
        first, second = [await submitted(engine, link, submit(name)) for name in "ab"]
        await until(lambda: link.session.sequence == 1)
        engine.break_stream()
        async with asyncio.timeout(10):
            with pytest.raises(EngineLost):
                await anext(first)
        assert (await engine.cancel()).request_id == "a"
        assert (await engine.submit()).request_id == "b"
        engine.send(output("b", [2], 0, STOP))
        assert (await rest(second))[0] == [2]


async def test_a_request_that_is_cancelled_before_it_is_sent_again_may_run_and_is_cancelled_there() -> None:
    async with linked() as (engine, link):
        engine.send()
        stream = await submitted(engine, link, submit("a"))
        await until(lambda: link.session.sequence == 1)
        await engine.stop()
        await until(lambda: not link.ready)
        link.session.begin(engine_pb2.Snapshot(generation=1, resumed=True, sequence=1))  # and breaks again at once
        stream.close()
        await engine.start()
        assert (await engine.cancel()).request_id == "a"


async def test_a_request_that_was_not_sent_yet_survives_a_broken_stream() -> None:
    async with linked() as (engine, link):
        engine.send()
        await until(lambda: link.session.sequence == 1)
        await engine.stop()
        await until(lambda: not link.ready)
        stream = link.submit(submit("a"))
        await engine.start()
        assert (await engine.submit()).request_id == "a"
        engine.send(output("a", [1], 0, STOP))
        assert (await rest(stream))[0] == [1]


async def test_leaving_early_cancels_on_the_engine_once() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        stream.close()
        stream.close()
        assert (await engine.cancel()).request_id == "a"
        other = await submitted(engine, link, submit("b"))
        other.close()
        assert (await engine.cancel()).request_id == "b"
        assert link.session.in_flight == 0


async def test_a_finished_request_is_not_cancelled() -> None:
    async with linked() as (engine, link):
        done = await submitted(engine, link, submit("done"))
        engine.send(output("done", [1], 0, STOP))
        await rest(done)
        done.close()
        other = await submitted(engine, link, submit("other"))
        other.close()
        assert (await engine.cancel()).request_id == "other"


async def test_a_request_that_is_cancelled_before_it_is_sent_never_reaches_the_engine() -> None:
    async with linked() as (engine, link):
        link.submit(submit("a")).close()
        link.submit(submit("b"))
        assert (await engine.submit()).request_id == "b"
        assert engine.commands.empty()


async def test_a_cancel_that_was_lost_with_the_stream_is_repeated() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await anext(stream)
        stream.close()
        await engine.cancel()  # as if it had never arrived: no end of "a" follows
        engine.break_stream()
        await connected(engine)
        assert (await engine.cancel()).request_id == "a"
        engine.send(output("a", [], 1, ABORT))
        await until(lambda: link.session.sequence == 2)
        engine.break_stream()
        await connected(engine)
        link.submit(submit("b"))
        await engine.submit()
        assert engine.commands.empty()


async def test_an_aborted_output_ends_with_its_tokens_so_far() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await until(lambda: link.session.sequence == 1)
        stream.abort()
        assert await rest(stream) == ([1], Output([1], 0, FinishReason.ABORT))
        assert (await engine.cancel()).request_id == "a"


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with linked(ConnectionSettings(slow_client_timeout=0.02)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        assert (await engine.cancel()).request_id == "a"
        _, last = await rest(stream)
        assert last.error is not None
        assert last.error.code is ErrorCode.OVERLOADED


async def test_a_client_that_reads_is_not_cut_off_however_long_it_takes() -> None:
    async with linked(ConnectionSettings(slow_client_timeout=0.02)) as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        await anext(stream)
        await asyncio.sleep(0.06)
        engine.send(output("a", [2], 1, STOP))
        assert await rest(stream) == ([2], Output([2], 1, FinishReason.STOP))


async def test_a_request_with_more_tokens_than_max_tokens_is_cancelled() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a", max_tokens=2))
        engine.send(output("a", [1, 2, 3], 0))
        _, last = await rest(stream)
        assert last.error is not None
        assert last.error.code is ErrorCode.INTERNAL
        assert (await engine.cancel()).request_id == "a"


@pytest.mark.parametrize("token_id", [-1, 1000, 2**31 - 1])
async def test_a_request_with_a_token_outside_of_the_vocabulary_is_cancelled(token_id: int) -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [0, 999], 0))
        assert (await anext(stream)).token_ids == [0, 999]
        engine.send(output("a", [1, token_id, 2], 2))
        (last,) = [piece async for piece in stream]
        assert last.error is not None
        assert last.error.code is ErrorCode.INTERNAL
        assert (await engine.cancel()).request_id == "a"


async def test_an_engines_error_comes_with_the_last_output() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        error = types_pb2.Error(code=types_pb2.ERROR_CODE_OVERLOADED, message="Full.")
        engine.send(output("a", [], 1, ERROR, error))
        _, last = await rest(stream)
        assert last.finish_reason is FinishReason.ERROR
        assert str(last.error) == "Full."


async def test_an_overloaded_engine_refuses_a_request_before_any_output() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [], 0, ERROR, types_pb2.Error(code=types_pb2.ERROR_CODE_OVERLOADED)))
        with pytest.raises(EngineFull):
            await anext(stream)
        assert link.ready
        assert link.session.in_flight == 0


async def test_requests_that_cannot_even_be_sent_are_too_many() -> None:
    async with linked(ConnectionSettings(max_unsent=2)) as (_, link):
        link.submit(submit("a"))
        link.submit(submit("b"))
        with pytest.raises(EngineFull):
            link.submit(submit("c"))


async def test_an_engine_that_cannot_take_one_request_now_gets_others() -> None:
    """It is leaving when it says so, and not because it is unavailable to one request."""
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [], 0, ERROR, types_pb2.Error(code=types_pb2.ERROR_CODE_UNAVAILABLE)))
        with pytest.raises(EngineFull):
            await anext(stream)
        assert link.ready


@pytest.mark.parametrize("delivered", [(), (1, 2)])
async def test_invalid_resumed_tokens_are_no_client_error(delivered: tuple[int, ...]) -> None:
    """An engine that refuses a request with the tokens of another engine in it loses it; otherwise it is the client
    who hears of it.
    """
    message, refused = submit("a"), types_pb2.Error(code=types_pb2.ERROR_CODE_INVALID, message="Token ids!")
    message.output_token_ids.extend(delivered)
    async with linked() as (engine, link):
        stream = await submitted(engine, link, message)
        engine.send(output("a", [], 0, ERROR, refused))
        if delivered:
            with pytest.raises(EngineLost, match="Token ids!"):
                await anext(stream)
        else:
            assert (await anext(stream)).error.code is ErrorCode.INVALID
        assert link.ready


async def test_a_stopping_engine_gives_requests_back_and_gets_no_more() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.draining = True
        engine.send(output("a", [], 0, ERROR, types_pb2.Error(code=types_pb2.ERROR_CODE_UNAVAILABLE)))
        with pytest.raises(EngineLost):
            await anext(stream)
        assert not link.ready


async def test_an_unrequested_abort_gives_the_request_back() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0, ABORT))
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(EngineLost):
            await anext(stream)


async def test_batches_are_acknowledged_by_number_and_by_time() -> None:
    by_number = ConnectionSettings(ack_batches=3, ack_interval=60, idle_ack_interval=60)
    async with linked(by_number) as (engine, _):
        for _ in range(3):
            engine.send()
        assert await engine.ack() == 3
    async with linked(ConnectionSettings(ack_batches=1000, ack_interval=60, idle_ack_interval=0.01)) as (engine, _):
        engine.send()
        assert await engine.ack() == 1


async def test_while_a_request_is_in_flight_batches_are_acknowledged_sooner() -> None:
    async with linked(ConnectionSettings(ack_batches=1000, ack_interval=0.01, idle_ack_interval=60)) as (engine, link):
        await submitted(engine, link, submit("a"))
        engine.send(output("a", [1], 0))
        assert await engine.ack() == 1


async def test_many_bytes_are_acknowledged_at_once() -> None:
    async with linked(ConnectionSettings(ack_batches=1000, ack_interval=60, idle_ack_interval=60)) as (engine, _):
        hashes = [number.to_bytes(16, "big") for number in range(MAX_UNACKNOWLEDGED_BYTES // 16)]
        engine.send(kv_events=[engine_pb2.KvEvent(stored=engine_pb2.KvStored(block_hashes=hashes))])
        assert await engine.ack() == 1


async def test_an_engine_is_told_how_often_to_send_updates_when_a_stream_opens_and_when_it_changes() -> None:
    rate, engine = UpdateRate(), ScriptedEngine()
    rate.set_engines(3 * MAX_UPDATES_PER_SECOND)
    link = EngineConnection(await engine.start(), PATIENT, update_rate=rate)
    link.start()
    try:
        assert (await connected(engine)).updates == engine_pb2.SetUpdates(interval_seconds=3.0)
        engine.send()
        await engine.ack()
        rate.set_engines(MAX_UPDATES_PER_SECOND)
        engine.send()
        await engine.ack()
        assert await engine.updates() == engine_pb2.SetUpdates(interval_seconds=1.0)
        engine.break_stream()
        assert (await connected(engine)).updates == engine_pb2.SetUpdates(interval_seconds=1.0)
    finally:
        await link.close()
        await engine.stop()


def test_engines_send_the_less_often_the_more_there_are() -> None:
    rate = UpdateRate()
    assert rate.interval == MIN_UPDATE_INTERVAL
    for engines in (0, 1, 100):
        rate.set_engines(engines)
        assert rate.interval == MIN_UPDATE_INTERVAL
        assert rate.ping_interval == MIN_PING_INTERVAL
    rate.set_engines(1000)
    assert 1000 / rate.interval <= MAX_UPDATES_PER_SECOND
    assert 1000 / rate.ping_interval <= MAX_PINGS_PER_SECOND
    assert not rate.has_changed_since(rate.interval)
    assert not rate.has_changed_since(1.1 * rate.interval)
    assert rate.has_changed_since(2 * rate.interval)
    assert rate.has_changed_since(rate.interval / 2)


async def test_the_load_is_that_of_the_last_batch() -> None:
    load = engine_pb2.Load()
    async with linked(on_load=load.CopyFrom) as (engine, _):
        engine.send(load=engine_pb2.Load(running=3, blocks_free=7))
        engine.send(load=engine_pb2.Load(running=4, blocks_free=6))
        await until(lambda: load.running == 4)
        assert load.blocks_free == 6


async def test_kv_events_are_counted_and_reported_after_the_snapshot_they_change() -> None:
    engine = ScriptedEngine()
    heard: list[Any] = []
    engine.cached = [engine_pb2.KvStored(block_hashes=[b"0" * 16])]
    async with linked(engine=engine, on_kv_event=heard.append) as (engine, link):
        event = engine_pb2.KvEvent(removed=engine_pb2.KvRemoved(block_hashes=[b"0" * 16]))
        engine.send(kv_events=[event])
        await until(lambda: link.session.kv_events == 1)
    assert list(heard[0].cached) == engine.cached
    assert heard[1:] == [event]


async def test_a_prompt_of_many_megabytes_passes() -> None:
    async with linked() as (engine, link):
        link.submit(submit("a", prompt=2_000_000))
        assert len((await engine.submit()).prompt_token_ids) == 2_000_000


async def test_the_same_id_cannot_run_twice() -> None:
    async with linked() as (engine, link):
        await submitted(engine, link, submit("a"))
        with pytest.raises(Exception, match="error inside the service"):
            link.submit(submit("a"))


async def test_closing_the_link_gives_requests_back() -> None:
    async with linked() as (engine, link):
        stream = await submitted(engine, link, submit("a"))
        await link.close()
        with pytest.raises(EngineLost):
            await anext(stream)


@pytest.mark.parametrize("steps", range(12))
async def test_a_link_can_be_closed_at_whatever_moment_its_stream_breaks(steps: int) -> None:
    async with linked() as (engine, link):
        engine.break_stream()
        for _ in range(steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await link.close()
        assert not link.ready
