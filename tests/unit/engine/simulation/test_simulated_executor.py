"""The simulated executor answers what a model would have to, and takes the time that the formula says."""

from dataclasses import replace
from itertools import pairwise
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import BlockCopies, BlockCopy, KVCacheConfig
from quire_engine.core.step import ModelOutput, SampleRequest, SchedulerOutput
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_proto.sampling import SamplingParams

from tests.support.steps import KnownChunk, make_step

CAPACITY = KVCacheConfig(block_size=4, device_blocks=100, host_blocks=10, block_bytes=1000)
LATENCY = LatencyModel(
    tokens_per_second=1000,
    weights_seconds=0.01,
    context_seconds=1e-4,
    pair_seconds=1e-5,
    draw_seconds=1e-3,
    overhead_seconds=0.002,
    bytes_per_second=1e6,
)
VOCAB_SIZE = 40


def executor(seed: int = 0, latency: LatencyModel = LATENCY) -> tuple[SimulatedExecutor, list[float]]:
    slept: list[float] = []
    return SimulatedExecutor(CAPACITY, latency, seed=seed, vocab_size=VOCAB_SIZE, sleep=slept.append), slept


@st.composite
def sample_requests(draw: st.DrawFn, sequence_id: int, token_ids: list[int]) -> SampleRequest:
    """A sample request of any kind, somewhere in an output."""
    logprobs = draw(st.sampled_from([None, 0, 3]))
    min_tokens = draw(st.integers(0, 3))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])), max_tokens=9, min_tokens=min_tokens, logprobs=logprobs
    )
    return SampleRequest(
        sequence_id,
        params,
        draw(st.integers(0, 5)),
        token_ids,
        len(token_ids) - draw(st.integers(0, min(3, len(token_ids) - 1))),
        stop_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=10))),
        num_candidates=draw(st.sampled_from([0, 0, 1, 8])),
    )


@st.composite
def chunks(draw: st.DrawFn, sequence_id: int) -> KnownChunk:
    token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
    start = draw(st.integers(0, len(token_ids) - 1))
    count = draw(st.integers(0, 3))
    num_targets = draw(st.sampled_from([0, 0, len(token_ids) - start - 1, len(token_ids) - start]))
    return KnownChunk(
        sequence_id,
        token_ids[start:],
        start,
        list(range(1, 6)),
        tuple(draw(sample_requests(1000 * sequence_id + index, token_ids)) for index in range(count)),
        prompt_logprob_targets=[draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(num_targets)],
        num_prompt_logprobs=draw(st.sampled_from([0, 2])),
    )


@st.composite
def scheduler_outputs(draw: st.DrawFn) -> SchedulerOutput:
    copies = st.lists(st.builds(BlockCopy, st.integers(1, 9), st.integers(0, 9)), max_size=3)
    return make_step(
        draw(st.integers(1, 100)),
        [draw(chunks(index)) for index in range(draw(st.integers(0, 4)))],
        draw(st.builds(BlockCopies, copies, copies, copies, copies)),
    )


@given(scheduler_outputs())
def test_every_draw_has_exactly_one_answer_and_every_target_a_score(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    asked = [request for chunk in scheduler_output.chunks for request in chunk.sample_requests]
    assert set(model_output.token_ids) == {request.sequence_id for request in asked if not request.num_candidates}
    assert set(model_output.candidates) == {request.sequence_id for request in asked if request.num_candidates}
    scored = {request.sequence_id for request in asked if request.params.wants_logprobs and not request.num_candidates}
    assert set(model_output.logprobs) == scored
    assert not model_output.errors
    targets = {
        chunk.sequence_id: len(chunk.prompt_logprob_targets)
        for chunk in scheduler_output.chunks
        if chunk.prompt_logprob_targets
    }
    assert {key: len(scores) for key, scores in model_output.prompt_logprobs.items()} == targets


@given(scheduler_outputs())
def test_candidates_and_top_tokens_are_distinct_and_fall_as_probabilities_do(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    rankings = [list(zip(c.token_ids, c.logprobs, strict=True)) for c in model_output.candidates.values()]
    rankings += [list(score.top) for score in model_output.logprobs.values()]
    rankings += [list(score.top) for scores in model_output.prompt_logprobs.values() for score in scores]
    for ranking in rankings:
        token_ids, logprobs = [token_id for token_id, _ in ranking], [logprob for _, logprob in ranking]
        assert len(set(token_ids)) == len(token_ids)
        assert all(0 <= token_id < VOCAB_SIZE for token_id in token_ids)
        assert all(earlier > later for earlier, later in pairwise(logprobs))
        assert sum(map(exp, logprobs)) < 1


@given(scheduler_outputs())
def test_counts_of_candidates_and_top_tokens_are_the_requested_ones(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    for chunk in scheduler_output.chunks:
        assert all(
            len(score.top) == chunk.num_prompt_logprobs
            for score in model_output.prompt_logprobs.get(chunk.sequence_id, [])
        )
        for sample_request in chunk.sample_requests:
            if sample_request.num_candidates:
                assert (
                    len(model_output.candidates[sample_request.sequence_id].token_ids) == sample_request.num_candidates
                )
            elif sample_request.params.logprobs:
                score = model_output.logprobs[sample_request.sequence_id]
                assert len(score.top) == sample_request.params.logprobs
                assert score.top[0] == (model_output.token_ids[sample_request.sequence_id], score.logprob)


@given(scheduler_outputs())
def test_nothing_that_ends_a_sequence_is_drawn_before_min_tokens(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    for sample_request in (each for chunk in scheduler_output.chunks for each in chunk.sample_requests):
        drawn = model_output.candidates[sample_request.sequence_id].token_ids if sample_request.num_candidates else []
        drawn = drawn or [model_output.token_ids[sample_request.sequence_id]]
        if len(sample_request.token_ids) - sample_request.num_prompt_tokens < sample_request.params.min_tokens:
            assert not sample_request.stop_token_ids.intersection(drawn)


@given(scheduler_outputs())
def test_an_answer_depends_on_nothing_else_in_the_step(scheduler_output: SchedulerOutput) -> None:
    whole = executor()[0].execute_model(scheduler_output)
    apart = ModelOutput()
    for chunk in reversed(scheduler_output.chunks):
        part = replace(scheduler_output, step=scheduler_output.step + 1, chunks=[chunk])
        apart.add(executor()[0].execute_model(part))
    for name in ("token_ids", "logprobs", "candidates", "prompt_logprobs"):
        assert getattr(apart, name) == getattr(whole, name)


def test_tokens_differ_by_seed_and_position_and_greedy_ones_by_position_alone() -> None:
    def drawn(seed: int, draw_seed: int, temperature: float) -> list[int]:
        run = SimulatedExecutor(CAPACITY, LATENCY, seed=seed, sleep=lambda _: None).execute_model
        tokens = []
        for position in range(1, 9):
            sample_request = SampleRequest(0, SamplingParams(temperature=temperature), draw_seed, [5] * position, 1)
            tokens.append(
                run(make_step(1, [KnownChunk(0, [5], position - 1, [1, 2, 3], (sample_request,))])).token_ids[0]
            )
        return tokens

    assert len({tuple(drawn(seed, draw_seed, 1)) for seed in (0, 1) for draw_seed in (0, 1)}) == 4
    assert drawn(0, 0, 0) == drawn(0, 1, 0) != drawn(1, 0, 0)
    assert len(set(drawn(0, 0, 0))) > 1


@given(scheduler_outputs())
@settings(max_examples=30)
def test_a_step_takes_the_time_of_the_formula(scheduler_output: SchedulerOutput) -> None:
    run, slept = executor()
    timings = run.execute_model(scheduler_output).timings
    forward = 0.0
    if scheduler_output.chunks:
        forward = max(0.01, sum(chunk.length for chunk in scheduler_output.chunks) / 1000)
        for chunk in scheduler_output.chunks:
            pairs = sum(position + 1 for position in range(chunk.start, chunk.end))
            forward += max(chunk.end * 1e-4, pairs * 1e-5)
    ahead = len(scheduler_output.copies.blocks_to_swap_ahead) * 1000 / 1e6
    assert timings.forward == pytest.approx(max(forward, ahead)), "copies ahead run beside the forward pass"
    within = len(scheduler_output.copies.blocks_to_copy)
    assert timings.swap == pytest.approx(scheduler_output.num_swapped_blocks * 1000 / 1e6 + within * 2 * 4 * 1e-4)
    assert timings.sample == pytest.approx(1e-3 * sum(len(chunk.sample_requests) for chunk in scheduler_output.chunks))
    assert slept == pytest.approx([timings.swap + timings.forward + timings.sample + 0.002])


def test_jitter_stays_in_its_bounds_and_comes_from_the_seed() -> None:
    steps = [make_step(step, [KnownChunk(0, [1], 0, [1])]) for step in range(200)]
    exact, shaken = LATENCY, LatencyModel(**{**vars_of(LATENCY), "jitter": 0.2})

    def seconds(seed: int, latency: LatencyModel) -> list[float]:
        run, slept = executor(seed, latency)
        for one in steps:
            run.execute_model(one)
        return slept

    (always,) = set(seconds(0, exact))
    first = seconds(0, shaken)
    assert first == seconds(0, shaken) != seconds(1, shaken)
    assert all(0.8 * always <= each <= 1.2 * always for each in first)
    assert min(first) < 0.85 * always
    assert max(first) > 1.15 * always


def vars_of(latency: LatencyModel) -> dict[str, float]:
    return {name: getattr(latency, name) for name in latency.__slots__}


@pytest.mark.parametrize(
    ("name", "value"), [("tokens_per_second", 0), ("bytes_per_second", -1), ("jitter", 1), ("draw_seconds", -1e-9)]
)
def test_a_latency_that_makes_no_sense_is_refused_with_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        LatencyModel(**{**vars_of(LATENCY), name: value})
