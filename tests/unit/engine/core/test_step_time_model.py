"""What an engine learns of its own pace agrees with the latency model that the simulated executor takes its time by."""

import random
from collections.abc import Callable
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_time_model import WARM, StepTimeEstimator, StepTimeModel, StepWork, count_pairs
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_proto.sampling import SamplingParams

CAPACITY = KVCacheConfig(16, 4000, 0, block_bytes=1000)
Step = tuple[StepWork, float]


class Recording(SimulatedExecutor):
    """Records the work of each step, and its seconds."""

    def __init__(self, latency: LatencyModel) -> None:
        super().__init__(CAPACITY, latency, sleep=self.note)
        self.seen: list[Step] = []
        self.work = StepWork()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.work = StepWork.of(scheduler_output)
        return super().execute_model(scheduler_output)

    def note(self, seconds: float) -> None:
        self.seen.append((self.work, seconds))


def steps(latency: LatencyModel, count: int, seed: int) -> list[Step]:
    """The work and the seconds of an engine's steps under a load that rises and falls."""
    source, executor = random.Random(seed), Recording(latency)
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4000)
    core = EngineCore(Scheduler(config, KVCacheManager(CAPACITY), rates=latency.rates), executor, lambda _: None)
    for number in range(count):
        if source.random() < 0.15 or not core.scheduler.has_work:
            prompt = [source.randrange(1000) for _ in range(source.randrange(20, 900))]
            params = SamplingParams(max_tokens=source.randrange(5, 60), ignore_eos=True)
            core.scheduler.add_request(Request(str(number), prompt, params))
        core.step()
    return executor.seen


def learned(latency: LatencyModel, rates: Rates, count: int = 400) -> tuple[StepTimeModel, list[Step]]:
    meter, seen = StepTimeEstimator(rates, 1000, warm=0), steps(latency, count + 200, seed=1)
    for step in seen[:count]:
        meter.observe(*step)
    assert meter.model is not None
    return meter.model, seen[count:]


def mean_error(model: StepTimeModel, seen: list[Step]) -> float:
    errors = [abs(model.predict(work) / seconds - 1) for work, seconds in seen]
    return sum(errors) / len(errors)


@st.composite
def latencies(draw: st.DrawFn, **more: st.SearchStrategy[float]) -> LatencyModel:
    pair_seconds = draw(st.floats(0, 5e-7))
    return LatencyModel(
        tokens_per_second=draw(st.floats(500, 50_000)),
        weights_seconds=draw(more.get("weights", st.just(0.0))),
        context_seconds=pair_seconds,  # then a chunk's attention is a sum over its pairs
        pair_seconds=pair_seconds,
        draw_seconds=draw(st.floats(1e-6, 1e-3)),
        overhead_seconds=draw(st.floats(1e-4, 0.02)),
        bytes_per_second=1e9,
        jitter=draw(more.get("jitter", st.just(0.0))),
    )


wrong = st.sampled_from([0.2, 1.0, 5.0])


@given(latencies(), wrong)
@settings(max_examples=12, deadline=None)
def test_each_step_that_is_a_sum_is_predicted_within_a_tenth(latency: LatencyModel, factor: float) -> None:
    model, later = learned(latency, Rates(factor * latency.tokens_per_second, 1e9))
    for work, seconds in later:
        # The token that ends a prompt is one of the prompt's and one that a draw follows: it is counted twice.
        ends = work.sequences * model.token_seconds if work.prompt_tokens else 0.0
        assert 0.9 * seconds <= model.predict(work) <= 1.1 * seconds + ends
    assert mean_error(model, later) < 0.05


@given(latencies(weights=st.floats(0, 0.01), jitter=st.floats(0, 0.1)), wrong)
@settings(max_examples=12, deadline=None)
def test_steps_that_are_no_sum_and_jitter_are_predicted_within_a_fifth_on_average(
    latency: LatencyModel, factor: float
) -> None:
    model, later = learned(latency, Rates(factor * latency.tokens_per_second, 1e9))
    assert mean_error(model, later) < 0.2


def test_a_prompt_longer_than_all_before_is_predicted_by_its_context() -> None:
    """Attention of a long prompt takes longer with each chunk, which prompts of a third of the length foretell."""

    def chunk(start: int) -> Step:
        work = StepWork(256, 0, count_pairs(start, 256))
        return work, 0.01 + 256e-5 + work.prompt_pairs * 1e-8

    model = fed((100, lambda number: chunk(256 * (number % 20))), (50, decode))
    assert model.predict(chunk(15_000)[0]) == pytest.approx(chunk(15_000)[1], rel=0.05)


any_steps = st.lists(
    st.tuples(
        st.builds(StepWork, st.integers(0, 4096), st.integers(0, 300), st.floats(0, 1e9), st.integers(0, 10**6)),
        st.floats(-1.0, 1e4, allow_nan=False),
    ),
    max_size=120,
)


@given(any_steps, st.floats(1e-3, 1e7), st.floats(1e-3, 1e12))
@settings(deadline=None)
def test_whatever_the_steps_were_nothing_is_negative_or_beyond_all_bounds(
    seen: list[Step], tokens_per_second: float, bytes_per_second: float
) -> None:
    meter = StepTimeEstimator(Rates(tokens_per_second, bytes_per_second), 1000, warm=0)
    for step in seen:
        meter.observe(*step)
    model, pace = meter.model, meter.pace
    if model is None:
        assert pace is None
        assert all(seconds <= 0 or not (work.prompt_tokens or work.sequences) for work, seconds in seen)
        return
    assert pace is not None
    assert all(0 <= cost < float("inf") for costs in (model, pace) for cost in astuple(costs))
    assert sum(astuple(model)) > 0


def fed(*feeds: tuple[int, Callable[[int], Step]]) -> StepTimeModel:
    meter = StepTimeEstimator(Rates(1000, 1e6), 2000, warm=0)
    for times, step in feeds:
        for number in range(times):
            meter.observe(*step(number))
    assert meter.model is not None
    return meter.model


def decode(number: int) -> Step:
    return StepWork(0, 1 + number % 40), 0.01 + (1 + number % 40) * 1e-4


def mixed(number: int) -> Step:
    return StepWork(100 * (1 + number % 5), 10), 0.01 + 10e-4 + 100 * (1 + number % 5) * 2e-5


def test_a_coefficient_that_no_step_informs_keeps_its_warm_up_value() -> None:
    model = fed((500, decode))
    assert model.token_seconds == pytest.approx(1e-3)
    assert model.predict(StepWork(0, 20)) == pytest.approx(0.012, rel=0.01)


def test_a_constant_load_is_predicted_although_its_coefficients_are_not_identifiable() -> None:
    model = fed((500, lambda _: (StepWork(0, 8), 0.02)))
    assert model.predict(StepWork(0, 8)) == pytest.approx(0.02, rel=0.01)


def test_a_long_run_of_decodes_does_not_change_the_prefill_estimate() -> None:
    model = fed((300, mixed), (20_000, decode))
    assert model.token_seconds == pytest.approx(2e-5, rel=0.05)


def test_an_engine_that_became_slower_is_predicted_slower() -> None:
    model = fed((1000, decode), (2000, lambda number: (decode(number)[0], 3 * decode(number)[1])))
    assert model.predict(StepWork(0, 20)) == pytest.approx(0.036, rel=0.02)


def test_one_delayed_step_changes_little() -> None:
    model = fed((500, decode), (1, lambda _: (StepWork(0, 8), 5.0)), (16, decode))
    assert model.predict(StepWork(0, 20)) == pytest.approx(0.012, rel=0.05)


def test_the_first_prompts_cost_more_than_later_ones_and_are_not_learned_from() -> None:
    meter = StepTimeEstimator(Rates(1000, 1e6), 2000)
    for number in range(WARM - 1):
        meter.observe(StepWork(100, 10), 60.0)
        for step in (decode(number), decode(number + 1)):
            meter.observe(*step)
    assert meter.model is None, "what decoding costs says little without prompts"
    meter.observe(*mixed(0))
    assert meter.model is not None
    assert meter.model.predict(mixed(0)[0]) == pytest.approx(mixed(0)[1], rel=0.01)


@pytest.mark.parametrize(("idle", "steps"), [(3600.0, 3), (60.0, 6)])
def test_an_engine_that_was_slow_and_then_idle_is_soon_predicted_fast(idle: float, steps: int) -> None:
    """What was learned in a slow minute weighs little once the engine has rested; without that it would take hundreds
    of steps.
    """
    meter, now = StepTimeEstimator(Rates(1000, 1e6), 2000, warm=0), 0.0
    for number in range(300):
        now += 0.2
        for work, seconds in (mixed(number), decode(number)):
            meter.observe(work, 5 * seconds, now)
    for number in range(steps):
        now += idle
        for step in (mixed(number), decode(number)):
            meter.observe(*step, now)
    assert meter.model is not None
    assert meter.model.predict(StepWork(300, 10)) < 1.6 * mixed(2)[1]
    assert meter.model.predict(StepWork(0, 10)) < 1.6 * decode(9)[1]


def test_estimates_of_work_that_does_not_recur_are_kept() -> None:
    meter, now = StepTimeEstimator(Rates(1000, 1e6), 2000, warm=0), 0.0
    for number in range(300):
        meter.observe(*mixed(number), now)
    for number in range(300):
        now += 60.0
        meter.observe(*decode(number), now)
    assert meter.model is not None
    assert meter.model.token_seconds == pytest.approx(2e-5, rel=0.05)
