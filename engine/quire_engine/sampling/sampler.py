"""Draws one token a row: the Gumbel-max trick with stateless noise. Knows rows of logits, never requests.

argmax(score + Gumbel noise) is a draw from softmax(score) (Gumbel 1954; Maddison et al. 2014). Here

    score = (logit - highest logit of the row) / temperature, of the tokens that top-k, top-p and min-p keep,

and the noise is that of ``noise``: a function of seed, position and token id. Greedy is the same argmax
without noise. Equal scores go to the lowest token id. A row's draw depends on that row's logits and
parameters alone, whatever else is in the batch.

Filters look at the 1,024 highest scores first, and noise is then made for those only. A row that keeps more is sorted
whole, unless its border is known already, and gets noise for all tokens.
"""

import torch

from quire_engine.sampling.filters import Top, lowest_kept
from quire_engine.sampling.noise import gumbel
from quire_engine.sampling.rows import SamplingRows

TOP_WIDTH = 1024
# Noise is made for so many tokens at a time: a dozen passes over them then stay in the processor's cache.
NOISE_TOKENS = 1 << 16
# Dividing by less would overflow even for neighbouring float32 logits; such a row is greedy up to exact ties.
MIN_TEMPERATURE = 1e-30


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids [B] int64, on the host, for ``logits`` [B, V] float32, finite or -inf (never drawn), and in no row all
    of them -inf. They are used up.
    """
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    greedy = rows.greedy()
    if bool(greedy.any()):
        token_ids[greedy] = most_probable(_take(logits, greedy))
    if not bool(greedy.all()):
        token_ids[~greedy] = _draw(_take(logits, ~greedy), _rows(rows, ~greedy))
    return token_ids


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """The lowest token id with the highest of ``logits`` [B, V] in each row: [B] int64, on the host."""
    return logits.max(-1).indices.cpu()


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows hold only finite numbers, [B] bool. A sum that is finite proves it, at a fraction of the cost."""
    finite = logits.sum(-1).isfinite()
    return finite if bool(finite.all()) else logits.isfinite().all(-1)


def _take(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows under ``mask`` [B] bool, without a copy where that is all of them."""
    return logits if bool(mask.all()) else logits[mask.nonzero().squeeze(1).to(logits.device)]


def _rows(rows: SamplingRows, mask: torch.Tensor) -> SamplingRows:
    return rows.take(mask.nonzero().squeeze(1))


def _draw(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids [R], on the host, of rows with a temperature above 0; ``logits`` [R, V] float32 are used up."""
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    temperature = rows.temperature.clamp(min=MIN_TEMPERATURE).to(logits.device)
    scores = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    filtered = rows.filtered(logits.shape[1])
    for mask, draw in ((~filtered, _draw_from_all), (filtered, _draw_from_top)):
        if bool(mask.any()):
            token_ids[mask] = draw(_take(scores, mask), _rows(rows, mask).to(logits.device)).cpu()
    return token_ids


def _draw_from_all(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids [R] drawn from every token with a score above -inf."""
    width = max(1, NOISE_TOKENS // len(rows))
    best = torch.full((len(rows),), -torch.inf, device=scores.device)
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=scores.device)
    for start, part in zip(range(0, scores.shape[1], width), scores.split(width, dim=1), strict=True):
        ids = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=scores.device)
        highest, place = gumbel(rows.keys, ids).add_(part).max(-1)
        better = highest > best
        best = torch.where(better, highest, best)
        token_ids = torch.where(better, place + start, token_ids)
    return token_ids


def _draw_from_top(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids [R] drawn from what top-k, top-p and min-p keep."""
    top = Top.of(scores, _top_width(rows, scores.shape[1]))
    lowest, known = lowest_kept(scores, top, rows.top_k, rows.top_p, rows.floor)
    token_ids = _draw_from_candidates(top, lowest, rows.keys)
    # Where the border is the last score looked at, tokens that tie with it may lie outside; -inf is not drawn anyway.
    last = top.scores[:, -1]
    wide = ((~known | (lowest.squeeze(1) <= last)) & (last > -torch.inf)).nonzero().squeeze(1)
    if len(wide) and top.scores.shape[1] < scores.shape[1]:
        scores, rows = scores[wide], rows.take(wide)
        lowest = lowest[wide] if bool(known.all()) else _lowest_of_all(scores, rows)
        token_ids[wide] = _draw_from_all(scores.masked_fill(scores < lowest, -torch.inf), rows)
    return token_ids


def _lowest_of_all(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The lowest score that each row keeps, [R, 1], by sorting all of them."""
    return lowest_kept(scores, Top.of(scores, scores.shape[1]), rows.top_k, rows.top_p, rows.floor)[0]


def _draw_from_candidates(top: Top, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    noisy = gumbel(keys, top.token_ids.int()).add_(top.scores).masked_fill_(top.scores < lowest, -torch.inf)
    losers = noisy != noisy.amax(-1, keepdim=True)
    return top.token_ids.masked_fill(losers, torch.iinfo(torch.int64).max).amin(-1)


def _top_width(rows: SamplingRows, vocab_size: int) -> int:
    """Well above the largest top-k, as whatever ties with the last token is kept too; wider where no top-k is small."""
    bounded = (rows.top_k > 0) & (rows.top_k < TOP_WIDTH)
    width = 2 * int(rows.top_k.max()) + 64 if bool(bounded.all()) else TOP_WIDTH
    return min(width, TOP_WIDTH, vocab_size)
