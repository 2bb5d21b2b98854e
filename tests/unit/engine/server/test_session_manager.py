"""Sessions inside the engine: keepalives, bounds, and which session gets which messages."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_engine.core.block_pool import BlockRemoved, BlockStored, KVCacheConfig, KVCacheEvent, Tier
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AbortRequest, AddRequest, Command, EngineCore, EngineCoreOutputs
from quire_engine.core.executor import UNMEASURED
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.scheduler import Scheduler
from quire_engine.server import messages, pending_grammars, session_manager
from quire_engine.server.messages import cached_to_proto, output_to_proto, request_from_proto
from quire_engine.server.session import (
    MAX_UPDATE_INTERVAL,
    UPDATE_INTERVAL,
    CacheChanges,
    Session,
    SessionOverflowError,
)
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.tracing import TraceExporter
from quire_proto.convert import stop_token_from_proto
from quire_proto.sampling import StopToken, TokenLogprobs

from tests.support.guessing import guess
from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.slow_grammars import EmptyGrammar, Watched
from tests.support.waiting import until

CAPACITY = KVCacheConfig(4, 40, 0)


class Engine:
    """A manager on a core that is stepped by hand."""

    def __init__(self, *, guesses: bool = False) -> None:
        self.grammars = Watched()
        spans = TraceExporter(enabled=False, step_interval=1)
        config = SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE)
        scheduler = Scheduler(config, KVCacheManager(CAPACITY))
        if guesses:
            guess(scheduler, 1)
        self.core = EngineCore(scheduler, PagedExecutor(CAPACITY), self._publish)
        self.manager = SessionManager(self.core, 7, grace=0.05, tracing=spans, grammars=self.grammars.compiler)

    def _publish(self, step: EngineCoreOutputs) -> None:
        self.manager.publish(step)

    async def open(
        self, session_id: str, last_sequence: int = 0, *, interval: float = 0.0, off: bool = False
    ) -> tuple[Session, int, pb.Snapshot]:
        updates = pb.SetUpdates(interval_seconds=interval, off=off) if interval or off else None
        message = pb.Open(session_id=session_id, last_sequence=last_sequence, updates=updates)
        opening = asyncio.create_task(self.manager.open(message))
        await asyncio.sleep(0)
        self.take_commands()
        session, number, snapshot = await opening
        return session, number, snapshot.snapshot

    def take_commands(self) -> None:
        while not self.core._commands.empty():
            self.core._handle_command(self.core._commands.get())

    def submit(self, session: Session, request_id: str, **sampling: object) -> None:
        params = types.SamplingParams(**{"max_tokens": 20, **sampling})
        message = pb.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=params)
        self.manager.submit(session, message)

    def submit_structured(self, session: Session, request_id: str, regex: str = "a+", **sampling: object) -> None:
        self.submit(session, request_id, structured=types.Structured(regex=regex), **sampling)

    async def compile(self) -> None:
        """Lets the grammars be compiled, and waits until the manager has handled them."""
        self.grammars.source.release()
        await until(lambda: not self.manager._grammars._waiting)

    def commands(self) -> list[Command]:
        """The commands that were sent to the core and are not handled."""
        return [self.core._commands.get() for _ in range(self.core._commands.qsize())]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.take_commands()
            self.core.step()


async def received(session: Session, number: int, count: int) -> list[pb.StepBatch]:
    batches: list[pb.StepBatch] = []
    async with asyncio.timeout(30):
        async for batch in session.stream(number):
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def outputs_of(batches: list[pb.StepBatch]) -> list[pb.SequenceOutput]:
    return [output for batch in batches for output in batch.outputs]


async def test_two_routers_may_choose_the_same_id_and_each_gets_its_own_outputs() -> None:
    engine = Engine()
    (one, first, _), (two, second, _) = await engine.open("one"), await engine.open("two")
    engine.submit(one, "same")
    engine.step(3)
    engine.submit(two, "same")
    engine.step(2)
    mine = [output for batch in await received(one, first, 5) for output in batch.outputs]
    theirs = [output for batch in await received(two, second, 3) for output in batch.outputs]
    assert [output.position for output in mine] == [0, 1, 2, 3, 4]
    assert [output.position for output in theirs] == [0, 1]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.just(("time",)),
    ),
    max_size=25,
)


@given(OPERATIONS)
def test_merged_batches_equal_the_batches_of_single_steps(operations: list[tuple]) -> None:
    """Every session hears the same tokens and last load, in the same order and without a gap, and has the cache's
    contents with everything that it hears.
    """
    every_step, together = asyncio.run(heard(operations, 1e-9)), asyncio.run(heard(operations, 3600.0))
    happened = every_step.pop("all")
    assert hashes_of(together.pop("all")) == hashes_of(happened)
    assert sum(map(len, together.values())) <= sum(map(len, every_step.values()))
    for name, batches in together.items():
        whole = every_step[name]
        assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
        assert outputs_of(batches) == outputs_of(whole)
        assert [load_of(batch) for batch in batches[-1:]] == [load_of(batch) for batch in whole[-1:]]
        assert contents(batches) == contents(happened)
        assert len(hashes_of(batches)) <= len(hashes_of(happened))
        for batch in batches:  # what a session has in progress it hears of at once
            if batch.outputs:
                earlier = [each for each in batches if each.sequence <= batch.sequence]
                assert contents(earlier) == contents([each for each in happened if each.step <= batch.step])


async def heard(operations: list[tuple], interval: float) -> dict[str, list[pb.StepBatch]]:
    """The batches of two sessions, which hear every ``interval`` seconds of steps without outputs; ``all`` are the
    changes of the cache as the core published them.
    """
    happened: list[pb.StepBatch] = []
    with pytest.MonkeyPatch.context() as patch:
        publish = SessionManager.publish

        def note(manager: SessionManager, step: EngineCoreOutputs) -> None:
            events = messages.events_to_proto(step.kv_events)
            happened.append(pb.StepBatch(step=step.trace.step, kv_events=events))
            publish(manager, step)

        patch.setattr(SessionManager, "publish", note)
        engine = Engine()
        sessions_of = {name: (await engine.open(name, interval=interval))[0] for name in "ab"}
        for kind, *rest in operations:
            if kind == "submit":
                message = pb.Submit(request_id=f"r{rest[1]}", prompt_token_ids=[rest[1], *range(9)])
                message.sampling.max_tokens = 3
                engine.manager.submit(sessions_of[rest[0]], message)
            elif kind == "cancel":
                engine.manager.cancel(sessions_of[rest[0]], f"r{rest[1]}")
            elif kind == "step":
                engine.step(*rest)
            else:
                let_updates_be_due(engine, *sessions_of.values())
        let_updates_be_due(engine, *sessions_of.values())
        return {
            "all": happened,
            **{name: list(session.batches.unacknowledged) for name, session in sessions_of.items()},
        }


def let_updates_be_due(engine: Engine, *sessions: Session) -> None:
    for session in sessions:
        session.updates.due = 0.0
    engine.manager._send_updates()


def contents(batches: list[pb.StepBatch]) -> set[tuple[int, bytes]]:
    """What is cached after these batches, by tier."""
    cached: set[tuple[int, bytes]] = set()
    for kind, tier, name in hashes_of(batches):
        (cached.add if kind == "stored" else cached.remove)((tier, name))
    return cached


CHANGES = st.lists(st.lists(st.tuples(st.sampled_from(Tier), st.integers(0, 5)), max_size=6), max_size=12)
"""Of each step the blocks that change, each from what it was."""


@given(CHANGES, st.sets(st.tuples(st.sampled_from(Tier), st.integers(0, 5))), st.sets(st.integers(0, 12)))
def test_whatever_changes_are_merged_a_router_has_the_contents_of_the_cache(
    steps: list[list[tuple[Tier, int]]], before: set[tuple[Tier, int]], taken_after: set[int]
) -> None:
    """Nothing is said twice, and no more is said than there are blocks; at no time does a router count more blocks than
    there were or are.
    """
    cached, changes = set(before), CacheChanges()
    told = {(messages._TIER[tier], bytes([number])) for tier, number in before}
    for number, step in enumerate(steps):
        events: list[KVCacheEvent] = []
        for tier, block in step:
            kind = BlockRemoved if (tier, block) in cached else BlockStored
            cached ^= {(tier, block)}
            events.append(kind(bytes([block]), tier))
        changes.add(events)
        if number in taken_after or number == len(steps) - 1:
            most = max(len(told), len(cached))
            for event in changes.take():
                kind = event.WhichOneof("event")
                changed = getattr(event, kind)
                named = {(changed.tier, block_hash) for block_hash in changed.block_hashes}
                assert len(named) == len(changed.block_hashes)
                assert named.isdisjoint(told) if kind == "stored" else named <= told
                told = told | named if kind == "stored" else told - named
                assert len(told) <= most
            assert told == {(messages._TIER[tier], bytes([block])) for tier, block in cached}
            assert not changes.take()


def load_of(batch: pb.StepBatch) -> tuple[int, ...]:
    load = batch.load
    return load.running, load.waiting, load.blocks_free, load.uncomputed_tokens


def hashes_of(batches: list[pb.StepBatch]) -> list[tuple[str, int, bytes]]:
    return [
        (event.WhichOneof("event"), changed.tier, name)
        for batch in batches
        for event in batch.kv_events
        for changed in (event.stored if event.HasField("stored") else event.removed,)
        for name in changed.block_hashes
    ]


def unpacked(batches: list[pb.StepBatch], names: dict[int, tuple[str, int]]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each choice, from messages and columns. Checks that each follows the one before."""
    made: dict[tuple[str, int], list[int]] = {}
    for batch in batches:
        columns = batch.tokens
        rows = zip(columns.handles, columns.token_ids, columns.positions, strict=True)
        told = [((each.request_id, each.index), each.position, list(each.token_ids)) for each in batch.outputs]
        assert not {choice for choice, _, _ in told} & {names[handle] for handle in columns.handles}
        told += [(names[handle], position, [token_id]) for handle, token_id, position in rows]
        for choice, position, token_ids in told:
            assert len(made.setdefault(choice, [])) == position
            made[choice] += token_ids
    return made


@pytest.mark.parametrize("guesses", [False, True])
async def test_a_router_that_reads_columns_gets_the_same_tokens_as_one_that_does_not(*, guesses: bool) -> None:
    engine = Engine(guesses=guesses)
    (old, _, _), (new, _, _) = await engine.open("old"), await engine.open("new")
    for session, handle in ((old, 0), (new, 7)):
        for number, (name, n) in enumerate((("a", 2), ("b", 1))):
            params = types.SamplingParams(max_tokens=6, n=n, seed=3)
            message = pb.Submit(request_id=name, prompt_token_ids=[1, 2, number], sampling=params)
            message.handle = handle + 2 * number if handle else 0
            engine.manager.submit(session, message)
    engine.step(9)
    (plain, packed) = (list(session.batches.unacknowledged) for session in (old, new))
    assert not any(batch.HasField("tokens") for batch in plain)
    names = {7: ("a", 0), 8: ("a", 1), 9: ("b", 0)}
    assert unpacked(packed, names) == unpacked(plain, {})
    columns = [list(batch.tokens.handles) for batch in packed]
    assert any(len(set(handles)) < len(handles) for handles in columns) == guesses
    if not guesses:
        assert sum(map(len, columns)) >= 3 * 4 - 1  # all but first outputs and ends
    assert sum(len(batch.outputs) for batch in packed) <= 2 + 3 + 1  # each choice's first and last
    ends = [[each.finish_reason for each in outputs_of(batches) if each.finish_reason] for batches in (plain, packed)]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 3


async def test_a_batch_that_is_split_has_its_tokens_behind_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.server.session.MAX_BATCH_BYTES", 1)
    session = Session("s", 1)
    outputs = [pb.SequenceOutput(request_id=name, token_ids=[1]) for name in "ab"]
    session.publish(1, outputs, pb.Load(), [], pb.TokenColumns(handles=[1], token_ids=[2], positions=[3]))
    assert [len(batch.outputs) for batch in session.batches.unacknowledged] == [1, 1]
    assert [len(batch.tokens.handles) for batch in session.batches.unacknowledged] == [0, 1]


async def test_outputs_that_are_more_than_a_token_are_messages() -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    params = types.SamplingParams(max_tokens=6, logprobs=1)
    engine.manager.submit(session, pb.Submit(request_id="r", prompt_token_ids=[1, 2], sampling=params, handle=5))
    engine.step(8)
    batches = list(session.batches.unacknowledged)
    assert not any(batch.HasField("tokens") for batch in batches)
    assert sum(len(each.token_ids) for each in outputs_of(batches)) == 6


async def test_a_session_gets_its_outputs_at_once_and_all_other_steps_in_one_batch() -> None:
    engine = Engine()
    (busy, _, _), (idle, _, _) = await engine.open("busy"), await engine.open("idle")
    engine.submit(busy, "r", max_tokens=20)
    engine.step(10)
    assert (busy.sequence, idle.sequence) == (10, 1)  # of the first at once
    await until(lambda: idle.sequence == 2)
    assert idle.batches.unacknowledged[-1].step == busy.batches.unacknowledged[-1].step
    assert idle.batches.unacknowledged[-1].load == busy.batches.unacknowledged[-1].load
    await asyncio.sleep(UPDATE_INTERVAL)
    assert idle.sequence == 2  # nothing is sent without a step
    engine.submit(idle, "s", max_tokens=20)
    engine.step(3)
    assert idle.sequence == 5


async def test_a_session_whose_request_waits_does_not_hear_every_step_of_others() -> None:
    engine = Engine()
    (busy, _, _), (waiting, _, _) = await engine.open("busy"), await engine.open("waiting", interval=60.0)
    for number in range(CAPACITY.device_blocks):  # so that nothing more is admitted
        engine.submit(busy, f"r{number}", max_tokens=20)
    engine.step()
    engine.submit(waiting, "s")
    engine.step(8)
    assert busy.sequence == 9
    assert waiting.sequence == 1  # after the pause


async def test_a_router_says_how_often_it_hears_and_may_say_it_again() -> None:
    engine = Engine()
    (busy, _, _), (slow, _, _) = await engine.open("busy"), await engine.open("slow", interval=3600.0)
    assert slow.updates.interval == MAX_UPDATE_INTERVAL
    engine.submit(busy, "r", max_tokens=20)
    engine.step(4)
    assert slow.sequence == 1
    engine.manager.set_updates(slow, pb.SetUpdates(interval_seconds=0.001))
    await until(lambda: slow.sequence == 2)
    for nothing in (0.0, -1.0, float("nan"), float("inf")):
        slow.updates.set(pb.SetUpdates(interval_seconds=nothing))
        assert slow.updates.interval == UPDATE_INTERVAL


async def test_a_session_that_is_off_hears_of_its_own_requests_and_of_nothing_else() -> None:
    engine = Engine()
    busy, _, _ = await engine.open("busy")
    engine.submit(busy, "r", max_tokens=20)
    engine.step(9)
    off, _, snapshot = await engine.open("off", off=True)
    heard_all, _, whole = await engine.open("all")
    assert whole.cached
    assert not snapshot.cached
    engine.step(3)
    let_updates_be_due(engine, off, heard_all)
    assert (off.sequence, heard_all.sequence) == (0, 2)
    engine.submit(off, "s", max_tokens=9)
    engine.step(9)
    assert sum(len(output.token_ids) for output in outputs_of(list(off.batches.unacknowledged))) == 9
    assert not any(batch.HasField("load") or batch.kv_events for batch in off.batches.unacknowledged)
    engine.manager.drain()
    assert off.batches.unacknowledged[-1].draining


async def test_tokens_are_delivered_even_when_tracing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the tracer is broken")

    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    monkeypatch.setattr(TraceExporter, "on_step", fail)
    with pytest.raises(RuntimeError, match="tracer"):
        engine.step()
    (batch,) = await received(session, number, 1)
    assert len(batch.outputs[0].token_ids) == 1


async def test_a_waiting_session_gets_keepalives_and_an_idle_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_manager, "HEARTBEAT_INTERVAL", 0.01)
    engine = Engine()
    (busy, number, _), (idle, _, _) = await engine.open("busy"), await engine.open("idle")
    engine.submit(busy, "r")
    heartbeats = asyncio.create_task(engine.manager.send_heartbeats())
    batches = await received(busy, number, 3)
    heartbeats.cancel()
    assert [(batch.sequence, batch.step, len(batch.outputs)) for batch in batches] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert idle.sequence == 0


async def test_a_broken_stream_is_replayed_after_what_was_acknowledged() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    engine.step(5)
    session.batches.acknowledge(2)
    engine.manager.detach(session, number)
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
    engine.manager.detach(session, number)
    _, _, snapshot = await engine.open("s", last_sequence=4)
    assert snapshot.resumed


async def test_a_session_that_stays_away_is_closed_and_its_requests_aborted() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r")
    engine.step(2)
    engine.manager.detach(session, number)
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
async def test_the_batches_kept_for_a_router_are_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(f"quire_engine.server.session.{bound}", 3)
    session = Session("s", 1)

    def publish(times: int) -> None:
        for _ in range(times):
            session.publish(1, [pb.SequenceOutput(request_id="r", token_ids=[1])], pb.Load(), [])

    with pytest.raises(SessionOverflowError):
        publish(10)
    session.batches.acknowledge(session.sequence)
    session.publish(1, [], pb.Load(), [])


async def test_an_acknowledgement_from_the_future_harms_only_its_sender() -> None:
    session = Session("s", 1)
    number = session.attach()
    session.publish(1, [], pb.Load(), [])
    session.batches.acknowledge(10**9)
    session.publish(2, [], pb.Load(), [])
    assert [batch.step for batch in await received(session, number, 1)] == [2]


# Pace and drain


async def test_the_load_includes_the_engines_speed_once_it_is_warm() -> None:
    engine = Engine()
    session, number, snapshot = await engine.open("s")
    assert not snapshot.load.HasField("pace")
    for name in "abcdefg":
        engine.submit(session, name, max_tokens=2)
        engine.step(2)
    batches = await received(session, number, 14)
    assert not any(batch.load.HasField("pace") for batch in batches[:8]), "the first prompts cost more than later ones"
    pace = batches[-1].load.pace
    assert pace.step_seconds + pace.token_seconds + pace.sequence_seconds > 0
    assert pace.host_block_seconds == 1 / UNMEASURED.bytes_per_second
    _, _, later = await engine.open("later")
    assert later.load.HasField("pace")


async def test_every_session_gets_draining_at_once_and_later_ones_get_it_first() -> None:
    engine = Engine()
    (busy, number, snapshot), (idle, other, _) = await engine.open("busy"), await engine.open("idle")
    assert not snapshot.draining
    engine.submit(busy, "r", max_tokens=2)
    engine.step()
    engine.manager.drain()
    engine.step()
    for batches in (await received(busy, number, 3), await received(idle, other, 3)):
        assert [(batch.step > 0, batch.draining) for batch in batches] == [(True, False), (False, True), (True, True)]
    _, _, again = await engine.open("busy", last_sequence=2)
    _, _, late = await engine.open("late")
    assert (again.resumed, again.draining, late.resumed, late.draining) == (True, True, False, True)


def test_every_part_of_a_split_batch_carries_draining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_engine.server.session.MAX_BATCH_BYTES", 10)
    session = Session("s", 1, draining=True)
    session.publish(1, [pb.SequenceOutput(request_id=f"request-{index}") for index in range(5)], pb.Load(), [])
    assert [batch.draining for batch in session.batches.unacknowledged] == [True] * 5


# Several choices


async def test_each_choice_is_sent_under_its_index_and_the_request_lasts_until_the_last_choice_ends() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit(session, "r", n=3, max_tokens=4)
    engine.step(2)
    engine.manager.cancel(session, "r", (1,))
    engine.step(1)
    assert session.requests
    engine.step(2)
    assert not session.requests
    outputs = outputs_of(await received(session, number, 5))
    ends = {output.index: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {
        0: types.FINISH_REASON_LENGTH, 1: types.FINISH_REASON_ABORT, 2: types.FINISH_REASON_LENGTH,
    }  # fmt: skip
    for index in (0, 2):
        positions = [output.position for output in outputs if output.index == index and output.token_ids]
        assert positions == [0, 1, 2, 3]


def test_a_submit_is_read_with_its_deliveries_and_its_priority() -> None:
    message = pb.Submit(request_id="r", prompt_token_ids=[1], priority=-3)
    message.delivered.add(index=1, token_ids=[4, 5], finished=True)
    request = request_from_proto(message, "7")
    (delivered,) = request.resumed_outputs
    assert (delivered.index, delivered.token_ids, delivered.finished) == (1, (4, 5), True)
    assert request.priority == -3


def test_every_field_of_an_output_is_sent() -> None:
    scored = TokenLogprobs(-0.5, ((3, -0.25), (4, -0.5)))
    stopped = StopToken(7, TokenLogprobs(-2.5, ((7, -2.5),)))
    output = EngineCoreOutput("k", [4], position=2, index=1, logprobs=[scored], score=-1.5, stop_token=stopped)
    (message,) = output_to_proto(output, "r")
    (entry,) = message.logprobs
    assert (message.request_id, message.index, message.position, message.score) == ("r", 1, 2, -1.5)
    assert (entry.logprob, list(entry.top_token_ids), list(entry.top_logprobs)) == (-0.5, [3, 4], [-0.25, -0.5])
    assert stop_token_from_proto(message.stop_token) == stopped
    assert not output_to_proto(EngineCoreOutput("k", [4]), "r")[0].HasField("score")


async def test_prompt_logprobs_of_a_long_prompt_are_split_into_bounded_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "PROMPT_LOGPROBS_PER_MESSAGE", 100)
    monkeypatch.setattr("quire_engine.server.session.MAX_BATCH_BYTES", 4096)
    prompt_logprobs = [TokenLogprobs(-float(position), ((position, -1.0),)) for position in range(1, 1051)]
    output = EngineCoreOutput("k", [9], prompt_logprobs=prompt_logprobs, prompt_position=1)
    pieces = output_to_proto(output, "r")
    assert [list(piece.token_ids) for piece in pieces] == [[]] * 10 + [[9]]
    session = Session("s", 1)
    number = session.attach()
    stored = [pb.KvEvent(stored=pb.KvStored(block_hashes=[b"x"]))]
    session.publish(5, [*pieces, *output_to_proto(EngineCoreOutput("o", [8]), "other")], pb.Load(running=2), stored)
    batches = await received(session, number, session.sequence)
    assert len(batches) > 3
    assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
    assert {(batch.step, batch.load.running) for batch in batches} == {(5, 2)}
    assert [len(batch.kv_events) for batch in batches] == [0] * (len(batches) - 1) + [1]
    assert max(batch.ByteSize() for batch in batches) < 5000
    positions = [
        output.prompt_position + offset
        for output in outputs_of(batches)
        for offset, each in enumerate(output.prompt_logprobs)
        if each.logprob == -(output.prompt_position + offset)
    ]
    assert positions == list(range(1, 1051))


def change(came: bool, name: bytes, tier: Tier) -> KVCacheEvent:
    return BlockStored(name, tier) if came else BlockRemoved(name, tier)


@given(st.lists(st.builds(change, st.booleans(), st.binary(min_size=1, max_size=1), st.sampled_from(Tier))))
def test_cache_events_are_sent_completely_and_in_order(changes: list[KVCacheEvent]) -> None:
    sent_changes = []
    for event in messages.events_to_proto(changes):
        kind, blocks = (BlockStored, event.stored) if event.HasField("stored") else (BlockRemoved, event.removed)
        tier = {pb.KV_TIER_DEVICE: Tier.DEVICE, pb.KV_TIER_HOST: Tier.HOST}[blocks.tier]
        sent_changes += [kind(name, tier) for name in blocks.block_hashes]
    assert sent_changes == changes


def test_a_snapshot_lists_the_cached_blocks_by_tier() -> None:
    stored = [BlockStored(b"a", Tier.HOST), BlockStored(b"b", Tier.DEVICE), BlockStored(b"c", Tier.HOST)]
    assert [(each.tier, list(each.block_hashes)) for each in cached_to_proto(stored)] == [
        (pb.KV_TIER_DEVICE, [b"b"]),
        (pb.KV_TIER_HOST, [b"a", b"c"]),
    ]
    assert cached_to_proto([]) == []


# Grammars


async def test_a_request_reaches_the_core_with_its_grammar_and_others_do_not_wait_for_it() -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    engine.submit_structured(session, "slow")
    engine.submit(session, "other")
    (other,) = engine.commands()
    await engine.compile()
    (slow,) = engine.commands()
    assert isinstance(other, AddRequest)
    assert isinstance(slow, AddRequest)
    assert other.request.grammar is None
    assert isinstance(slow.request.grammar, EmptyGrammar)
    assert slow.request.grammar.structured.text == "a+"


async def test_a_cached_grammar_lets_its_request_start_at_once() -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    engine.submit_structured(session, "first")
    await engine.compile()
    engine.grammars.source.hold()
    engine.submit_structured(session, "second")
    assert len(engine.commands()) == 2
    assert engine.grammars.source.compiled == {"a+": 1}


@pytest.mark.parametrize(
    ("regex", "code", "param"),
    [("bad", types.ERROR_CODE_INVALID, "regex"), ("broken", types.ERROR_CODE_INTERNAL, "")],
)
async def test_a_request_whose_grammar_fails_to_compile_is_refused_and_its_id_is_free(
    regex: str, code: int, param: str
) -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit_structured(session, "r", regex)
    await engine.compile()
    (refusal,) = outputs_of(await received(session, number, 1))
    assert (refusal.request_id, refusal.finish_reason) == ("r", types.FINISH_REASON_ERROR)
    assert (refusal.error.code, refusal.error.param) == (code, param)
    assert not session.requests
    assert not engine.commands()
    engine.submit(session, "r")
    assert len(engine.commands()) == 1


async def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_ends_like_a_running_one() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    message = pb.Submit(request_id="r", prompt_token_ids=[1, 2, 3])
    message.sampling.n = 3
    message.sampling.structured.regex = "a+"
    message.delivered.add(index=0, token_ids=[5, 6])
    message.delivered.add(index=1, token_ids=[7], finished=True)
    engine.manager.submit(session, message)
    engine.manager.cancel(session, "r")
    ends = outputs_of(await received(session, number, 1))
    assert [(end.index, end.position, end.finish_reason) for end in ends] == [
        (0, 2, types.FINISH_REASON_ABORT),
        (2, 0, types.FINISH_REASON_ABORT),
    ]
    assert not session.requests
    await told_late(engine)
    assert not engine.commands()
    assert session.sequence == 1


async def told_late(engine: Engine) -> None:
    """Lets the grammars be compiled after their requests have ended."""
    engine.grammars.source.release()
    await until(lambda: not engine.grammars.compiler._num_pending)
    await asyncio.sleep(0)


async def test_choices_that_are_cancelled_while_the_grammar_is_compiled_are_not_run() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit_structured(session, "r", n=3, max_tokens=2)
    engine.manager.cancel(session, "r", (0, 2))
    await engine.compile()
    add, abort = engine.commands()
    assert isinstance(add, AddRequest)
    assert abort == AbortRequest(add.request.request_id, (0, 2))
    engine.core.send(add)
    engine.core.send(abort)
    engine.step(2)
    outputs = outputs_of(await received(session, number, 2))
    reasons = {output.index: output.finish_reason for output in outputs if output.finish_reason}
    assert reasons == {
        0: types.FINISH_REASON_ABORT, 1: types.FINISH_REASON_LENGTH, 2: types.FINISH_REASON_ABORT,
    }  # fmt: skip
    assert not any(output.token_ids for output in outputs if output.index != 1)


async def test_a_submit_that_is_repeated_while_its_grammar_is_compiled_changes_nothing() -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    for _ in range(3):
        engine.submit_structured(session, "r")
    await engine.compile()
    engine.submit_structured(session, "r")
    assert len(engine.commands()) == 1


async def test_an_id_that_was_cancelled_while_its_grammar_was_compiled_can_be_submitted_again() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit_structured(session, "r", "one")
    engine.manager.cancel(session, "r")
    engine.submit_structured(session, "r", "two")
    await engine.compile()
    (add,) = engine.commands()
    assert isinstance(add, AddRequest)
    assert isinstance(add.request.grammar, EmptyGrammar)
    assert add.request.grammar.structured.text == "two"
    engine.core.send(add)
    engine.step(1)
    cancelled, first = outputs_of(await received(session, number, 2))
    assert (cancelled.finish_reason, first.finish_reason) == (types.FINISH_REASON_ABORT, 0)


def is_closed(engine: Engine, session: Session) -> None:
    engine.manager.close(session)


def is_replaced(engine: Engine, session: Session) -> None:
    engine.manager._register(
        pb.Open(session_id="s"), engine.core.scheduler.get_load(), [], asyncio.get_running_loop().create_future()
    )


@pytest.mark.parametrize("lost", [is_closed, is_replaced])
async def test_a_grammar_whose_session_was_closed_meanwhile_is_discarded(
    lost: Callable[[Engine, Session], None],
) -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    engine.submit_structured(session, "r")
    lost(engine, session)
    await told_late(engine)
    assert not engine.commands()
    assert not engine.manager._requests.by_key


async def test_an_engine_that_drains_waits_for_grammars_too() -> None:
    engine = Engine()
    session, _, _ = await engine.open("s")
    engine.submit_structured(session, "r", max_tokens=1)
    engine.manager.drain()
    drained = asyncio.create_task(engine.manager.wait_idle())
    await asyncio.sleep(0)
    assert not drained.done()
    await engine.compile()
    engine.step(1)
    async with asyncio.timeout(30):
        await drained


async def test_a_request_waits_only_so_long_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_grammars, "GRAMMAR_TIMEOUT_SECONDS", 0.01)
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit_structured(session, "r")
    (refusal,) = outputs_of(await received(session, number, 1))
    assert refusal.error.code == types.ERROR_CODE_OVERLOADED
    assert refusal.error.HasField("retry_after")
    await told_late(engine)
    assert not engine.commands()


async def test_a_request_whose_grammar_is_one_too_many_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.structured_output.compiler.MAX_PENDING", 1)
    engine = Engine()
    session, number, _ = await engine.open("s")
    engine.submit_structured(session, "first", "one")
    engine.submit_structured(session, "second", "two")
    (refusal,) = outputs_of(await received(session, number, 1))
    assert (refusal.request_id, refusal.error.code) == ("second", types.ERROR_CODE_OVERLOADED)
    assert list(session.requests) == ["first"]
    await engine.compile()


async def test_requests_whose_grammars_a_stopping_engine_does_not_compile_are_retryable() -> None:
    engine = Engine()
    session, number, _ = await engine.open("s")
    for index in range(8):
        engine.submit_structured(session, f"r{index}", f"regex{index}")
    engine.grammars.compiler.close()
    await until(lambda: not engine.manager._grammars._waiting)
    refusals = outputs_of(await received(session, number, session.sequence))
    assert {refusal.error.code for refusal in refusals} == {types.ERROR_CODE_UNAVAILABLE}
    assert len(refusals) + len(engine.commands()) == 8
    assert refusals
