"""Top-k, top-p and min-p: the lowest score that a row keeps.

All three are rules about values, not about positions in a sorted list: top-k keeps what scores at least as high as the
k-th token, top-p (nucleus sampling, Holtzman et al. 2019) what has less than ``top_p`` of the mass strictly above it,
counted among the tokens that top-k kept, and min-p (Nguyen et al. 2024) what is at least ``min_p`` times as probable as
the most probable token. Equal scores are kept or left out together, so that neither the order in which a sort leaves
them nor the width that was sorted can change a draw.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TopCandidates:
    """The highest scores of each row, in falling order, with their token ids, both [R, W]."""

    scores: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def from_scores(cls, scores: torch.Tensor, width: int) -> "TopCandidates":
        """The ``width`` highest of ``scores`` [R, V]; which ones of equal scores is not defined."""
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
    """The lowest score that each row keeps, [R, 1], and whether ``top`` was wide enough to know it, [R].

    ``scores`` [R, V] are finite or -inf, and relative to the row's highest, which is 0; ``top_k`` [R] int64, 0 for all;
    ``top_p`` [R] float64; ``log_min_p`` [R] float32, the logarithm of min-p. A ``top`` that holds every score above
    -inf always is wide enough. Without ``has_top_p`` no row has a ``top_p`` below 1, and ``top_p`` is not used.
    """
    vocab_size, width = scores.shape[1], top.scores.shape[1]
    last = top.scores[:, -1]
    unlimited = (top_k == 0) | (top_k >= vocab_size)
    kth = top.scores.gather(1, top_k.clamp(1, width)[:, None] - 1).masked_fill(unlimited[:, None], -torch.inf)
    nucleus, reached = _top_p_threshold(scores, kth, top, top_p) if has_top_p else (log_min_p[:, None], top_p >= 1)
    above = log_min_p >= last
    # The mass that top-p counts is of what top-k kept, so min-p makes top-k's threshold needless only without it.
    kth_known = unlimited | (top_k <= width) | (above & (top_p >= 1))
    known = kth_known & (reached | above | (kth.squeeze(1) >= last))
    lowest = torch.maximum(torch.maximum(kth, nucleus), log_min_p[:, None])
    return lowest, known | (last == -torch.inf) | (width == vocab_size)


def _top_p_threshold(
    scores: torch.Tensor, kth: torch.Tensor, top: TopCandidates, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score [R, 1] in the nucleus of what is not below ``kth``, and whether it ends within ``top``, [R]."""
    everything = top_p >= 1
    # Over the whole row whatever the width of ``top``, so that a probability has the same bits for any width.
    probabilities = scores.masked_fill(scores < kth, -torch.inf).softmax(-1).gather(1, top.token_ids)
    mass = probabilities.double().cumsum(-1)
    kept = 1 + (mass[:, :-1] < top_p[:, None]).sum(-1, keepdim=True)
    lowest = top.scores.gather(1, kept - 1).masked_fill(everything[:, None], -torch.inf)
    return lowest, everything | (mass[:, -1] >= top_p)
