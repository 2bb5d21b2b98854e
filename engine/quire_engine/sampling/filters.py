"""Top-k and top-p: the smallest score that a row keeps. Knows no randomness.

Both filters are rules about values, not about places in a sorted list: top-k keeps what scores at least as
high as the k-th token, top-p (nucleus sampling, Holtzman et al. 2019) what has less than ``top_p`` of the
mass strictly above it, counted among the tokens that top-k kept. Equal scores are kept or left out together,
so that neither the order in which a sort leaves them nor the width that was sorted can change a draw.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Top:
    """The highest scores of each row, in falling order, with their token ids; both [R, W]."""

    scores: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, width: int) -> "Top":
        """The ``width`` highest of ``scores`` [R, V]."""
        if width >= scores.shape[1]:
            return cls(*scores.sort(dim=-1, descending=True))
        return cls(*scores.topk(width, dim=-1))


def lowest_kept(
    scores: torch.Tensor, top: Top, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score that each row keeps, [R, 1], and whether ``top`` was wide enough to know it, [R].

    ``scores`` [R, V] is finite or -inf; ``top_k`` [R] int64, 0 for all; ``top_p`` [R] float64. A ``top`` as wide as the
    vocabulary always is wide enough.
    """
    vocab_size, width = scores.shape[1], top.scores.shape[1]
    unlimited = (top_k == 0) | (top_k >= vocab_size)
    kth = top.scores.gather(1, top_k.clamp(1, width)[:, None] - 1).masked_fill(unlimited[:, None], -torch.inf)
    nucleus, reached = _nucleus(scores, kth, top, top_p)
    bounded = (kth >= top.scores[:, -1:]).squeeze(1)
    known = (unlimited | (top_k <= width)) & (reached | bounded)
    return torch.maximum(kth, nucleus), known | (width == vocab_size)


def _nucleus(
    scores: torch.Tensor, kth: torch.Tensor, top: Top, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score [R, 1] in the nucleus of what is not below ``kth``, and whether it ends within ``top``, [R]."""
    everything = top_p >= 1
    if bool(everything.all()):
        return torch.full_like(kth, -torch.inf), everything
    # Over the whole row whatever the width of ``top``, so that a probability has the same bits for any width.
    probabilities = scores.masked_fill(scores < kth, -torch.inf).softmax(-1).gather(1, top.token_ids)
    mass = probabilities.double().cumsum(-1)
    kept = 1 + (mass[:, :-1] < top_p[:, None]).sum(-1, keepdim=True)
    lowest = top.scores.gather(1, kept - 1).masked_fill(everything[:, None], -torch.inf)
    return lowest, everything | (mass[:, -1] >= top_p)
