"""Draws one token a row: the Gumbel-max trick with stateless noise.

argmax(score + Gumbel noise) is a draw from softmax(score) (Gumbel 1954; Maddison et al. 2014). Here

    score = (logit - highest logit of the row) / temperature, of the tokens that top-k, top-p and min-p keep,

and the noise is that of ``noise``: a function of seed, position and token id. Greedy is the same argmax
without noise. Equal scores go to the lowest token id. A row's draw depends on that row's logits and
parameters alone, whatever else is in the batch.

Filters look at the 1,024 highest scores first, and noise is then made for those only. A row that keeps more is sorted
whole, unless its threshold is known already, and gets noise for all tokens. Which rows these are is known on the device
only. Where the host must not wait for it, every row gets noise for all tokens, and those that have a top-p without
a top-k, or a top-k above 1,024, are sorted whole: more work, but the same draws.
"""

from collections.abc import Callable

import numpy as np
import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.kernels import scan
from quire_engine.sampling.argmax import lowest_argmax
from quire_engine.sampling.cells import TokenArray
from quire_engine.sampling.filters import TopCandidates, sampling_threshold
from quire_engine.sampling.noise import gumbel_noise
from quire_engine.sampling.rows import BoolArray, DeviceSamplingMetadata, SamplingMetadata

TOP_WIDTH = 1024
# Noise is made for so many tokens at a time. A dozen passes over them stay in a processor's cache; on other devices a
# pass costs a launch, and the number only bounds their memory.
NOISE_TOKENS, DEVICE_NOISE_TOKENS = 1 << 16, 1 << 22
# Dividing by less would overflow even for neighbouring float32 logits; such a row is greedy up to exact ties.
MIN_TEMPERATURE = 1e-30

_SampleFunction = Callable[[torch.Tensor, SamplingMetadata, bool], torch.Tensor]


def sample(logits: torch.Tensor, rows: SamplingMetadata, *, allow_sync: bool = True) -> torch.Tensor:
    """Token ids [B] int64, on the device of ``logits`` [B, V] float32, finite or -inf (never drawn), and in no row all
    of them -inf; a row that is otherwise gets any valid id. ``logits`` are overwritten. Nothing is read from the
    device without ``allow_sync``, which makes no difference to the ids.
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
    """Which rows hold only finite numbers, [B] bool. Without the compiled kernel: a sum that is finite proves it, at a
    fraction of the cost, but must be read.
    """
    if not allow_sync:
        return torch.stack(torch.aminmax(logits, dim=-1)).isfinite().all(0)
    known = scan.finite_rows(logits)
    if known is not None:
        return known
    finite = logits.sum(-1).isfinite()
    return finite if bool(finite.all()) else logits.isfinite().all(-1)


def _sampling_methods(rows: SamplingMetadata, vocab_size: int) -> list[tuple[_SampleFunction, TokenArray]]:
    """The functions that sample rows, and the indices of the rows that each one is for."""
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
    """Samples from the highest scores alone, except rows that may keep others too; which ones these are is read."""
    lowest, known = _threshold(scores, top, metadata, has_top_p)
    token_ids = _sample_from_candidates(top, lowest, metadata.keys)
    # Where the threshold is the last score of ``top``, ties with it may lie outside; -inf is not drawn anyway.
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
    """Scores, 0 for the highest of each row; ``logits`` are overwritten."""
    temperature = metadata.temperature.clamp(min=MIN_TEMPERATURE)
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _threshold(
    scores: torch.Tensor, top: TopCandidates, metadata: DeviceSamplingMetadata, has_top_p: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return sampling_threshold(scores, top, metadata.top_k, metadata.top_p, metadata.log_min_p, has_top_p=has_top_p)


def _sample_from_all(scores: torch.Tensor, keys: torch.Tensor, allow_sync: bool) -> torch.Tensor:
    """Token ids [R] drawn from every token with a score above -inf."""
    width = max(1, (NOISE_TOKENS if scores.device.type == "cpu" else DEVICE_NOISE_TOKENS) // len(keys))
    best = torch.full((len(keys),), -torch.inf, device=scores.device)
    token_ids = torch.zeros(len(keys), dtype=torch.int64, device=scores.device)
    for start, part in zip(range(0, scores.shape[1], width), scores.split(width, dim=1), strict=True):
        ids = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=scores.device)
        noisy = gumbel_noise(keys, ids).add_(part)
        index = lowest_argmax(noisy, allow_sync=allow_sync)
        highest = noisy.gather(1, index[:, None]).squeeze(1)
        better = highest > best
        best = torch.where(better, highest, best)
        token_ids = torch.where(better, index + start, token_ids)
    return token_ids


def _sample_from_candidates(top: TopCandidates, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    noisy = gumbel_noise(keys, top.token_ids.int()).add_(top.scores).masked_fill_(top.scores < lowest, -torch.inf)
    # Losers rather than winners, so that a row of NaN, which compares as neither, has a winner too.
    losers = noisy < noisy.amax(-1, keepdim=True)
    return top.token_ids.masked_fill(losers, torch.iinfo(torch.int64).max).amin(-1)


def _top_width(rows: SamplingMetadata, vocab_size: int) -> int:
    """Well above the largest top-k, as all ties with the last token are kept too; wider where no top-k is small."""
    bounded = (rows.top_k > 0) & (rows.top_k < TOP_WIDTH)
    width = 2 * int(rows.top_k.max()) + 64 if bool(bounded.all()) else TOP_WIDTH
    return min(width, TOP_WIDTH, vocab_size)
