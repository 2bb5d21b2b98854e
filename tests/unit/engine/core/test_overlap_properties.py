"""With a step planned ahead and devices that lag behind, every output is what it is step by step, whatever arrives, is
aborted, finishes, is preempted or fails, and every block comes back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from quire_engine.core import batch_scheduler
from quire_engine.core.block_pool import NULL_BLOCK, BlockStored, KVCacheConfig, Tier
from quire_engine.core.block_table import BlockTable, CachedBlocks
from quire_engine.core.engine_core import GetSnapshot
from quire_engine.core.outputs import EngineLoad
from quire_engine.core.step import SchedulerOutput

from tests.support.engine_state_machine import Client, EngineStateMachine
from tests.support.overlapping_executor import Misuse, OverlappingPagedExecutor
from tests.support.paged_executor import PagedExecutor
from tests.support.scenario import Choice, Run, Scenario

PLACES = ["launch", "forward", "draw"]
# How many pieces of the work that waits on a device are done when one more is queued.
PACES: Mapping[str, Callable[[Random], Callable[[int], int]]] = {
    "late": lambda random: lambda queued: 0,
    "at once": lambda random: lambda queued: queued,
    "any": lambda random: lambda queued: random.randint(0, queued),
}


@contextmanager
def no_misuse() -> Iterator[None]:
    """Turns a breach of the executor protocol into an AssertionError, which hypothesis shrinks."""
    try:
        yield
    except Misuse as breach:
        raise AssertionError(str(breach)) from breach


def blocks_of(table: BlockTable) -> list[int]:
    return [block_id for group in table.groups for block_id in group.block_ids]


class OverlapStateMachine(EngineStateMachine):
    """The same engine, on an executor that overlaps steps and sometimes fails one."""

    may_keep_states = False

    def make_executor(self, capacity: KVCacheConfig) -> OverlappingPagedExecutor:
        self.executor = OverlappingPagedExecutor(capacity, self.num_stages)
        self.executor.fails = self.fails
        self.failing: str | None = None
        self.blames = False
        self.blamed: set[str] = set()
        fork, admit = self.memory.fork, self.memory.attach_cached_blocks
        self.memory.fork = lambda table: self.check_not_being_written(blocks_of(table)) or fork(table)
        self.memory.attach_cached_blocks = lambda table, hits: self.check_hits(hits) or admit(table, hits)
        return self.executor

    def check_hits(self, hits: Sequence[CachedBlocks]) -> None:
        self.check_not_being_written([hit.block_id for each in hits for hit in each if hit.tier is Tier.DEVICE])

    def check_not_being_written(self, block_ids: list[int]) -> None:
        """No step in flight writes to a block that becomes shared."""
        size = self.memory.block_size
        for step in self.executor.in_flight:
            for chunk in step.chunks:
                if self.scheduler._registry.sequences.get(chunk.sequence_id) is not None:
                    for table in chunk.tables:
                        written = set(table[chunk.start // size : -(-chunk.end // size)]) - {NULL_BLOCK}
                        assert written.isdisjoint(block_ids), "a block is shared while it is written"

    def fails(self, where: str, scheduler_output: SchedulerOutput) -> bool:
        if where == "launch":
            self.check_scheduler_output(scheduler_output)
        if where == "run" and self.blames:
            self.blames = False
            live = self.scheduler._registry.sequences
            self.blamed.update(live[each].group.request.request_id for each in scheduler_output.sequence_ids)
            return True
        fails, self.failing = where == self.failing, None if where == self.failing else self.failing
        return fails

    def check_scheduler_output(self, scheduler_output: SchedulerOutput) -> None:
        super().check_scheduler_output(scheduler_output)
        pending = [chunk for chunk in scheduler_output.chunks if chunk.awaits_token]
        in_flight = {
            chunk.sequence_id
            for step in self.executor.in_flight
            for chunk in step.scheduler_output.chunks
            if chunk.num_draws
        }
        assert all(chunk.sequence_id in in_flight for chunk in pending), "no step in flight samples the pending token"

    @rule(pace=st.sampled_from([*PACES]), seed=st.integers(0, 99))
    def change_pace(self, pace, seed):
        self.executor.pace = PACES[pace](Random(seed))

    @rule(where=st.sampled_from(PLACES))
    def fail_once(self, where):
        """A failure that does not recur ends no request."""
        self.failing, self.blames = where, False

    @rule(where=st.sampled_from(PLACES))
    def fail_by_one(self, where):
        """A request whose step fails again when it runs alone is the only one that ends."""
        self.failing, self.blames = where, True

    def check_client(self, client: Client) -> None:
        if client.request.request_id in self.blamed:
            assert client.ended
        else:
            super().check_client(client)

    @precondition(lambda self: hasattr(self, "core"))
    @rule()
    def inspect(self):
        with no_misuse():
            self.core._handle_command(GetSnapshot(self.check_snapshot))

    def check_snapshot(self, load: EngineLoad, stored: list[BlockStored]) -> None:
        assert not self.executor.in_flight
        assert set(stored) == self.cached, "a snapshot and the events before it disagree"
        assert load == self.scheduler.get_load()

    def step_once(self) -> None:
        with no_misuse():
            super().step_once()
        self.ran_before = {sequence.id for sequence in self.scheduler.running}

    def teardown(self):
        super().teardown()
        if hasattr(self, "memory"):
            assert not self.executor.in_flight


OverlapStateMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOverlappingEngine = OverlapStateMachine.TestCase


class PipelineStateMachine(OverlapStateMachine):
    """The same engine, on an executor that has steps in all stages of a pipeline."""

    num_stages = 3

    def check_scheduler_output(self, scheduler_output: SchedulerOutput) -> None:
        super().check_scheduler_output(scheduler_output)
        drawing = {
            chunk.sequence_id
            for step in self.executor.in_flight
            for chunk in step.scheduler_output.chunks
            if chunk.num_draws and chunk.sequence_id in self.scheduler._registry.sequences
        }
        assert drawing.isdisjoint(chunk.sequence_id for chunk in scheduler_output.chunks), "a token is drawn twice"


PipelineStateMachine.TestCase.settings = settings(OverlapStateMachine.TestCase.settings, max_examples=25)
TestPipelinedEngine = PipelineStateMachine.TestCase


@pytest.mark.soak
class TestOverlappingEngineInManyRuns(TestOverlappingEngine):
    settings = settings(TestOverlappingEngine.settings, max_examples=2_000)


@pytest.mark.soak
class TestPipelinedEngineInManyRuns(TestPipelinedEngine):
    settings = settings(TestPipelinedEngine.settings, max_examples=1_500)


@pytest.fixture(autouse=True)
def short_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short prompts of these tests are divided among the stages too."""
    monkeypatch.setattr(batch_scheduler, "MIN_STAGE_TOKENS", 2)


@given(seed=st.integers(0, 2**32), pace=st.sampled_from([*PACES]), num_stages=st.integers(1, 4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_overlapping_steps_changes_no_output(seed: int, pace: str, num_stages: int) -> None:
    compare(seed, pace, num_stages)


@pytest.mark.soak
def test_overlapping_steps_changes_no_output_in_many_runs() -> None:
    for seed in range(4_000):
        compare(seed, [*PACES][seed % len(PACES)], 1 + seed % 4)


def compare(seed: int, pace: str, num_stages: int) -> None:
    """Runs one scenario synchronously and with overlapping steps, and compares the outputs."""
    scenario = Scenario(seed)
    executor = OverlappingPagedExecutor(scenario.capacity, num_stages)
    executor.pace = PACES[pace](Random(seed))
    expected = Run(scenario, PagedExecutor(scenario.capacity)).answers
    scenario.limits = scenario.limits.model_copy(update={"num_stages": num_stages})
    with no_misuse():
        answers = Run(scenario, executor).answers
    requests = {each.request_id: each for arrivals in scenario.arrivals.values() for each in arrivals}
    for request_id, request in requests.items():
        one, other = answers[request_id], expected[request_id]
        if request.sampling.beam_width and scenario.caching == "none" and (one.error or other.error):
            continue  # beams that are computed again share nothing then, so it depends on the moment whether they fit
        assert one.error == other.error
        if not (one.is_aborted or other.is_aborted):
            assert one == other
        for index in one.choices:
            compare_choice(one.choices[index], other.choices[index])


def compare_choice(one: Choice, other: Choice) -> None:
    """What was aborted, sooner in one run than in the other, begins alike."""
    if not (one.is_aborted or other.is_aborted):
        assert one == other
    length = min(len(one.token_ids), len(other.token_ids))
    assert one.token_ids[:length] == other.token_ids[:length]
