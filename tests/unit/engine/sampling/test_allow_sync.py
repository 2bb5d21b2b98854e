"""Draws are enqueued on the device of the logits and not waited for, and are the same as those that are."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_engine.core.step import ModelOutput
from quire_engine.sampling.metadata import SamplingMetadata
from quire_engine.sampling.sample_ops import finite_rows, lowest_argmax, sample, stable_topk
from quire_engine.sampling.sampler import SamplerOutput
from quire_proto.sampling import MAX_SEED, SamplingParams

from tests.support.blocking_reads import WaitedError, no_waiting
from tests.support.sampling_inputs import (
    KeepingSampler,
    ModuloGrammar,
    Output,
    answers,
    make_output,
    run_step,
    some_logits,
    some_tokens,
)

VOCAB = 2500
STYLES: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.3, "top_k": 1100},
    {"temperature": 1.0, "top_k": VOCAB},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.9999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.5, "min_p": 0.001},
]
CHANGES: list[dict[str, object]] = [
    {},
    {},
    {"logit_bias": ((3, 9.0), (VOCAB - 1, -4.0))},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"bad_words": ((4,), (7, 8))},
    {"min_tokens": 50, "stop_token_ids": frozenset((2, 30))},
    {"grammar": ModuloGrammar(3, VOCAB)},
    {"min_tokens": 50, "stop_token_ids": frozenset(range(VOCAB))},
    {"grammar": ModuloGrammar(1, VOCAB)},
    {"grammar": ModuloGrammar(3, VOCAB, poison=7)},
]
TOLD: list[dict[str, object]] = [{}, {}, {"logprobs": 0}, {"logprobs": 3}, {"num_candidates": 4}]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Output], torch.Tensor]:
    """Draws of every kind, some of which must fail, and their logits, some of which tie or are not finite."""
    wanted = [
        draw(st.sampled_from(STYLES)) | draw(st.sampled_from(CHANGES)) | draw(st.sampled_from(TOLD))
        for _ in range(draw(st.integers(1, 7)))
    ]
    outputs = [
        make_output(id, some_tokens(9, VOCAB, id), [1, 7][: draw(st.integers(0, 2))], seed=id, **one)
        for id, one in enumerate(wanted)
    ]
    logits = some_logits(len(outputs), VOCAB, draw(st.integers(0, 99))) / draw(st.sampled_from([1, 3, 1000]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.integers(0, 3)) == 0:
        logits[draw(st.integers(0, len(outputs) - 1)), 11] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return outputs, logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def drawn(sampler: KeepingSampler, outputs: list[Output], logits: torch.Tensor) -> SamplerOutput:
    """Drawn while nothing is read."""
    with no_waiting():
        return sampler.sample(sampler.prepare_outputs(outputs), logits, range(len(outputs)))


def fields_of(model_output: ModelOutput) -> tuple[object, ...]:
    errors = {id: (error.code, error.message, error.param) for id, error in model_output.errors.items()}
    return model_output.token_ids, model_output.logprobs, model_output.candidates, errors


# What is enqueued


@settings(max_examples=30, deadline=None)
@given(batches())
def test_draws_wait_for_nothing_and_are_those_that_wait(batch: tuple[list[Output], torch.Tensor]) -> None:
    outputs, logits = batch
    sampler, waiting = KeepingSampler(VOCAB, allow_sync=False), KeepingSampler(VOCAB)
    one = drawn(sampler, outputs, logits)
    other = waiting.sample(waiting.prepare_outputs(outputs), logits, range(len(outputs)))
    made, expected = answers(one), answers(other)
    sampler.close()
    waiting.close()
    assert fields_of(made) == fields_of(expected)
    for token_ids in (one.token_ids, other.token_ids):
        assert token_ids.dtype == torch.int64
        assert token_ids.tolist() == [made.token_ids.get(output.id, 0) for output in outputs]


@settings(max_examples=30, deadline=None)
@given(batches())
def test_everything_that_a_draw_needs_is_on_the_device_of_the_logits(
    batch: tuple[list[Output], torch.Tensor],
) -> None:
    """The meta device has no numbers to read, and refuses tensors of other devices."""
    outputs, logits = batch
    sampler = KeepingSampler(VOCAB)
    one = sampler.sample(sampler.prepare_outputs(outputs), logits.to("meta"), range(len(outputs)))
    sampler.close()
    assert (one.token_ids.device.type, one.token_ids.shape) == ("meta", (len(outputs),))


def test_the_logits_may_be_overwritten_once_the_draws_are_enqueued() -> None:
    outputs = [
        make_output(0, [1], logprobs=2),
        make_output(1, [1], num_candidates=2),
        make_output(2, [1], top_p=0.9),
    ]
    logits, sampler = some_logits(3, VOCAB), KeepingSampler(VOCAB, allow_sync=False)
    expected = answers(sampler.sample(sampler.prepare_outputs(outputs), logits.clone(), range(3)))
    one = drawn(sampler, outputs, logits)
    logits.fill_(math.nan)
    assert fields_of(answers(one)) == fields_of(expected)


def test_tokens_are_in_the_order_of_the_draws_and_from_the_rows_they_name() -> None:
    styles = [{"num_candidates": 2}, {}, {"bad_words": ((5,),)}, {"temperature": 1.0, "top_k": 1}]
    outputs = [make_output(10 - id, [1], **style) for id, style in enumerate(styles)]
    logits = torch.zeros(3, 50)
    logits[0, 3], logits[1, 4], logits[2, 5], logits[2, 6] = 9, 9, 9, 8
    one = KeepingSampler(50, allow_sync=False)
    assert one.sample(one.prepare_outputs(outputs), logits, [0, 1, 2, 0]).token_ids.tolist() == [0, 4, 6, 3]


READS: list[Callable[[torch.Tensor], object]] = [
    lambda one: one[0].item(),
    lambda one: one.tolist(),
    lambda one: one.numpy(),
    lambda one: bool(one[0] > 0),
    lambda one: int(one[0]),
    lambda one: one.cpu(),
    lambda one: one.to("cpu"),
    lambda one: one.to(torch.device("cpu")),
    lambda one: one.nonzero(),
    lambda one: torch.where(one > 0),
    lambda one: one[one > 0],
    lambda one: one.masked_select(one > 0),
    lambda one: one.__setitem__(one > 0, torch.zeros(2)),
    lambda one: one.unique(),
    lambda one: torch.equal(one, one),
    lambda one: torch.tensor([1, 2]),
    lambda one: stable_topk(one[None], 2),
    lambda one: lowest_argmax(one[None]),
    lambda one: finite_rows(one[None]),
]


@pytest.mark.parametrize("read", READS)
def test_whatever_reads_is_found(read: Callable[[torch.Tensor], object]) -> None:
    values = torch.tensor([1.0, -1.0, 2.0])
    with no_waiting(), pytest.raises(WaitedError):
        read(values)


def test_what_a_draw_is_by_default_on_the_cpu_reads() -> None:
    sampler = KeepingSampler(VOCAB)
    with pytest.raises(WaitedError):
        drawn(sampler, [make_output(0, [1])], some_logits(1, VOCAB))


# The same, one by one


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-40, 0.5, 1.5]),
            top_k=st.sampled_from([0, 0, 1, 30, 1023, 1024, 1025, 2**31 - 1]),
            top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999999, 1.0, 1.0]),
            min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1, 5, 1024, 1025, 3000]),
    st.sampled_from([1.0, 30.0, 3000.0]),
    st.booleans(),
    st.integers(0, MAX_SEED - 9),
)
def test_no_row_is_drawn_otherwise_when_nothing_is_read(
    params: list[SamplingParams], vocab_size: int, flatness: float, ties: bool, seed: int
) -> None:
    logits = some_logits(len(params), vocab_size, seed % 100) / flatness
    if ties:
        logits = (logits * 3).round() / 3
    rows = SamplingMetadata.from_params(params, range(seed, seed + len(params)), range(len(params)))
    expected = sample(logits.clone(), rows)
    with no_waiting():
        made = sample(logits.clone(), rows, allow_sync=False)
    assert made.tolist() == expected.tolist()


@pytest.mark.parametrize("allow_sync", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_row_that_nothing_can_be_drawn_from_gets_a_valid_token(style: dict[str, object], allow_sync: bool) -> None:
    logits = some_logits(4, VOCAB)
    logits[0], logits[1, 5], logits[2, 5] = -math.inf, math.nan, math.inf
    rows = SamplingMetadata.from_params([SamplingParams(**style)] * 4, range(4), range(4))
    made = sample(logits.clone(), rows, allow_sync=allow_sync).tolist()
    assert all(0 <= token_id < VOCAB for token_id in made)
    assert made[3] == sample(logits[3:].clone(), rows.select(np.array([3]))).item()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-40, 1.5, 3e38]), min_size=6, max_size=6)),
    st.integers(1, 8),
)
def test_the_best_are_the_same_when_nothing_is_read(rows: list[list[float]], count: int) -> None:
    scores = torch.tensor(rows).reshape(-1, 6)
    expected = stable_topk(scores, count)
    with no_waiting():
        values, ids = stable_topk(scores, count, allow_sync=False)
    assert torch.equal(values, expected[0])
    assert torch.equal(values.signbit(), scores.gather(1, ids).signbit())
    known = values > -math.inf
    assert torch.equal(ids[known], expected[1][known])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([-3e38, -1.5, -1.0, -0.0, 0.0, 1.0, 1.5, 3e38]) | st.just(-math.inf), min_size=1).map(
        lambda row: [row, [-abs(one) for one in row], [min(one, 0.0) for one in row]]
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example([[-1.0, -0.0, 0.0]], torch.bfloat16)
def test_the_lowest_id_of_the_highest_is_found_in_every_dtype(rows: list[list[float]], dtype: torch.dtype) -> None:
    scores = torch.tensor(rows).to(dtype)
    assert lowest_argmax(scores).tolist() == [row.index(max(row)) for row in scores.tolist()]
    assert lowest_argmax(scores.t().contiguous().t()).tolist() == lowest_argmax(scores).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_that_is_not_finite_is_found_when_nothing_is_read(dtype: torch.dtype) -> None:
    logits = some_logits(5, 40)
    logits[1, 7], logits[2, 0], logits[3, 39], logits[4] = math.nan, math.inf, -math.inf, 3.3e38
    with no_waiting():
        finite = finite_rows(logits.to(dtype), allow_sync=False)
    assert finite.tolist() == [True, False, False, False, True]


# On a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_cuda_device_is_not_waited_for_and_draws_what_the_cpu_draws() -> None:
    changes = [one for one in CHANGES if "poison" not in str(one.get("grammar"))]
    wanted = [style | change | requested for style in STYLES for change in changes for requested in TOLD]
    outputs = [make_output(id, some_tokens(9, VOCAB, id), [1, 7], seed=id, **one) for id, one in enumerate(wanted)]
    logits, sampler = some_logits(len(outputs), VOCAB), KeepingSampler(VOCAB)
    on_device = logits.cuda()
    expected = run_step(sampler, outputs, logits)
    run_step(sampler, outputs, on_device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one = sampler.sample(sampler.prepare_outputs(outputs), on_device, range(len(outputs)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device.fill_(math.nan)
    made = answers(one)
    assert fields_of(made)[3] == fields_of(expected)[3]
    assert set(made.logprobs) == set(expected.logprobs)
    assert set(made.candidates) == set(expected.candidates)
    greedy = {output.id for output in outputs if output.params.greedy}
    assert all(made.token_ids[id] == token_id for id, token_id in expected.token_ids.items() if id in greedy)
    # Scores and noise have the same bits on both devices; what a logits processor computes may differ in the last one.
    alike = [made.token_ids[id] == token_id for id, token_id in expected.token_ids.items()]
    assert sum(alike) >= 0.98 * len(alike)
