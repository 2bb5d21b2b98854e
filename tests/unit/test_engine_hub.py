"""Sessions inside the engine: signs of life, bounds, and who hears of what."""

import asyncio

import pytest
from quire.v1 import engine_pb2 as pb
from quire_engine.core import EngineCore
from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.memory import KvMemory
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.service import hub as hubs
from quire_engine.service import session as sessions
from quire_engine.service.hub import SessionHub
from quire_engine.service.session import Session, SessionOverflowError
from quire_engine.service.spans import SpanBuilder

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor

CAPACITY = KvCapacity(4, 40, 0)


class Engine:
    """A hub on a core that is stepped by hand."""

    def __init__(self) -> None:
        self.hub = SessionHub(7, grace=0.05, spans=SpanBuilder(enabled=False, step_interval=1))
        config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE)
        self.core = EngineCore(Scheduler(config, KvMemory(CAPACITY)), PagedExecutor(CAPACITY), self.hub.publish)
        self.hub.bind(self.core)

    async def open(self, session_id: str, last_sequence: int = 0) -> tuple[Session, int, pb.Snapshot]:
        opening = asyncio.create_task(self.hub.open(pb.Open(session_id=session_id, last_sequence=last_sequence)))
        await asyncio.sleep(0)
        self.take_commands()
        session, number, snapshot = await opening
        return session, number, snapshot.snapshot

    def take_commands(self) -> None:
        while not self.core._commands.empty():
            self.core._carry_out(self.core._commands.get())

    def submit(self, session: Session, request_id: str) -> None:
        message = pb.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3])
        message.sampling.max_tokens = 20
        self.hub.submit(session, message)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.take_commands()
            self.core.step()


async def received(session: Session, number: int, count: int) -> list[pb.StepBatch]:
    batches: list[pb.StepBatch] = []
    async with asyncio.timeout(5):
        async for batch in session.stream(number):
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


async def test_two_routers_may_choose_the_same_id_and_each_hears_its_own() -> None:
    engine = Engine()
    (one, first, _), (two, second, _) = await engine.open("one"), await engine.open("two")
    engine.submit(one, "same")
    engine.step(3)
    engine.submit(two, "same")
    engine.step(2)
    mine = [output for batch in await received(one, first, 5) for output in batch.outputs]
    theirs = [output for batch in await received(two, second, 5) for output in batch.outputs]
    assert [output.position for output in mine] == [0, 1, 2, 3, 4]
    assert [output.position for output in theirs] == [0, 1]


async def test_tokens_are_handed_over_even_when_tracing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the tracer is broken")

    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    monkeypatch.setattr(SpanBuilder, "on_step", fail)
    with pytest.raises(RuntimeError, match="tracer"):
        engine.step()
    (batch,) = await received(session, number, 1)
    assert len(batch.outputs[0].token_ids) == 1


async def test_a_waiting_session_gets_signs_of_life_and_an_idle_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "HEARTBEAT", 0.01)
    engine = Engine()
    (busy, number, _), (idle, _, _) = await engine.open("busy"), await engine.open("idle")
    engine.submit(busy, "r")
    beating = asyncio.create_task(engine.hub.beat())
    batches = await received(busy, number, 3)
    beating.cancel()
    assert [(batch.sequence, batch.step, len(batch.outputs)) for batch in batches] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert idle.sequence == 0


async def test_a_broken_stream_is_replayed_after_what_was_acknowledged() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    engine.step(5)
    session.acknowledge(2)
    engine.hub.detach(session, number)
    again, number, snapshot = await engine.open("s", last_sequence=3)
    assert again is session
    assert (snapshot.resumed, snapshot.sequence) == (True, 3)
    assert [batch.sequence for batch in await received(session, number, 2)] == [4, 5]


async def test_a_session_with_unread_ends_is_kept_for_the_grace() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    engine.step(25)
    assert not session.requests
    engine.hub.detach(session, number)
    _, _, snapshot = await engine.open("s", last_sequence=4)
    assert snapshot.resumed


async def test_a_session_that_stays_away_is_closed_and_its_requests_aborted() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    engine.step(2)
    engine.hub.detach(session, number)
    await asyncio.sleep(0.2)
    engine.step()
    assert not engine.core.scheduler.has_work
    _, _, snapshot = await engine.open("s", last_sequence=2)
    assert not snapshot.resumed


async def test_an_id_can_be_submitted_again_while_its_last_use_is_still_ending() -> None:
    engine = Engine()
    old, _, _ = await engine.open("s")
    engine.submit(old, "r")
    engine.step(2)
    new, number, _ = await engine.open("s")
    engine.submit(new, "r")
    engine.step(20)
    outputs = [output for batch in await received(new, number, 20) for output in batch.outputs]
    assert [output.position for output in outputs if output.token_ids] == list(range(20))
    assert outputs[-1].finish_reason


@pytest.mark.parametrize("bound", ["MAX_UNACKNOWLEDGED", "MAX_UNACKNOWLEDGED_BYTES"])
async def test_what_is_kept_for_a_router_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(sessions, bound, 3)
    session = Session("s", 1)

    def publish(times: int) -> None:
        for _ in range(times):
            session.publish(1, [pb.SequenceOutput(request_id="r", token_ids=[1])], pb.Load(), [])

    with pytest.raises(SessionOverflowError):
        publish(10)
    session.acknowledge(session.sequence)
    session.publish(1, [], pb.Load(), [])


async def test_an_acknowledgement_from_the_future_harms_only_its_sender() -> None:
    session = Session("s", 1)
    number = session.attach()
    session.publish(1, [], pb.Load(), [])
    session.acknowledge(10**9)
    session.publish(2, [], pb.Load(), [])
    assert [batch.step for batch in await received(session, number, 1)] == [2]
