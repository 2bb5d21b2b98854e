"""Draws depend on logits, parameters, seed and position alone, and follow the distribution asked for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from quire_engine.sampling.metadata import (
    SamplingMetadata,
    gumbel_from_bits,
    gumbel_from_uniform,
    gumbel_noise,
    hash_tokens,
    noise_bound,
    uniform_from_bits,
)
from quire_engine.sampling.sample_ops import TopCandidates, finite_rows, sample, sampling_threshold
from quire_proto.sampling import MAX_SEED, SamplingParams

from tests.support.sampling_inputs import row_keys

seeds = st.integers(0, MAX_SEED)
positions = st.integers(0, 2**31 - 1)
token_ids = st.integers(0, 2**20)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 500, 1023, 1024, 1030, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.7, 1.0]),
    seed=seeds,
)


def draw(logits: torch.Tensor, params: list[SamplingParams], at: list[int]) -> list[int]:
    return sample(
        logits.float().clone(), SamplingMetadata.from_params(params, [one.seed for one in params], at)
    ).tolist()


def some_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


# The noise


def mixed(value: int) -> int:
    """MurmurHash3's 64-bit finaliser, in Python's integers."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> 33)) * factor % 2**64
    return value ^ (value >> 33)


def hashed(seed: int, position: int, token_id: int) -> int:
    """The documented hash, in Python's integers."""
    key = mixed(seed ^ mixed((position + 0x9E3779B97F4A7C15) % 2**64))
    x = (token_id * 0x9E3779B9) % 2**32 ^ (key % 2**32)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B + (key >> 32)) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


@settings(deadline=None)
@given(seeds, positions, token_ids)
def test_the_hash_is_the_documented_one(seed: int, position: int, token_id: int) -> None:
    bits = hash_tokens(row_keys([seed], [position]), torch.tensor([token_id], dtype=torch.int32))
    assert bits.item() % 2**32 == hashed(seed, position, token_id)


@settings(deadline=None)
@given(seeds, positions)
def test_every_bit_of_the_seed_changes_about_half_of_the_random_bits(seed: int, position: int) -> None:
    keys = row_keys([seed, *(seed ^ (1 << bit) for bit in range(64))], [position] * 65)
    bits = hash_tokens(keys, torch.arange(64, dtype=torch.int32)).numpy().view(np.uint32)
    changed = np.unpackbits((bits[1:] ^ bits[:1]).view(np.uint8), axis=1).mean(axis=1)
    assert (changed > 0.4).all()
    assert (changed < 0.6).all()


@settings(deadline=None)
@given(seeds, st.integers(0, 2**31 - 2))
def test_the_next_position_has_other_noise(seed: int, position: int) -> None:
    noise = gumbel_noise(row_keys([seed, seed], [position, position + 1]), torch.arange(100, dtype=torch.int32))
    assert (noise[0] != noise[1]).sum() > 90


def test_noise_is_finite_for_any_bits() -> None:
    extremes = [0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 2, 2**30, *range(-70, 70)]
    assert gumbel_from_bits(torch.tensor(extremes, dtype=torch.int32)).isfinite().all()


@settings(deadline=None)
@given(seeds, positions)
def test_the_bound_of_the_noise_holds_and_is_close_where_noise_is_large(seed: int, position: int) -> None:
    edges = torch.tensor([0, 1, 2, 2**23, 2**30, 2**31 - 1], dtype=torch.int32)
    bits = torch.cat([hash_tokens(row_keys([seed], [position]), torch.arange(5000, dtype=torch.int32))[0], edges])
    uniform = uniform_from_bits(bits)
    noise, bound = gumbel_from_uniform(uniform), noise_bound(uniform)
    assert (bound > noise).all()
    assert (bound < noise + 0.08)[noise > 4].all()


def test_noise_has_the_mean_and_variance_of_a_gumbel_distribution() -> None:
    noise = gumbel_noise(row_keys(range(200), [5] * 200), torch.arange(1000, dtype=torch.int32)).double()
    assert abs(noise.mean() - 0.5772156649) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 70), seeds)
def test_noise_of_a_token_has_the_same_bits_wherever_it_is_computed(start: int, count: int, seed: int) -> None:
    everything = gumbel_noise(row_keys([1, seed], [3, 4]), torch.arange(6000, dtype=torch.int32))
    part = gumbel_noise(row_keys([seed], [4]), torch.arange(start, start + count, dtype=torch.int32))
    assert torch.equal(part[0], everything[1, start : start + count])


# Greedy


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16]))
def test_greedy_takes_the_lowest_id_among_the_highest_logits(
    count: int, vocab_size: int, seed: int, dtype: torch.dtype
) -> None:
    logits = some_logits(count, vocab_size, seed).round().to(dtype)
    drawn = draw(logits, [SamplingParams(temperature=0)] * count, [0] * count)
    assert drawn == [row.index(max(row)) for row in logits.tolist()]


@settings(deadline=None)
@given(st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16]))
def test_top_k_of_one_is_greedy_where_there_is_no_tie(seed: int, dtype: torch.dtype) -> None:
    logits = torch.randperm(200, generator=torch.Generator().manual_seed(seed))[None].to(dtype)
    one = SamplingParams(temperature=2.0, top_k=1, seed=seed)
    assert draw(logits, [one], [7]) == draw(logits, [SamplingParams(temperature=0)], [7])


# What a draw depends on


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([1, 5, 300, 1024, 1025, 3000]), st.booleans())
def test_a_row_is_drawn_alike_alone_and_in_any_batch(data: st.DataObject, vocab_size: int, ties: bool) -> None:
    batch = data.draw(st.lists(params, min_size=1, max_size=9))
    at = data.draw(st.lists(positions, min_size=len(batch), max_size=len(batch)))
    logits = some_logits(len(batch), vocab_size, data.draw(st.integers(0, 99)))
    if ties:
        logits = (logits / 3).round()
    if data.draw(st.booleans()):
        logits[:, data.draw(st.integers(1, vocab_size)) :] = -math.inf
    alone = [draw(logits[row : row + 1], [one], [at[row]])[0] for row, one in enumerate(batch)]
    order = data.draw(st.permutations(range(len(batch))))
    together = draw(logits[order], [batch[row] for row in order], [at[row] for row in order])
    assert together == [alone[row] for row in order]


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(3, 10_000)
    drawn = draw(logits, [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=1)], [5, 5, 6])
    assert len(set(drawn)) == 3


# The distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (5, 0.9, 0.0), (0, 1.0, 0.3)]
)
def test_frequencies_over_many_seeds_are_those_of_softmax(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits, count = torch.tensor([1.0, 0.2, -1.0, 2.0, 0.9, -3.0, 1.5, 0.0]), 20_000
    wanted = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    batch = [SamplingParams(seed=seed, **wanted) for seed in range(count)]
    drawn = torch.tensor(draw(logits.expand(count, -1), batch, [11] * count))
    kept = support(logits.tolist(), temperature, top_k, top_p, min_p)
    weights = [math.exp(logit / temperature) if token in kept else 0.0 for token, logit in enumerate(logits.tolist())]
    expected = torch.tensor(weights) / sum(weights)
    frequencies = drawn.bincount(minlength=len(weights)) / count
    assert ((frequencies - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_successive_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.tensor([0.0, 1.0]).log_softmax(0)
    drawn = torch.tensor(draw(logits.expand(20_000, -1), [SamplingParams(seed=9)] * 20_000, list(range(20_000))))
    probability = math.e / (1 + math.e)
    assert abs(drawn.double().mean() - probability) < 0.02
    assert abs((drawn[1:] * drawn[:-1]).double().mean() - probability**2) < 0.02


# Top-k, top-p and min-p


def support(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that top-k, top-p and min-p keep, by the definition: ties are kept or left out together."""
    kth = sorted(logits, reverse=True)[top_k - 1] if 0 < top_k < len(logits) else -math.inf
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits) if logit >= kth}
    total = sum(weights.values())
    above = {token: sum(other for other in weights.values() if other > weight) for token, weight in weights.items()}
    nucleus = {token for token, mass in above.items() if top_p >= 1 or mass / total < top_p}
    return {token for token in nucleus if weights[token] >= min_p * max(weights.values())}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-12, 12).map(lambda level: level / 4), min_size=1, max_size=12),
    st.integers(0, 14),
    st.floats(0.01, 0.99) | st.just(1.0),
    st.floats(0.01, 0.99) | st.just(0.0),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(1, 12),
)
@example([0, -0.25, -0.5] + [-0.75] * 9, 10, 0.3, 0.75, 1.0, 3)
def test_the_filters_keep_the_tokens_of_their_definition(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, width: int
) -> None:
    expected = support(logits, temperature, top_k, top_p, min_p)
    # Where a border lies within rounding of top_p or min_p, it may fall on either side.
    assume(all(support(logits, temperature, top_k, top_p + shift, min_p) == expected for shift in (-1e-6, 1e-6)))
    assume(
        all(support(logits, temperature, top_k, top_p, min_p * factor) == expected for factor in (1 - 1e-6, 1 + 1e-6))
    )
    scores = (torch.tensor([logits]) - max(logits)) / temperature
    floor = torch.tensor([math.log(min_p) if min_p else -math.inf])
    limits = torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), floor
    for top in (
        TopCandidates.from_scores(scores, len(logits)),
        TopCandidates.from_scores(scores, min(width, len(logits))),
    ):
        lowest, known = sampling_threshold(scores, top, *limits)
        if known.item():
            assert set((scores >= lowest)[0].nonzero().flatten().tolist()) == expected
    assert known.item() or len(expected) >= width or width < top_k < len(logits)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.7), (6, 0.5), (1500, 1.0), (0, 0.97)])
def test_samples_are_among_the_kept_tokens_and_reach_all_of_them(top_k: int, top_p: float) -> None:
    logits = torch.cat([torch.tensor([3.0, 2.0, 2.0, 1.0, 0.5]), torch.full((1995,), -5.0)])
    logits[1500:] -= 30
    count = 1000
    batch = [SamplingParams(top_k=top_k, top_p=top_p, seed=seed) for seed in range(count)]
    drawn = set(draw(logits.expand(count, -1), batch, [0] * count))
    kept = support(logits.tolist(), 1.0, top_k, top_p, 0)
    assert drawn <= kept
    assert len(drawn) == len(kept) or len(kept) > 20


def test_all_tokens_that_tie_with_the_last_of_top_k_are_kept() -> None:
    batch = [SamplingParams(top_k=5, seed=seed) for seed in range(1000)]
    logits = torch.zeros(2000)
    logits[1500:] = -0.1
    drawn = set(draw(logits.expand(1000, -1), batch, [0] * 1000))
    assert max(drawn) < 1500
    assert len(drawn) > 600


def test_a_flat_row_keeps_more_tokens_than_the_narrow_look_holds() -> None:
    batch = [SamplingParams(top_p=0.9, seed=seed) for seed in range(100)]
    drawn = draw(torch.linspace(0, 0.001, 8000).expand(100, -1), batch, [0] * 100)
    assert min(drawn) < 2000
    assert min(drawn) >= 790
    assert max(drawn) > 7000


# Numbers that are not finite


@settings(deadline=None)
@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 4), st.integers(0, 39))
def test_a_row_with_one_number_that_is_not_finite_is_found(bad: float, row: int, token_id: int) -> None:
    logits = some_logits(5, 40)
    assert finite_rows(logits).all()
    logits[row, token_id] = bad
    assert finite_rows(logits).tolist() == [other != row for other in range(5)]


def test_logits_whose_sum_overflows_are_finite_all_the_same() -> None:
    logits = torch.full((1, 10), 3e38)
    logits[0, 4] = 3.3e38
    assert finite_rows(logits).tolist() == [True]
    assert draw(logits, [SamplingParams(temperature=0)], [0]) == [4]


@settings(deadline=None)
@given(st.data(), st.sampled_from([2, 40, 1024, 3000]))
def test_a_token_without_probability_is_never_drawn(data: st.DataObject, vocab_size: int) -> None:
    logits = some_logits(4, vocab_size)
    logits[:, torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[1:]] = -math.inf
    batch, at = data.draw(st.lists(params, min_size=4, max_size=4)), [1, 2, 3, 4]
    assert draw(logits, batch, at) == logits.argmax(-1).tolist()


def test_an_empty_batch_draws_nothing() -> None:
    assert draw(torch.empty(0, 10), [], []) == []
