"""Samples one token per row with the Gumbel-max trick and stateless noise.

argmax(score + Gumbel noise) is a draw from softmax(score) (Gumbel 1954; Maddison et al. 2014). Here

    score = (logit - highest logit of the row) / temperature, of the tokens that top-k, top-p and min-p keep,

and the noise is ``metadata.gumbel_noise``, a function of seed, position and token id. Greedy is the same argmax without
noise. Among equal scores the lowest token id wins. A row's draw depends only on its own logits and parameters, not on
the rest of the batch.

Filters first look at the 1,024 highest scores, and only those get noise. A row that keeps more gets noise for all
tokens, and is sorted whole unless its threshold is known already. Only the device knows which rows these are. If the
host must not wait for it, every row gets noise for all tokens, and rows with a top-p without a top-k, or with a top-k
above 1,024, are sorted whole. That is more work for the same draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quire_proto.sampling import TokenLogprobs

from quire_engine.device.accelerator import upload_arrays
from quire_engine.sampling.exact_math import weights
from quire_engine.sampling.metadata import (
    BoolArray,
    DeviceSamplingMetadata,
    SamplingMetadata,
    TokenArray,
    gumbel_from_uniform,
    gumbel_noise,
    hash_tokens,
    noise_bound,
    uniform_from_bits,
)
from quire_engine.sampling.sample_kernel import run_sample_kernel

# Top-k, top-p and min-p: the lowest score that a row keeps.
#
# All three are rules about values, not about positions in a sorted list. Top-k keeps tokens that score at least as high
# as the k-th. Top-p (nucleus sampling, Holtzman et al. 2019) keeps tokens with less than ``top_p`` of the mass strictly
# above them, counted among the tokens that top-k kept. Min-p (Nguyen et al. 2024) keeps tokens at least ``min_p`` times
# as probable as the most probable one. Equal scores are kept or dropped together, so the order that a sort leaves them
# in, or the width that it covered, cannot change a draw.


@dataclass(frozen=True, slots=True)
class TopCandidates:
    """The highest scores of each row in descending order, and their token ids, both [R, W]."""

    scores: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def from_scores(cls, scores: torch.Tensor, width: int) -> "TopCandidates":
        """Returns the ``width`` highest of ``scores`` [R, V]. Which of several equal scores it returns is undefined."""
        if width >= scores.shape[1]:
            return cls(*scores.sort(dim=-1, descending=True))
        return cls(*scores.topk(width, dim=-1))


def sampling_threshold(
    scores: torch.Tensor,
    top: TopCandidates,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    *,
    has_top_p: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the lowest score that each row keeps, [R, 1], and whether ``top`` was wide enough to know it, [R].

    ``scores`` [R, V] are finite or -inf, relative to the row's highest, which is 0. ``top_k`` is [R] int64, 0 for all
    tokens; ``top_p`` [R] float64; ``log_min_p`` [R] float32, the logarithm of min-p. A ``top`` that holds every score
    above -inf is always wide enough. Without ``has_top_p`` every ``top_p`` must be 1 and is ignored.
    """
    vocab_size, width = scores.shape[1], top.scores.shape[1]
    last = top.scores[:, -1]
    unlimited = (top_k == 0) | (top_k >= vocab_size)
    kth = top.scores.gather(1, top_k.clamp(1, width)[:, None] - 1).masked_fill(unlimited[:, None], -torch.inf)
    nucleus, reached = _top_p_threshold(scores, kth, top, top_p) if has_top_p else (log_min_p[:, None], top_p >= 1)
    above = log_min_p >= last
    # Top-p counts the mass that top-k kept, so min-p makes top-k's threshold irrelevant only without top-p.
    kth_known = unlimited | (top_k <= width) | (above & (top_p >= 1))
    known = kth_known & (reached | above | (kth.squeeze(1) >= last))
    lowest = torch.maximum(torch.maximum(kth, nucleus), log_min_p[:, None])
    return lowest, known | (last == -torch.inf) | (width == vocab_size)


def _top_p_threshold(
    scores: torch.Tensor, kth: torch.Tensor, top: TopCandidates, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the lowest score [R, 1] in the nucleus of the scores not below ``kth``, and whether the nucleus ends
    within ``top``, [R].
    """
    everything = top_p >= 1
    need = (_total_weight(scores, kth).double() * top_p).ceil_().long()
    mass = weights(top.scores).cumsum_(-1)
    kept = 1 + (mass[:, :-1] < need[:, None]).sum(-1, keepdim=True)
    lowest = top.scores.gather(1, kept - 1).masked_fill(everything[:, None], -torch.inf)
    return lowest, everything | (mass[:, -1] >= need)


def _total_weight(scores: torch.Tensor, kth: torch.Tensor) -> torch.Tensor:
    """Returns the total weight of each row's scores that are not below ``kth``, [R] int64."""
    width = max(1, (NOISE_TOKENS if scores.device.type == "cpu" else DEVICE_NOISE_TOKENS) // max(1, len(scores)))
    total = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    for part in scores.split(width, dim=1):
        total += weights(part.masked_fill(part < kth, -torch.inf)).sum(-1)
    return total


# The most probable token of each row, or the lowest id among equals: the whole cost of a greedy draw.


def lowest_argmax(scores: torch.Tensor, *, allow_sync: bool = True) -> torch.Tensor:
    """Returns the lowest token id with the highest of ``scores`` [R, V], any float dtype: [R] int64 on their device. A
    row with a NaN gets any valid id.

    On the CPU with ``allow_sync`` it uses the compiled kernel, or else numpy, which compares a vector of scores at a
    time where torch compares one score.
    """
    if not allow_sync or scores.device.type != "cpu" or not scores.numel():
        return scores.max(-1).indices
    ids = torch.empty(len(scores), dtype=torch.int64)
    if scan_rows(scores, places=ids):
        return ids
    if scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))
    if scores.dtype == torch.bfloat16:
        return torch.from_numpy(_bfloat16_argmax(scores))
    return scores.max(-1).indices


def scan_rows(rows: torch.Tensor, *, places: torch.Tensor | None = None, finite: torch.Tensor | None = None) -> bool:
    """Scans each of ``rows`` [R, V]. Writes the lowest index of the row's highest value into ``places`` [R] int64 (any
    index for a row with a NaN), and whether all its values are finite into ``finite`` [R] bool. Returns False, and
    writes nothing, if no kernel supports ``rows``.
    """
    return run_sample_kernel(rows, places=places, finite=finite)


def _bfloat16_argmax(scores: torch.Tensor) -> TokenArray:
    """Compares bit patterns as integers. Positive numbers have the same order as their bits and lie above negative
    ones, whose order is reversed.
    """
    bits = scores.view(torch.int16).numpy()
    ids: TokenArray = bits.argmax(-1)
    highest = bits[np.arange(len(bits)), ids]
    negative, zero = np.flatnonzero(highest < 0), np.flatnonzero(highest == 0)
    if len(negative):
        ids[negative] = bits[negative].argmin(-1)
    if len(zero):  # 0 and -0 are equal but have different bits
        ids[zero] = scores[torch.from_numpy(zero)].max(-1).indices.numpy()
    return ids


TOP_WIDTH = 1024
# How many tokens get noise at a time. A dozen passes over them stay in a processor's cache. On other devices a pass
# costs a launch, and the number only bounds their memory.
NOISE_TOKENS, DEVICE_NOISE_TOKENS = 1 << 16, 1 << 22
# Dividing by less would overflow even for adjacent float32 logits. Such a row is greedy up to exact ties.
MIN_TEMPERATURE = 1e-30

_SampleFunction = Callable[[torch.Tensor, SamplingMetadata, bool], torch.Tensor]


def sample(logits: torch.Tensor, rows: SamplingMetadata, *, allow_sync: bool = True) -> torch.Tensor:
    """Returns sampled token ids [B] int64 on the device of ``logits``. Overwrites ``logits`` [B, V] float32.

    Logits must be finite or -inf (never drawn), with at least one finite value per row; any other row gets any valid
    id. Without ``allow_sync`` nothing is read from the device. That does not change the ids.
    """
    methods = _sampling_methods(rows, logits.shape[1])
    if len(methods) == 1:
        return methods[0][0](logits, rows, allow_sync)
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    indices = upload_arrays([selected for _, selected in methods], logits.device)
    for (method, selected), index in zip(methods, indices, strict=True):
        token_ids.index_copy_(0, index, method(logits.index_select(0, index), rows.select(selected), allow_sync))
    return token_ids


def finite_rows(logits: torch.Tensor, *, allow_sync: bool = True) -> torch.Tensor:
    """Returns which rows are entirely finite, [B] bool. Without the compiled kernel it sums first: a finite sum proves
    it at a fraction of the cost, but must be read from the device.
    """
    if not allow_sync:
        return torch.stack(torch.aminmax(logits, dim=-1)).isfinite().all(0)
    finite = torch.empty(len(logits), dtype=torch.bool)
    if scan_rows(logits, finite=finite):
        return finite
    finite = logits.sum(-1).isfinite()
    return finite if bool(finite.all()) else logits.isfinite().all(-1)


def _sampling_methods(rows: SamplingMetadata, vocab_size: int) -> list[tuple[_SampleFunction, TokenArray]]:
    """Returns the functions that sample the rows, each with the indices of its rows."""
    greedy, filtered = rows.is_greedy(), rows.is_filtered(vocab_size)
    has_threshold = rows.has_threshold_within(TOP_WIDTH, vocab_size)
    methods: list[tuple[_SampleFunction, BoolArray]] = [
        (_sample_greedy, greedy),
        (_sample_unfiltered, ~greedy & ~filtered),
        (_sample_filtered, ~greedy & filtered & has_threshold),
        (_sample_filtered, ~greedy & filtered & ~has_threshold),
    ]
    return [(method, np.flatnonzero(mask)) for method, mask in methods if mask.any()]


def _sample_greedy(logits: torch.Tensor, rows: SamplingMetadata, allow_sync: bool) -> torch.Tensor:
    del rows
    return lowest_argmax(logits, allow_sync=allow_sync)


def _sample_unfiltered(logits: torch.Tensor, rows: SamplingMetadata, allow_sync: bool) -> torch.Tensor:
    metadata = rows.to(logits.device)
    return _sample_from_all(_scale(logits, metadata), metadata.keys, allow_sync)


def _sample_filtered(logits: torch.Tensor, rows: SamplingMetadata, allow_sync: bool) -> torch.Tensor:
    metadata, vocab_size = rows.to(logits.device), logits.shape[1]
    scores, width = _scale(logits, metadata), _top_width(rows, vocab_size)
    if allow_sync:
        return _sample_from_top(scores, TopCandidates.from_scores(scores, width), metadata, rows.has_top_p)
    top = TopCandidates.from_scores(scores, width if rows.has_threshold_within(width, vocab_size).all() else vocab_size)
    lowest, _ = _threshold(scores, top, metadata, rows.has_top_p)
    return _sample_from_all(scores.masked_fill_(scores < lowest, -torch.inf), metadata.keys, allow_sync)


def _sample_from_top(
    scores: torch.Tensor, top: TopCandidates, metadata: DeviceSamplingMetadata, has_top_p: bool
) -> torch.Tensor:
    """Samples from the highest scores only, except for rows that may keep others too. Reads from the device which rows
    those are.
    """
    lowest, known = _threshold(scores, top, metadata, has_top_p)
    token_ids = _sample_from_candidates(top, lowest, metadata.keys)
    # If the threshold is the last score of ``top``, equal scores may lie outside ``top``; -inf is never drawn.
    last = top.scores[:, -1]
    wide = ((~known | (lowest.squeeze(1) <= last)) & (last > -torch.inf)).nonzero().squeeze(1)
    if len(wide) and top.scores.shape[1] < scores.shape[1]:
        scores, metadata, lowest = scores[wide], metadata.select(wide), lowest[wide]
        if not bool(known.all()):
            lowest, _ = _threshold(scores, TopCandidates.from_scores(scores, scores.shape[1]), metadata, has_top_p)
        token_ids[wide] = _sample_from_all(
            scores.masked_fill(scores < lowest, -torch.inf), metadata.keys, allow_sync=True
        )
    return token_ids


def _scale(logits: torch.Tensor, metadata: DeviceSamplingMetadata) -> torch.Tensor:
    """Returns the scores, with 0 as the highest of each row. Overwrites ``logits``."""
    temperature = metadata.temperature.clamp(min=MIN_TEMPERATURE)
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _threshold(
    scores: torch.Tensor, top: TopCandidates, metadata: DeviceSamplingMetadata, has_top_p: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return sampling_threshold(scores, top, metadata.top_k, metadata.top_p, metadata.log_min_p, has_top_p=has_top_p)


def _sample_from_all(scores: torch.Tensor, keys: torch.Tensor, allow_sync: bool) -> torch.Tensor:
    """Returns token ids [R], sampled from every token with a score above -inf."""
    width = max(1, (NOISE_TOKENS if scores.device.type == "cpu" else DEVICE_NOISE_TOKENS) // len(keys))
    best = torch.full((len(keys),), -torch.inf, device=scores.device)
    token_ids = torch.zeros(len(keys), dtype=torch.int64, device=scores.device)
    for start, part in zip(range(0, scores.shape[1], width), scores.split(width, dim=1), strict=True):
        ids = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=scores.device)
        uniform = uniform_from_bits(hash_tokens(keys, ids))
        if allow_sync:  # only tokens that can win get noise
            hopeful = (noise_bound(uniform).add_(part) >= best[:, None]).nonzero(as_tuple=True)
            noise = gumbel_from_uniform(uniform[hopeful])
            noisy = torch.full_like(part, -torch.inf).index_put_(hopeful, noise.add_(part[hopeful]))
        else:
            noisy = gumbel_from_uniform(uniform).add_(part)
        index = lowest_argmax(noisy, allow_sync=allow_sync)
        highest = noisy.gather(1, index[:, None]).squeeze(1)
        better = highest > best
        best = torch.where(better, highest, best)
        token_ids = torch.where(better, index + start, token_ids)
    return token_ids


def _sample_from_candidates(top: TopCandidates, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    noisy = gumbel_noise(keys, top.token_ids.int()).add_(top.scores).masked_fill_(top.scores < lowest, -torch.inf)
    # Excludes losers rather than selecting winners, so that a row of NaN, which compares as neither, also has a winner.
    losers = noisy < noisy.amax(-1, keepdim=True)
    return top.token_ids.masked_fill(losers, torch.iinfo(torch.int64).max).amin(-1)


def _top_width(rows: SamplingMetadata, vocab_size: int) -> int:
    """Returns a width well above the largest top-k, because all ties with the k-th token are kept too. Wider if some
    row has no small top-k.
    """
    bounded = (rows.top_k > 0) & (rows.top_k < TOP_WIDTH)
    width = 2 * int(rows.top_k.max()) + 64 if bool(bounded.all()) else TOP_WIDTH
    return min(width, TOP_WIDTH, vocab_size)


# A top-k with a defined order: descending scores, and equal scores by ascending token id.


_LOW_BITS = (1 << 32) - 1


def stable_topk(scores: torch.Tensor, count: int, *, allow_sync: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``count`` highest of ``scores`` [R, V] float32, without NaN, and their token ids, both [R, min(count,
    V)].

    With ``allow_sync`` the results are on the host, otherwise on the device of ``scores`` without a wait. The token ids
    of scores of -inf are undefined.
    """
    count = min(count, scores.shape[1])
    return _topk_with_ties_resolved(scores, count) if allow_sync else _topk_by_unique_keys(scores, count)


def _topk_by_unique_keys(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts unique integers: the high half orders by score, the low half by token id."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(_LOW_BITS, _LOW_BITS - scores.shape[1], -1, device=scores.device)
    indices = (ordered.long() << 32).bitwise_or_(ids).topk(count, dim=-1).indices
    return scores.gather(1, indices), indices


def _topk_with_ties_resolved(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Searches for ties only in rows where it matters which of the equal scores were chosen."""
    # One more than asked for: only if it equals the last one does it matter which equal scores were chosen.
    values, ids = (part.cpu() for part in scores.topk(min(count + 1, scores.shape[1]), dim=-1))
    border = values[:, count - 1]
    cut = (values[:, -1] == border) if values.shape[1] > count else torch.zeros(len(scores), dtype=torch.bool)
    values, ids = values[:, :count], ids[:, :count].clone()
    for row in (cut & (border > -torch.inf)).nonzero().squeeze(1).tolist():
        tied = values[row] == border[row]
        ids[row, tied] = (scores[row] == border[row].item()).nonzero().squeeze(1)[: int(tied.sum())].cpu()
    return _sort_by_value_then_id(values, ids)


def _sort_by_value_then_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


# Log-probabilities of tokens under the model's own distribution: a float32 log-softmax of its logits.
#
# Computed for a bounded number of rows at a time, so that long prompts and large vocabularies cost time but not memory.


MAX_ROWS, MAX_VALUES = 256, 1 << 24


def max_rows_at_once(vocab_size: int) -> int:
    """Returns how many rows of logits are normalized at a time."""
    return max(1, min(MAX_ROWS, MAX_VALUES // vocab_size))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns for each row i of ``logits`` [R, V], any float dtype and finite, the log-probability of ``token_ids[i]``
    and the ``num_top[i]`` most probable tokens, best first, equal ones by ascending id. Waits for the device.
    """
    (ids,) = upload_arrays((np.array(token_ids, dtype=np.int64),), logits.device)
    return to_token_logprobs(compute_logprobs(logits, ids, max(num_top, default=0)), num_top)


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, *, allow_sync: bool = True
) -> list[torch.Tensor]:
    """Returns the log-probability of each row's token, [R] float32. With ``num_top`` above 0, also returns the
    log-probabilities and ids of the most probable tokens, both [R, min(num_top, V)].
    """
    size, chunks = max_rows_at_once(logits.shape[1]), []
    for start in range(0, len(token_ids), size):
        part = slice(start, start + size)
        logprobs = logits[part].float().log_softmax(-1)
        own = logprobs.gather(1, token_ids[part][:, None]).squeeze(1)
        chunks.append((own, *stable_topk(logprobs, num_top, allow_sync=allow_sync)) if num_top else (own,))
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def to_token_logprobs(measured: Sequence[torch.Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Converts the tensors of ``compute_logprobs`` to one object per row. Row i has the ``num_top[i]`` most probable
    tokens. Waits for the device.
    """
    if not num_top:
        return []
    own = measured[0].tolist()
    if len(measured) == 1:
        return [TokenLogprobs(logprob) for logprob in own]
    values, ids = measured[1:]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True))
    return [TokenLogprobs(logprob, top[:count]) for logprob, top, count in zip(own, tops, num_top, strict=True)]
