"""Drafts change no output, whatever they guess, and cost no block; they are guessed where text repeats, and where it
pays.
"""

from collections import Counter
from itertools import islice
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.draft_proposers import HitRates, NgramProposer, SuffixProposer
from quire_engine.core.engine_core import AddRequest, EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_proto.sampling import SamplingParams

from tests.support.engine_state_machine import CheckedExecutor, EngineStateMachine
from tests.support.guessing import guess
from tests.support.overlapping_executor import OverlappingPagedExecutor
from tests.support.paged_executor import PagedExecutor
from tests.support.scenario import Run, Scenario


class SpeculatingStateMachine(EngineStateMachine):
    """The same engine, with drafts that are right more often than not."""

    may_keep_states = False

    def make_executor(self, capacity: KVCacheConfig) -> CheckedExecutor:
        guess(self.scheduler, seed=capacity.device_blocks)
        return super().make_executor(capacity)

    def check_scheduler_output(self, scheduler_output):
        super().check_scheduler_output(scheduler_output)
        with_drafts = [chunk for chunk in scheduler_output.chunks if chunk.num_draft_tokens]
        assert not (with_drafts and scheduler_output.num_preempted), "drafts had a sequence preempted"
        for chunk in with_drafts:
            assert chunk.num_draws == chunk.num_draft_tokens + 1

    def step_once(self) -> None:
        super().step_once()
        size = self.memory.block_size
        for sequence in self.scheduler.running:
            # A static batch has room for all its prompts from its first step on.
            held = max(sequence.num_computed_tokens, sequence.num_tokens * (self.batching == "static"))
            assert sequence.block_table.num_blocks <= -(-held // size), "a block holds nothing"
            assert sequence.num_scheduled_tokens == sequence.num_computed_tokens


SpeculatingStateMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSpeculatingEngine = SpeculatingStateMachine.TestCase


class SpeculatingRun(Run):
    """A scenario with drafts."""

    def __init__(self, scenario: Scenario, executor: PagedExecutor, seed: int) -> None:
        self.seed = seed
        super().__init__(scenario, executor)

    def prepare(self) -> None:
        guess(self.scheduler, self.seed)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_drafts_change_no_output(seed: int) -> None:
    scenario = Scenario(seed)
    scenario.aborts.clear()  # what was delivered before an abort depends on when it comes
    expected = Run(scenario, PagedExecutor(scenario.capacity)).answers
    run = SpeculatingRun(scenario, PagedExecutor(scenario.capacity), seed)
    for request_id, answer in run.answers.items():
        if answer.error is None and expected[request_id].error is None:
            assert answer == expected[request_id]
    assert run.scheduler.stats.num_accepted_tokens <= run.scheduler.stats.num_draft_tokens


def test_drafts_are_accepted_and_save_steps() -> None:
    def run(*, guesses: bool) -> tuple[list[int], int]:
        scheduler = Scheduler(SchedulerConfig(max_model_len=200), KVCacheManager(KVCacheConfig(4, 100, 0)))
        tokens: list[int] = []
        steps = 0

        def receive(step: EngineCoreOutputs) -> None:
            nonlocal steps
            steps += 1
            tokens.extend(token_id for output in step.all_outputs() for token_id in output.token_ids)

        core = EngineCore(scheduler, PagedExecutor(KVCacheConfig(4, 100, 0)), receive)
        if guesses:
            guess(scheduler, 1)
        core._handle_command(AddRequest(Request("r", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))))
        while scheduler.has_work:
            core.step()
        return tokens, steps

    plain, plain_steps = run(guesses=False)
    drafted, steps = run(guesses=True)
    assert drafted == plain
    assert plain_steps == 100
    assert steps < 70


def test_an_executor_that_overlaps_steps_gets_no_drafts() -> None:
    config = SchedulerConfig(speculative_method="ngram")
    scheduler = Scheduler(config, KVCacheManager(KVCacheConfig(4, 100, 0)))
    assert scheduler._batch_scheduler.speculator is not None
    EngineCore(scheduler, OverlappingPagedExecutor(KVCacheConfig(4, 100, 0)), lambda _: None)
    assert scheduler._batch_scheduler.speculator is None


def best_source(token_ids: list[int], shortest: int, longest: int) -> int:
    """The end of the longest earlier occurrence of the last tokens, the last of equally long ones, by looking at
    all.
    """
    best, best_length = 0, shortest - 1
    for end in range(len(token_ids) - 1, 0, -1):
        length = 0
        while length < min(longest, end) and token_ids[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    return best


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=15),
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
    count=st.integers(1, 8),
)
def test_what_followed_the_longest_equal_text_is_proposed(
    token_ids: list[int], shortest: int, more: int, count: int
) -> None:
    proposer = NgramProposer(token_ids, shortest, shortest + more)
    proposer.update()
    source = best_source(token_ids, shortest, shortest + more)
    proposed = [token_id for token_id, _ in islice(proposer.guesses(), count)]
    if not source:
        assert proposed == []
        return
    text = [*token_ids]
    for offset in range(count):
        text.append(text[source + offset])
    assert proposed == text[len(token_ids) :]


def test_the_hit_rate_follows_what_was_drawn() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    repeating = NgramProposer(text, 2, 4)
    repeating.update()
    for token_id in [1, 2, 3, 4, 5, 6, 7, 8] * 5:
        text.append(token_id)
        repeating.update()
    assert repeating.hit_rate > 0.9
    random = Random(1)
    for _ in range(40):
        for token_id in (1, 2, random.randrange(100, 1000)):
            text.append(token_id)
            repeating.update()
    assert repeating.hit_rate < 0.7


def suffix_of(token_ids: list[int], end: int, most: int) -> int:
    """How many tokens before ``end`` equal the last ones."""
    length = 0
    while length < min(most, end) and token_ids[end - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


@given(token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=15), count=st.integers(1, 8))
def test_what_most_often_followed_the_longest_equal_text_is_proposed(token_ids: list[int], count: int) -> None:
    proposer = SuffixProposer(token_ids, HitRates())
    proposer.update()
    drafts = list(islice(proposer.guesses(), count))
    lengths = {end: suffix_of(token_ids, end, 64) for end in range(len(token_ids) - 1, 0, -1)}
    longest = max(lengths.values(), default=0)
    if not longest:
        assert not drafts
        return
    follow = Counter(token_ids[end] for end, length in lengths.items() if length == longest)
    ((expected, votes),) = follow.most_common(1)
    token_id, probability = drafts[0]
    assert (token_id, probability) == (expected, pytest.approx(0.5 * votes / follow.total()))
    text = [*token_ids]
    for token_id, probability in drafts:
        assert 0 < probability <= 1
        text.append(token_id)  # and each stands behind what stands before it somewhere else too
        assert any(text[end - 2 : end] == text[-2:] for end in range(2, len(text)))


@given(token_ids=st.lists(st.integers(0, 2), min_size=2, max_size=60), data=st.data())
def test_what_is_followed_equals_the_end_of_the_text_however_it_came(token_ids: list[int], data: st.DataObject) -> None:
    known: list[int] = []
    proposer = SuffixProposer(known, HitRates())
    while len(known) < len(token_ids):
        known += token_ids[len(known) :][: data.draw(st.integers(1, 4))]
        proposer.update()
        for end, found in proposer._sources:
            length = min(found + proposer._followed, 64)
            assert end < len(known)
            assert known[end - length : end] == known[len(known) - length :]
        assert bool(proposer._sources) == (known[-1] in known[:-1])


def test_a_text_that_is_followed_by_two_others_is_trusted_by_their_shares() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2]
    proposer = SuffixProposer(text, HitRates())
    proposer.update()
    first, second = islice(proposer.guesses(), 2)
    assert first == (4, 0.5)  # 1 2 4 1 2 stands once before
    assert second[0] == 1
    text = [9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 4, 6, 1, 2]
    proposer = SuffixProposer(text, HitRates())
    proposer.update()
    assert next(proposer.guesses()) == (4, pytest.approx(0.5 * 2 / 3))


def test_long_repetitions_are_trusted_more_where_they_were_right_more_often() -> None:
    shared, random = HitRates(), Random(1)
    phrases = [[random.randrange(1000) for _ in range(20)] for _ in range(3)]
    text: list[int] = []
    proposer = SuffixProposer(text, HitRates(shared))
    for _ in range(60):
        for token_id in [*random.choice(phrases)[:12], *(random.randrange(20) for _ in range(6))]:
            text.append(token_id)
            proposer.update()
    assert shared.rate(10) > 0.8
    assert shared.rate(1) < 0.6
    other = HitRates(shared)  # of a sequence that begins
    assert other.rate(10) == pytest.approx(shared.rate(10))
    for _ in range(20):
        other.observe(10, 1.0, hit=False)
    assert other.rate(10) < 0.2


LATENCY = LatencyModel(
    tokens_per_second=1e4,
    weights_seconds=0.02,
    context_seconds=0.0,
    pair_seconds=0.0,
    draw_seconds=1e-4,
    overhead_seconds=0.0,
    bytes_per_second=1e9,
)


class Echo(SimulatedExecutor):
    """Repeats the text ``0 .. period - 1``."""

    period = 7

    def _sample(self, row, choice, position, draw, model_output):
        model_output.token_ids[draw] = position % self.period


def run_echo(executor: SimulatedExecutor, method: str) -> tuple[list[int], float, Scheduler]:
    config = SchedulerConfig(speculative_method=method, max_model_len=2000)
    scheduler = Scheduler(config, KVCacheManager(executor.kv_cache_config), rates=executor.rates)
    tokens: list[int] = []
    core = EngineCore(
        scheduler, executor, lambda step: tokens.extend(t for output in step.all_outputs() for t in output.token_ids)
    )
    prompt = [position % 7 for position in range(50)]
    core._handle_command(AddRequest(Request("r", prompt, SamplingParams(max_tokens=400, ignore_eos=True, seed=5))))
    while scheduler.has_work:
        core.step()
    return tokens, 0.0, scheduler


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_text_that_repeats_itself_is_guessed_and_other_text_is_not(method: str) -> None:
    seconds: list[float] = []
    echo = Echo(KVCacheConfig(16, 200, 0), LATENCY, sleep=seconds.append)
    plain, _, _ = run_echo(echo, "none")
    plain_seconds, seconds[:] = sum(seconds), []
    drafted, _, scheduler = run_echo(echo, method)
    assert drafted == plain
    assert sum(seconds) < plain_seconds / 4
    assert scheduler.stats.num_accepted_tokens > 300
    other = SimulatedExecutor(KVCacheConfig(16, 200, 0), LATENCY, sleep=lambda _: None)
    assert run_echo(other, "none")[0] == run_echo(other, method)[0]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_cost_more_than_they_bring_are_not_computed(method: str) -> None:
    costly = LatencyModel(
        tokens_per_second=100.0,
        weights_seconds=0.0,
        context_seconds=0.0,
        pair_seconds=0.0,
        draw_seconds=1e-2,
        overhead_seconds=0.0,
        bytes_per_second=1e9,
    )
    *_, scheduler = run_echo(Echo(KVCacheConfig(16, 200, 0), costly, sleep=lambda _: None), method)
    assert scheduler.stats.num_draft_tokens < 40
