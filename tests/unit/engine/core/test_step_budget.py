"""A step that computes prompts beside sequences that decode takes what was promised, and everybody goes on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_time_model import (
    AUTO_LOSS,
    AUTO_SECONDS,
    MIN_PROMPT_TOKENS,
    StepBudget,
    StepTimeEstimator,
    StepTimeModel,
    StepWork,
    count_pairs,
)
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_proto.sampling import SamplingParams

CAPACITY = KVCacheConfig(16, 4000, 0, block_bytes=1000)
LONG = 16_000
costs = st.floats(0, 1e-3)
models = st.builds(StepTimeModel, costs, costs, costs, st.floats(0, 1e-6), st.floats(0, 1e-6))
prompts = st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 5000)), min_size=1, max_size=8)


@given(models, st.floats(-0.01, 0.5), st.integers(1, 4096), st.integers(0, 64), st.floats(0, 0.1), prompts)
def test_chunks_fit_the_seconds_and_the_tokens_and_the_first_prompt_always_gets_some(
    model: StepTimeModel, seconds: float, tokens: int, decoding: int, saved: float, wanted: list[tuple[int, int]]
) -> None:
    budget = StepBudget(
        tokens, model, max_seconds=1.0, seconds=seconds, decoding=decoding, saved=saved, waiting=len(wanted)
    )
    ended = 0
    for index, (start, lacking) in enumerate((start, max(2, lacking)) for start, lacking in wanted):
        before, left = budget.seconds, budget.tokens
        length = budget.chunk_length(start, lacking)
        least = min(lacking, MIN_PROMPT_TOKENS)
        assert 0 <= length <= min(lacking, left)
        if index == 0:
            assert length >= min(least, tokens)
        if not length:
            continue
        budget.spend(start, length, lacking)
        assert budget.tokens == left - length
        work = StepWork(length, int(length == lacking), count_pairs(start, length))
        unspent = before - (model.predict(work) - model.step_seconds)
        if length == lacking:
            ended += 1
            unspent = min(unspent, saved * (len(wanted) - ended) / ended)
        assert budget.seconds == pytest.approx(unspent)
        if length > least:
            assert budget.seconds >= -1e-9
            assert budget.tokens >= decoding
            work = StepWork(length + 17, 1, count_pairs(start, length + 17))
            fills = model.predict(work) - model.step_seconds > before or length + 17 > left - decoding
            assert fills or length == lacking, "a chunk is as long as fits, but for its alignment"


def test_nothing_is_bounded_before_the_model_is_known_or_where_nothing_decodes() -> None:
    estimator = StepTimeEstimator(Rates(1000, 1e9), 1, warm=0)
    assert estimator.make_budget(512, 1e-9, [10]).chunk_length(0, 4000) == 512
    estimator.observe(StepWork(100, 1, 5000.0), 0.1)
    assert estimator.make_budget(512, 1e-9, []).chunk_length(0, 4000) == 512
    assert estimator.make_budget(512, 0.0, [10]).chunk_length(0, 4000) == 512
    assert estimator.make_budget(512, 1e-9, [10]).chunk_length(0, 4000) == MIN_PROMPT_TOKENS


def prompts_take(decoding: float, prompts: float) -> float:
    """Seconds for each second of prompts, in steps that have so many seconds of them and of decoding."""
    return (decoding + prompts) / prompts


@given(st.floats(0.002, 0.2), st.floats(1e-5, 1e-3), st.floats(0, 1e-6), st.integers(0, 20_000))
@settings(deadline=None)
def test_by_default_a_step_is_as_short_as_makes_prompts_a_twentieth_slower(
    decoding: float, token: float, pair: float, start: int
) -> None:
    estimator = StepTimeEstimator(Rates(1000, 1e9), 1, warm=0)
    for number in range(200):
        length = 64 * (1 + number % 16)
        pairs = count_pairs(512 * (number % 9), length)
        estimator.observe(StepWork(length, 0, pairs), decoding + length * token + pairs * pair)
        estimator.observe(StepWork(0, 1), decoding)
    model = estimator.model
    assert model is not None
    alone = model.predict(StepWork(0, 1, 0.0, 100))
    full = model.predict(StepWork(2048, 0, count_pairs(start, 2048))) - model.step_seconds
    bounds = [
        estimator.make_budget(2048, None, [100], waiting=waiting, start=start).max_seconds for waiting in range(30)
    ]
    assert bounds[0] == bounds[1]
    assert bounds[1:] == sorted(bounds[1:]), "the more prompts wait, the longer is a step"
    assert max(bounds) <= max(AUTO_SECONDS, alone + full)
    for waiting, bound in enumerate(bounds[1:], 1):
        loss = prompts_take(alone, bound - alone) - prompts_take(alone, full)
        assert bound == AUTO_SECONDS or loss == pytest.approx(AUTO_LOSS / waiting)
        assert loss <= AUTO_LOSS / waiting + 1e-9 or bound == AUTO_SECONDS > alone


def test_steps_that_take_longer_than_the_model_says_are_soon_planned_shorter() -> None:
    """As chunks beside decoding sequences may: the model is of all steps, and they are few."""
    estimator = StepTimeEstimator(Rates(1000, 1e9), 1, warm=0)
    for number in range(300):
        tokens = 100 * (1 + number % 20)
        estimator.observe(StepWork(tokens, 8, count_pairs(0, tokens)), 0.01 + tokens * 1e-5)
        estimator.observe(StepWork(0, 8, 0, 8000), 0.01)

    def chunk() -> int:
        return estimator.make_budget(4096, 0.02, [1000] * 8).chunk_length(0, 10_000)

    before = chunk()
    for _ in range(20):
        estimator.observe(StepWork(chunk(), 8, count_pairs(0, chunk()), 8000), 1.5 * (0.01 + chunk() * 1e-5))
    assert 1.5 * (0.01 + chunk() * 1e-5) < 1.1 * 0.02 < 1.5 * (0.01 + before * 1e-5)


class Clocked(SimulatedExecutor):
    """Time passes in steps only. Keeps what they were."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[SchedulerOutput] = []
        super().__init__(CAPACITY, PRESETS["cpu"].latency, sleep=self.advance)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.plans.append(scheduler_output)
        return super().execute_model(scheduler_output)


class Engine:
    """A core on virtual time, with the latencies of a CPU, which has seen prompts of several lengths."""

    def __init__(self, **limits: object) -> None:
        self.executor, self.published = Clocked(), []
        config = SchedulerConfig(max_model_len=20_000, max_num_batched_tokens=2048, **limits)
        self.core = EngineCore(
            Scheduler(config, KVCacheManager(CAPACITY)), self.executor, self.published.append, lambda: self.executor.now
        )
        for number in range(20):
            self.add(f"before {number}", 100 * (1 + number), 10)
            self.run()

    def add(self, name: str, num_prompt: int, max_tokens: int, priority: int = 0) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        salt = sum(name.encode())
        prompt = [(salt * 31 + position * 7) % 30_000 for position in range(num_prompt)]
        self.core.scheduler.add_request(Request(name, prompt, params, priority=priority))

    def run(self) -> list[EngineCoreOutputs]:
        """Steps until all has ended; what the steps since the last call published."""
        while self.core.scheduler.has_work:
            self.core.step()
        steps, self.published[:] = list(self.published), []
        return steps

    def run_until_all_decode(self) -> None:
        while any(s.num_unscheduled_tokens > 1 for s in self.core.scheduler.running) or self.core.scheduler.waiting:
            self.core.step()


def tokens_of(steps: list[EngineCoreOutputs]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for step in steps:
        for output in step.all_outputs():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def with_a_long_prompt(limit: float | None) -> list[EngineCoreOutputs]:
    """Eight sequences decode when a long prompt comes."""
    engine = Engine(max_step_seconds=limit)
    for number in range(8):
        engine.add(str(number), 60, 1000)
        engine.core.step()
    engine.run_until_all_decode()
    engine.add("long", LONG, 5)
    return engine.run()


@pytest.mark.parametrize("limit", [0.05, 0.1, None])
def test_no_step_takes_much_longer_than_promised_while_a_long_prompt_comes(limit: float | None) -> None:
    bounded = [step.trace for step in with_a_long_prompt(limit) if step.trace.max_seconds]
    bounded = [trace for trace in bounded if "long" in trace.request_ids]
    assert bounded
    assert all(trace.max_seconds == limit for trace in bounded if limit)
    assert max(trace.seconds / trace.max_seconds for trace in bounded) < 1.2
    assert sum(trace.num_decode for trace in bounded) == 8 * len(bounded), "nobody who decodes waits"
    assert all(trace.num_tokens - trace.num_decode >= MIN_PROMPT_TOKENS for trace in bounded[:-1])
    used = [trace.seconds / trace.max_seconds for trace in bounded[5:-1]]
    assert sum(used) / len(used) > 0.7, "what was promised is used"


@pytest.mark.parametrize("limit", [0.05, 0.1, None])
def test_the_load_says_in_how_many_steps_prompts_are_computed(limit: float | None) -> None:
    engine = Engine(max_step_seconds=limit)
    for number in range(8):
        engine.add(str(number), 60, 400)
        engine.core.step()
    engine.run_until_all_decode()
    said = engine.published[-1].load.prompt_tokens_per_step
    engine.published.clear()
    for number in range(3):
        engine.add(f"prompt {number}", 1500, 5)
        engine.run_until_all_decode()
    steps = engine.run()
    needed = [step for step in steps if step.trace.num_tokens > step.trace.num_decode]
    assert len(needed) == pytest.approx(3 * 1500 / said, rel=0.2)
    assert len(needed) > 2 * 3 * 1500 / engine.core.scheduler.config.max_num_batched_tokens
    assert steps[-1].load.prompt_tokens_per_step == 0, "nothing decodes"


def test_steps_without_a_bound_are_reported_as_such() -> None:
    engine = Engine(max_step_seconds=0.0)
    engine.add("one", 60, 5)
    steps = engine.run()
    assert [step.load.prompt_tokens_per_step for step in steps] == [0] * len(steps)


def test_what_comes_behind_the_end_of_a_prompt_does_not_delay_its_first_token() -> None:
    """A step that ends one prompt leaves the next to the next step, as that costs it one more step at most."""
    engine = Engine(max_step_seconds=1.0)
    for number in range(8):
        engine.add(str(number), 60, 100)
    engine.run_until_all_decode()
    engine.add("short", 300, 5)
    engine.add("long", 4000, 5)
    steps = engine.run()
    first = next(step for step in steps if "short" in step.trace.request_ids)
    alone = steps[steps.index(first) - 1].trace.seconds
    assert [output.request_id for output in first.outputs if output.request_id == "short"], "all of it is computed"
    others = first.trace.num_tokens - first.trace.num_decode - 300
    assert 0 <= others * 0.3e-3 <= 1.2 * alone, "no more of the long one than another step would take"
    assert max(step.trace.seconds for step in steps) > 0.8


def test_tokens_do_not_depend_on_how_prompts_are_cut() -> None:
    expected = tokens_of(with_a_long_prompt(0.0))
    assert tokens_of(with_a_long_prompt(0.03)) == expected == tokens_of(with_a_long_prompt(1e-9))


def test_a_prompt_of_more_precedence_takes_no_turn_from_those_that_decode() -> None:
    engine = Engine(max_step_seconds=0.03, scheduling_policy="priority")
    for number in range(4):
        engine.add(str(number), 60, 300, priority=5)
    engine.run_until_all_decode()
    engine.add("urgent", 4000, 5, priority=-1)
    traces = [step.trace for step in engine.run() if step.trace.max_seconds]
    bounded = [trace for trace in traces if "urgent" in trace.request_ids]
    assert bounded
    assert all(trace.num_decode == 4 for trace in bounded)


def test_the_same_requests_are_cut_in_the_same_way_again() -> None:
    cuts = []
    for _ in range(2):
        engine = Engine(max_step_seconds=None)
        for number in range(8):
            engine.add(str(number), 60 + 300 * number, 100)
        engine.run()
        cuts.append([[chunk.length for chunk in plan.chunks] for plan in engine.executor.plans])
    assert cuts[0] == cuts[1]
