"""Draws one token a row: the Gumbel-max trick with stateless noise. Knows rows of logits, never requests.

argmax(score + Gumbel noise) is a draw from softmax(score) (Gumbel 1954; Maddison et al. 2014). Here

    score = (logit - highest logit of the row) / temperature, of the tokens that top-k, top-p and min-p keep,

and the noise is that of ``noise``: a function of seed, position and token id. Greedy is the same argmax
without noise. Equal scores go to the lowest token id. A row's draw depends on that row's logits and
parameters alone, whatever else is in the batch.

Filters look at the 1,024 highest scores first, and noise is then made for those only. A row that keeps more is sorted
whole, unless its border is known already, and gets noise for all tokens. Which rows these are is known to the device
alone. Where the host must not wait for that, every row gets noise for all tokens, and those that have a top-p without
a top-k, or a top-k above 1,024, are sorted whole: more work, but the same draws.
"""

from collections.abc import Callable

import numpy as np
import torch

from quire_engine.device.transfers import upload_arrays
from quire_engine.kernels import scan
from quire_engine.sampling.argmax import lowest_argmax
from quire_engine.sampling.cells import TokenArray
from quire_engine.sampling.filters import Top, lowest_kept
from quire_engine.sampling.noise import gumbel
from quire_engine.sampling.rows import BoolArray, Columns, SamplingRows

TOP_WIDTH = 1024
# Noise is made for so many tokens at a time. A dozen passes over them stay in a processor's cache; on other devices a
# pass costs a launch, and the number only bounds their memory.
NOISE_TOKENS, DEVICE_NOISE_TOKENS = 1 << 16, 1 << 22
# Dividing by less would overflow even for neighbouring float32 logits; such a row is greedy up to exact ties.
MIN_TEMPERATURE = 1e-30

_Draw = Callable[[torch.Tensor, SamplingRows, bool], torch.Tensor]


def sample(logits: torch.Tensor, rows: SamplingRows, *, may_wait: bool = True) -> torch.Tensor:
    """Token ids [B] int64, on the device of ``logits`` [B, V] float32, finite or -inf (never drawn), and in no row all
    of them -inf; a row that is otherwise gets any valid id. They are used up. Nothing is read from the device unless
    it ``may_wait``, which makes no difference to the ids.
    """
    kinds = _kinds(rows, logits.shape[1])
    if len(kinds) == 1:
        return kinds[0][0](logits, rows, may_wait)
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    indices = upload_arrays([places for _, places in kinds], logits.device)
    for (draw, places), index in zip(kinds, indices, strict=True):
        token_ids.index_copy_(0, index, draw(logits.index_select(0, index), rows.take(places), may_wait))
    return token_ids


def finite_rows(logits: torch.Tensor, *, may_wait: bool = True) -> torch.Tensor:
    """Which rows hold only finite numbers, [B] bool. Without the compiled kernel: a sum that is finite proves it, at a
    fraction of the cost, but must be read.
    """
    if not may_wait:
        return torch.stack(torch.aminmax(logits, dim=-1)).isfinite().all(0)
    known = scan.finite_rows(logits)
    if known is not None:
        return known
    finite = logits.sum(-1).isfinite()
    return finite if bool(finite.all()) else logits.isfinite().all(-1)


def _kinds(rows: SamplingRows, vocab_size: int) -> list[tuple[_Draw, TokenArray]]:
    """The ways in which rows are drawn, and which of the rows each is for."""
    greedy, filtered = rows.greedy(), rows.filtered(vocab_size)
    bordered = rows.bordered(TOP_WIDTH, vocab_size)
    ways: list[tuple[_Draw, BoolArray]] = [
        (_draw_greedy, greedy),
        (_draw_plain, ~greedy & ~filtered),
        (_draw_filtered, ~greedy & filtered & bordered),
        (_draw_filtered, ~greedy & filtered & ~bordered),
    ]
    return [(draw, np.flatnonzero(mask)) for draw, mask in ways if mask.any()]


def _draw_greedy(logits: torch.Tensor, rows: SamplingRows, may_wait: bool) -> torch.Tensor:
    del rows
    return lowest_argmax(logits, may_wait=may_wait)


def _draw_plain(logits: torch.Tensor, rows: SamplingRows, may_wait: bool) -> torch.Tensor:
    columns = rows.to(logits.device)
    return _draw_from_all(_scaled(logits, columns), columns.keys, may_wait)


def _draw_filtered(logits: torch.Tensor, rows: SamplingRows, may_wait: bool) -> torch.Tensor:
    columns, vocab_size = rows.to(logits.device), logits.shape[1]
    scores, width = _scaled(logits, columns), _top_width(rows, vocab_size)
    if may_wait:
        return _draw_from_top(scores, Top.of(scores, width), columns, rows.has_nucleus)
    top = Top.of(scores, width if rows.bordered(width, vocab_size).all() else vocab_size)
    lowest, _ = _border(scores, top, columns, rows.has_nucleus)
    return _draw_from_all(scores.masked_fill_(scores < lowest, -torch.inf), columns.keys, may_wait)


def _draw_from_top(scores: torch.Tensor, top: Top, columns: Columns, has_nucleus: bool) -> torch.Tensor:
    """From the highest scores alone, but for rows that may keep others too, which must be read."""
    lowest, known = _border(scores, top, columns, has_nucleus)
    token_ids = _draw_from_candidates(top, lowest, columns.keys)
    # Where the border is the last score looked at, tokens that tie with it may lie outside; -inf is not drawn anyway.
    last = top.scores[:, -1]
    wide = ((~known | (lowest.squeeze(1) <= last)) & (last > -torch.inf)).nonzero().squeeze(1)
    if len(wide) and top.scores.shape[1] < scores.shape[1]:
        scores, columns, lowest = scores[wide], columns.take(wide), lowest[wide]
        if not bool(known.all()):
            lowest, _ = _border(scores, Top.of(scores, scores.shape[1]), columns, has_nucleus)
        token_ids[wide] = _draw_from_all(scores.masked_fill(scores < lowest, -torch.inf), columns.keys, may_wait=True)
    return token_ids


def _scaled(logits: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Scores, 0 for the highest of each row; ``logits`` are used up."""
    temperature = columns.temperature.clamp(min=MIN_TEMPERATURE)
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _border(scores: torch.Tensor, top: Top, columns: Columns, has_nucleus: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return lowest_kept(scores, top, columns.top_k, columns.top_p, columns.floor, has_nucleus=has_nucleus)


def _draw_from_all(scores: torch.Tensor, keys: torch.Tensor, may_wait: bool) -> torch.Tensor:
    """Token ids [R] drawn from every token with a score above -inf."""
    width = max(1, (NOISE_TOKENS if scores.device.type == "cpu" else DEVICE_NOISE_TOKENS) // len(keys))
    best = torch.full((len(keys),), -torch.inf, device=scores.device)
    token_ids = torch.zeros(len(keys), dtype=torch.int64, device=scores.device)
    for start, part in zip(range(0, scores.shape[1], width), scores.split(width, dim=1), strict=True):
        ids = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=scores.device)
        noisy = gumbel(keys, ids).add_(part)
        place = lowest_argmax(noisy, may_wait=may_wait)
        highest = noisy.gather(1, place[:, None]).squeeze(1)
        better = highest > best
        best = torch.where(better, highest, best)
        token_ids = torch.where(better, place + start, token_ids)
    return token_ids


def _draw_from_candidates(top: Top, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    noisy = gumbel(keys, top.token_ids.int()).add_(top.scores).masked_fill_(top.scores < lowest, -torch.inf)
    # Said so that a row of NaN, which is neither, has a winner too.
    losers = noisy < noisy.amax(-1, keepdim=True)
    return top.token_ids.masked_fill(losers, torch.iinfo(torch.int64).max).amin(-1)


def _top_width(rows: SamplingRows, vocab_size: int) -> int:
    """Well above the largest top-k, as whatever ties with the last token is kept too; wider where no top-k is small."""
    bounded = (rows.top_k > 0) & (rows.top_k < TOP_WIDTH)
    width = 2 * int(rows.top_k.max()) + 64 if bool(bounded.all()) else TOP_WIDTH
    return min(width, TOP_WIDTH, vocab_size)
