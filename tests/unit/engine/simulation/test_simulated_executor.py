"""The simulated executor answers what a model would have to, and takes the time that the formula says."""

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
def sample_requests(draw: st.DrawFn, num_prompt_tokens: int) -> SampleRequest:
    """How an output is drawn, in any way."""
    logprobs = draw(st.sampled_from([None, 0, 3]))
    min_tokens = draw(st.integers(0, 3))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])), max_tokens=9, min_tokens=min_tokens, logprobs=logprobs
    )
    return SampleRequest(
        params,
        draw(st.integers(0, 5)),
        num_prompt_tokens,
        stop_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=10))),
        num_candidates=draw(st.sampled_from([0, 0, 1, 8])),
    )


@st.composite
def chunks(draw: st.DrawFn, sequence_id: int) -> KnownChunk:
    """A chunk somewhere in an output, which draws where it reaches the last known token."""
    known = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
    start = draw(st.integers(0, len(known) - 1))
    end = draw(st.integers(start + 1, len(known)))
    num_prompt = len(known) - draw(st.integers(0, min(3, len(known) - 1)))
    requests = tuple(draw(sample_requests(num_prompt)) for _ in range(draw(st.integers(1, 3))))
    return KnownChunk(
        *(sequence_id, known[start:end], start, list(range(1, 6)), requests),
        num_prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        known=known,
        num_draws=len(requests) if end == len(known) else 0,
    )


@st.composite
def scheduler_outputs(draw: st.DrawFn) -> SchedulerOutput:
    copies = st.lists(st.builds(BlockCopy, st.integers(1, 9), st.integers(0, 9)), max_size=3)
    return make_step(
        draw(st.integers(1, 100)),
        [draw(chunks(index)) for index in range(draw(st.integers(0, 4)))],
        draw(st.builds(BlockCopies, copies, copies, copies, copies)),
    )


def draws_of(scheduler_output: SchedulerOutput) -> list[tuple[SampleRequest, int]]:
    """How each draw of a step is made, and the tokens before it."""
    given = zip(scheduler_output.new, scheduler_output.chunks, strict=True)
    return [(request, chunk.end) for new, chunk in given for request in new.sample_requests[: chunk.num_draws]]


def targets_of(scheduler_output: SchedulerOutput) -> dict[int, int]:
    """How many tokens of the prompt are scored behind those of each chunk."""
    counts = {}
    for number, (new, chunk) in enumerate(zip(scheduler_output.new, scheduler_output.chunks, strict=True)):
        if new.num_prompt_logprobs is not None:
            counts[number] = min(chunk.end + 1, new.sample_requests[0].num_prompt_tokens) - chunk.start - 1
    return {number: count for number, count in counts.items() if count > 0}


@given(scheduler_outputs())
def test_every_draw_has_exactly_one_answer_and_every_target_a_score(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    asked = [request for request, _ in draws_of(scheduler_output)]
    assert len(model_output.token_ids) == len(asked)
    assert set(model_output.candidates) == {draw for draw, request in enumerate(asked) if request.num_candidates}
    scored = {draw for draw, each in enumerate(asked) if each.params.wants_logprobs and not each.num_candidates}
    assert set(model_output.logprobs) == scored
    assert not model_output.has_errors
    scores = model_output.prompt_logprobs.items()
    assert {number: len(each) for number, each in scores} == targets_of(scheduler_output)


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
    for number, scores in model_output.prompt_logprobs.items():
        asked = scheduler_output.new[number].num_prompt_logprobs
        assert all(len(score.top) == asked for score in scores)
    for draw, (request, _) in enumerate(draws_of(scheduler_output)):
        if request.num_candidates:
            assert len(model_output.candidates[draw].token_ids) == request.num_candidates
        elif request.params.logprobs:
            score = model_output.logprobs[draw]
            assert len(score.top) == request.params.logprobs
            assert score.top[0] == (model_output.token_ids[draw], score.logprob)


@given(scheduler_outputs())
def test_nothing_that_ends_a_sequence_is_drawn_before_min_tokens(scheduler_output: SchedulerOutput) -> None:
    model_output = executor()[0].execute_model(scheduler_output)
    for draw, (request, num_known) in enumerate(draws_of(scheduler_output)):
        drawn = model_output.candidates[draw].token_ids if request.num_candidates else [model_output.token_ids[draw]]
        if num_known - request.num_prompt_tokens < request.params.min_tokens:
            assert not request.stop_token_ids.intersection(drawn)


@given(scheduler_outputs())
def test_an_answer_depends_on_nothing_else_in_the_step(scheduler_output: SchedulerOutput) -> None:
    whole = executor()[0].execute_model(scheduler_output)
    apart = ModelOutput()
    for number, chunk in enumerate(scheduler_output.chunks):
        part = SchedulerOutput(scheduler_output.step + 1, new=[scheduler_output.new[number]])
        part.add_chunk(chunk)
        apart.add(executor()[0].execute_model(part), number)
    for name in ("token_ids", "logprobs", "candidates", "prompt_logprobs"):
        assert getattr(apart, name) == getattr(whole, name)


def test_tokens_differ_by_seed_and_position_and_greedy_ones_by_position_alone() -> None:
    def drawn(seed: int, draw_seed: int, temperature: float) -> list[int]:
        run = SimulatedExecutor(CAPACITY, LATENCY, seed=seed, sleep=lambda _: None).execute_model
        tokens = []
        for position in range(1, 9):
            request = SampleRequest(SamplingParams(temperature=temperature), draw_seed, 1)
            chunk = KnownChunk(0, [5], position - 1, [1, 2, 3], (request,), known=[5] * position)
            tokens += run(make_step(1, [chunk])).token_ids
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
    assert timings.sample == pytest.approx(1e-3 * len(draws_of(scheduler_output)))
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
