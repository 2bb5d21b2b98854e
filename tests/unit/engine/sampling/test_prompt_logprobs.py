"""Prompts' log-probabilities: every target's, exact, and never more rows of logits at once than a piece has."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.step import ModelOutput
from quire_engine.sampling.sample_ops import MAX_ROWS, MAX_VALUES, max_rows_at_once, stable_topk
from quire_engine.sampling.sampler import compute_prompt_logprobs
from quire_proto.errors import ErrorCode

from tests.support.sampling_inputs import make_sample_request, some_logits, some_tokens
from tests.support.steps import KnownChunk

VOCAB = 30


def chunk(id: int, count: int, num_targets: int, num_top: int = 0) -> KnownChunk:
    tokens = some_tokens(count + 1, VOCAB, seed=id)
    return KnownChunk(
        id, tokens[:count], 0, [], prompt_logprob_targets=tokens[1 : num_targets + 1], num_prompt_logprobs=num_top
    )


def scored(chunks: list[KnownChunk], logits: torch.Tensor) -> tuple[ModelOutput, list[int]]:
    """The result, and how many rows of ``logits`` were asked for at a time. Each chunk's rows follow the last one's."""
    model_output, asked, rows, start = ModelOutput(), [], [], 0
    for one in chunks:
        rows += range(start, start + len(one.prompt_logprob_targets))
        start += len(one.token_ids)

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        asked.append(len(part))
        return logits[part]

    compute_prompt_logprobs(
        [one for one in chunks if one.prompt_logprob_targets],
        torch.tensor(rows),
        logits.shape[1],
        logits_of,
        model_output,
    )
    return model_output, asked


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90), st.integers(0, 5)), min_size=1, max_size=12))
def test_each_target_has_the_logprob_that_the_row_before_it_gives(shapes: list[tuple[int, int, int]]) -> None:
    chunks = [chunk(id, count, min(count, targets), top) for id, (count, targets, top) in enumerate(shapes)]
    logits = some_logits(sum(len(one.token_ids) for one in chunks), VOCAB).round()
    model_output, asked = scored(chunks, logits)
    assert all(count <= MAX_ROWS for count in asked)
    assert sum(asked) == sum(len(one.prompt_logprob_targets) for one in chunks)
    start = 0
    for one in chunks:
        expected = logits[start : start + len(one.prompt_logprob_targets)].log_softmax(-1).tolist()
        start += len(one.token_ids)
        assert (one.sequence_id in model_output.prompt_logprobs) == bool(one.prompt_logprob_targets)
        for made, target, row in zip(
            model_output.prompt_logprobs.get(one.sequence_id, []), one.prompt_logprob_targets, expected, strict=True
        ):
            ranked = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))[: one.num_prompt_logprobs]
            assert (made.logprob, made.top) == (row[target], tuple(ranked))


@pytest.mark.parametrize("vocab_size", [1, 100, 32_000, 151_936, 1 << 20, 1 << 30])
def test_a_piece_is_bounded_in_rows_and_in_numbers(vocab_size: int) -> None:
    assert 1 <= max_rows_at_once(vocab_size) <= MAX_ROWS
    assert max_rows_at_once(vocab_size) == 1 or max_rows_at_once(vocab_size) * vocab_size <= MAX_VALUES


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prompt_whose_logits_are_not_finite_ends_alone_with_all_that_is_drawn_from_it(bad: float) -> None:
    chunks = [chunk(0, 4, 4, 2), chunk(1, 4, 4, 2), chunk(2, 4, 4, 2)]
    chunks[1].sample_requests = (make_sample_request(1, [1]), make_sample_request(7, [1]))
    logits = some_logits(12, VOCAB)
    expected = scored(chunks, logits)[0].prompt_logprobs
    logits[6, 3] = bad
    model_output = scored(chunks, logits)[0]
    assert {id: error.code for id, error in model_output.errors.items()} == {
        1: ErrorCode.INTERNAL,
        7: ErrorCode.INTERNAL,
    }
    assert model_output.prompt_logprobs == {0: expected[0], 2: expected[2]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 2) | st.just(-math.inf), min_size=1, max_size=30), st.integers(1, 32))
def test_the_best_are_in_one_certain_order(levels: list[float], count: int) -> None:
    values, ids = stable_topk(torch.tensor([levels, levels[::-1]], dtype=torch.float32), count)
    for row, scores in enumerate((levels, levels[::-1])):
        ranked = sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))[:count]
        assert values[row].tolist() == [score for _, score in ranked]
        finite = [token_id for token_id, score in ranked if score > -math.inf]
        assert ids[row].tolist()[: len(finite)] == finite
