"""Prompts' log-probabilities: every target's, exact, and never more rows of logits at once than a piece has."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.step import ModelOutput
from quire_engine.sampling.prompt_logprobs import PromptTargets, compute_prompt_logprobs
from quire_engine.sampling.sample_ops import MAX_ROWS, MAX_VALUES, max_rows_at_once, stable_topk
from quire_proto.errors import ErrorCode

from tests.support.sampling_inputs import some_logits, some_tokens

VOCAB = 30


def chunk(number: int, num_targets: int, num_top: int = 0) -> PromptTargets:
    return PromptTargets(number, some_tokens(num_targets, VOCAB, seed=number), num_top)


def scored(counts: list[int], chunks: list[PromptTargets], logits: torch.Tensor) -> tuple[ModelOutput, list[int]]:
    """The result, and how many rows of ``logits`` were asked for at a time. Each chunk, of so many tokens, has the rows
    behind those of the last one.
    """
    model_output, asked, rows, start = ModelOutput(), [], [], 0
    for count, one in zip(counts, chunks, strict=True):
        rows += range(start, start + len(one.token_ids))
        start += count

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        asked.append(len(part))
        return logits[part]

    with_targets = [one for one in chunks if one.token_ids]
    compute_prompt_logprobs(with_targets, torch.tensor(rows), logits.shape[1], logits_of, model_output)
    return model_output, asked


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90), st.integers(0, 5)), min_size=1, max_size=12))
def test_each_target_has_the_logprob_that_the_row_before_it_gives(shapes: list[tuple[int, int, int]]) -> None:
    counts = [count for count, _, _ in shapes]
    chunks = [chunk(number, min(count, targets), top) for number, (count, targets, top) in enumerate(shapes)]
    logits = some_logits(sum(counts), VOCAB).round()
    model_output, asked = scored(counts, chunks, logits)
    assert all(count <= MAX_ROWS for count in asked)
    assert sum(asked) == sum(len(one.token_ids) for one in chunks)
    start = 0
    for count, one in zip(counts, chunks, strict=True):
        expected = logits[start : start + len(one.token_ids)].log_softmax(-1).tolist()
        start += count
        made = model_output.prompt_logprobs.get(one.number, [])
        assert (one.number in model_output.prompt_logprobs) == bool(one.token_ids)
        for each, target, row in zip(made, one.token_ids, expected, strict=True):
            ranked = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))[: one.num_top]
            assert (each.logprob, each.top) == (row[target], tuple(ranked))


@pytest.mark.parametrize("vocab_size", [1, 100, 32_000, 151_936, 1 << 20, 1 << 30])
def test_a_piece_is_bounded_in_rows_and_in_numbers(vocab_size: int) -> None:
    assert 1 <= max_rows_at_once(vocab_size) <= MAX_ROWS
    assert max_rows_at_once(vocab_size) == 1 or max_rows_at_once(vocab_size) * vocab_size <= MAX_VALUES


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prompt_whose_logits_are_not_finite_ends_alone(bad: float) -> None:
    chunks = [chunk(number, 4, 2) for number in range(3)]
    logits = some_logits(12, VOCAB)
    expected = scored([4] * 3, chunks, logits)[0].prompt_logprobs
    logits[6, 3] = bad
    model_output = scored([4] * 3, chunks, logits)[0]
    assert {number: error.code for number, error in model_output.errors.items()} == {1: ErrorCode.INTERNAL}
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
