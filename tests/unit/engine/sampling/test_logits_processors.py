"""Each logits processor does what transformers' own does, or the formula, bit for bit; so do all of them in turn."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.sampling.grammar_bitmask import NO_GRAMMARS
from quire_engine.sampling.logits_processors import apply_logits_processors
from quire_engine.sampling.metadata import gumbel_noise
from quire_proto.sampling import SamplingParams
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.sampling_inputs import (
    KeepingSampler,
    ModuloGrammar,
    Output,
    make_output,
    row_keys,
    run_step,
    some_logits,
    some_tokens,
)

VOCAB = 50
tokens = st.integers(0, VOCAB - 1)
histories = st.lists(tokens, max_size=30)
penalties = st.floats(-2, 2)


def processed(logits: torch.Tensor, outputs: Sequence[Output]) -> torch.Tensor:
    scores = logits.clone()
    apply_logits_processors(scores, KeepingSampler(logits.shape[1]).draws(outputs), NO_GRAMMARS)
    return scores


def ids(history: Sequence[int]) -> torch.Tensor:
    return torch.tensor([history], dtype=torch.int64)


# One by one


@settings(deadline=None)
@given(histories, histories, st.floats(0.01, 10), st.integers(0, 99))
def test_repetition_penalty_is_transformers_own(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    logits = some_logits(1, VOCAB, seed)
    expected = RepetitionPenaltyLogitsProcessor(float(penalty))(ids(prompt + output), logits)
    assert torch.equal(processed(logits, [make_output(0, prompt, output, repetition_penalty=penalty)]), expected)


@settings(deadline=None)
@given(histories, histories, penalties, penalties, st.integers(0, 99))
def test_frequency_and_presence_penalties_are_the_formula(
    prompt: list[int], output: list[int], frequency: float, presence: float, seed: int
) -> None:
    logits = some_logits(1, VOCAB, seed)
    counts = Counter(output)
    expected = logits[0].numpy().copy()
    for token_id, count in counts.items():
        expected[token_id] -= np.float32(frequency) * np.float32(count)
        expected[token_id] -= np.float32(presence)
    output = make_output(0, prompt, output, frequency_penalty=frequency, presence_penalty=presence)
    assert torch.equal(processed(logits, [output])[0], torch.from_numpy(expected))


@settings(deadline=None)
@given(st.dictionaries(tokens, st.floats(-100, 100), min_size=1), st.integers(0, 99))
def test_logit_bias_is_transformers_own(bias: dict[int, float], seed: int) -> None:
    logits = some_logits(1, VOCAB, seed)
    expected = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])(ids([]), logits)
    assert torch.equal(processed(logits, [make_output(0, [1], logit_bias=tuple(bias.items()))]), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bad_words_are_transformers_own_within_the_output(data: st.DataObject) -> None:
    few = st.integers(0, 3)
    words = data.draw(st.lists(st.lists(few, min_size=1, max_size=4), min_size=1, max_size=8))
    prompt, output = data.draw(st.lists(few, max_size=5)), data.draw(st.lists(few, max_size=9))
    logits = some_logits(1, VOCAB)
    expected = NoBadWordsLogitsProcessor(words)(ids(output), logits)
    assert torch.equal(
        processed(logits, [make_output(0, prompt, output, bad_words=tuple(map(tuple, words)))]), expected
    )


@settings(deadline=None)
@given(histories, st.lists(tokens, max_size=5), st.integers(0, 6), st.frozensets(tokens, min_size=1, max_size=5))
def test_min_tokens_is_transformers_own(
    prompt: list[int], output: list[int], min_tokens: int, stops: frozenset[int]
) -> None:
    logits = some_logits(1, VOCAB)
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, sorted(stops))
    drawn = make_output(0, prompt, output, min_tokens=min_tokens, stop_token_ids=stops)
    assert torch.equal(processed(logits, [drawn]), reference(ids(prompt + output), logits))


def test_a_bias_meets_the_penalties_before_they_do_anything() -> None:
    output = make_output(0, [3], [3], logit_bias=((3, -8.0),), repetition_penalty=2.0, frequency_penalty=1.0)
    assert processed(torch.full((1, VOCAB), 5.0), [output])[0, 3] == (5 - 8) * 2 - 1


def test_tokens_outside_of_the_vocabulary_are_passed_over() -> None:
    outside = {"logit_bias": ((VOCAB, 5.0),), "bad_words": ((VOCAB,), (7, VOCAB)), "min_tokens": 9}
    output = make_output(0, [1], [7], stop_token_ids=frozenset((VOCAB, 10**6)), **outside)
    logits = some_logits(1, VOCAB)
    assert torch.equal(processed(logits, [output]), logits)


@settings(deadline=None)
@given(st.floats(1e-320, 10, exclude_min=True), st.sampled_from([3e38, -3e38, 1e-40, 0.0, -0.0, 1.0]))
def test_no_repetition_penalty_makes_a_score_infinite_or_nan(penalty: float, logit: float) -> None:
    output = make_output(0, [4], repetition_penalty=penalty)
    assert processed(torch.full((1, VOCAB), logit), [output]).isfinite().all()


def test_counts_outgrow_their_first_memory() -> None:
    output = [token_id for token_id in range(VOCAB) for _ in range(1 + token_id % 3)]
    output = make_output(0, [1], output, frequency_penalty=1.0)
    scores = processed(torch.zeros(1, VOCAB), [output])
    assert scores[0].tolist() == [-1.0 - token_id % 3 for token_id in range(VOCAB)]


# All of them in turn

STYLES = {
    "plain": {"temperature": 1.0},
    "top k": {"temperature": 0.7, "top_k": 9},
    "top p": {"temperature": 1.3, "top_p": 0.8},
    "min p": {"temperature": 0.9, "min_p": 0.2},
    "filters": {"temperature": 1.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "greedy": {"temperature": 0.0, "top_k": 3},
}
CHANGES = {
    "logit_bias": tuple((token_id, 5.0 - token_id) for token_id in range(0, VOCAB, 5)),
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "bad_words": ((4,), (7, 8), (7, 9), (1, 7, 10)),
    "min_tokens": 12,
}
PROMPT, OUTPUT = some_tokens(20, VOCAB, seed=1), [*some_tokens(8, VOCAB, seed=2), 1, 7]
STOPS = frozenset((2, 30, 31))


def reference_scores(logits: torch.Tensor, style: dict[str, float], grammar: ModuloGrammar | None) -> torch.Tensor:
    """Row by row through transformers' processors, and ours by their formulas where it has none."""
    biases = [[[token_id], value] for token_id, value in CHANGES["logit_bias"]]
    known = ids(PROMPT + OUTPUT).expand(len(logits), -1)
    scores = SequenceBiasLogitsProcessor(biases)(known, logits)
    scores = RepetitionPenaltyLogitsProcessor(CHANGES["repetition_penalty"])(known, scores)
    for token_id, count in Counter(OUTPUT).items():
        scores[:, token_id] -= np.float32(CHANGES["frequency_penalty"]) * np.float32(count)
        scores[:, token_id] -= np.float32(CHANGES["presence_penalty"])
    scores = NoBadWordsLogitsProcessor([list(word) for word in CHANGES["bad_words"]])(known, scores)
    scores = MinNewTokensLengthLogitsProcessor(len(PROMPT), CHANGES["min_tokens"], sorted(STOPS))(known, scores)
    if grammar is not None:
        forbidden = [token_id for token_id in range(VOCAB) if not grammar.allows(OUTPUT, token_id)]
        scores[:, forbidden] = -torch.inf
    return LogitsProcessorList(warpers(style))(known, scores)


def warpers(style: dict[str, float]) -> list[object]:
    makers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    return [make(style[name]) for name, make in makers.items() if style.get(name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("style", STYLES)
def test_a_draw_with_everything_on_is_the_draw_from_transformers_scores(
    style: str, with_grammar: bool, dtype: torch.dtype
) -> None:
    count, grammar = 60, ModuloGrammar(vocab_size=VOCAB) if with_grammar else None
    logits = some_logits(count, VOCAB, seed=5).to(dtype)
    wanted = {"stop_token_ids": STOPS, "grammar": grammar} | CHANGES | STYLES[style]
    outputs = [make_output(row, PROMPT, OUTPUT, seed=row << 33, **wanted) for row in range(count)]
    made = run_step(KeepingSampler(VOCAB), outputs, logits)
    scores = reference_scores(logits.float(), STYLES[style], grammar)
    if STYLES[style]["temperature"]:
        keys = row_keys([row << 33 for row in range(count)], [len(PROMPT) + len(OUTPUT)] * count)
        scores = scores + gumbel_noise(keys, torch.arange(VOCAB, dtype=torch.int32))
    assert list(made.token_ids.values()) == scores.argmax(-1).tolist()
    assert len(set(made.token_ids.values())) > 5


@pytest.mark.parametrize("style", ["plain", "filters"])
def test_a_draw_without_processors_is_the_draw_from_transformers_scores(style: str) -> None:
    count = 60
    logits = some_logits(count, VOCAB, seed=6)
    outputs = [make_output(row, PROMPT, seed=row, **STYLES[style]) for row in range(count)]
    keys = row_keys(range(count), [len(PROMPT)] * count)
    warped = LogitsProcessorList(warpers(STYLES[style]))(ids(PROMPT), logits)
    expected = (warped + gumbel_noise(keys, torch.arange(VOCAB, dtype=torch.int32))).argmax(-1)
    assert list(run_step(KeepingSampler(VOCAB), outputs, logits).token_ids.values()) == expected.tolist()


def test_the_draws_seed_counts_and_that_of_the_parameters_does_not() -> None:
    seeds = [(1, 5), (2, 5), (1, 6)]
    outputs = [
        make_output(row, [1], params=SamplingParams(seed=own), seed=seed) for row, (seed, own) in enumerate(seeds)
    ]
    made = run_step(KeepingSampler(1000), outputs, torch.zeros(3, 1000)).token_ids
    assert made[0] == made[2]
    assert made[0] != made[1]


def test_min_p_of_one_keeps_what_ties_with_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.999]])
    outputs = [make_output(row, [1], temperature=2.0, min_p=1.0, seed=row) for row in range(100)]
    assert set(run_step(KeepingSampler(4), outputs, logits.expand(100, -1)).token_ids.values()) == {1, 2}


def test_a_vanishing_min_p_leaves_everything_in() -> None:
    output = make_output(0, [1], temperature=1.0, min_p=math.ulp(0.0), seed=3)
    plain = make_output(1, [1], temperature=1.0, seed=3)
    made = run_step(KeepingSampler(3000), [output, plain], torch.zeros(2, 3000)).token_ids
    assert made[0] == made[1]
