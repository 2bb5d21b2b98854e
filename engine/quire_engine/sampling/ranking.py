"""A top-k with a defined order: falling scores, and equal ones by rising token id."""

import torch

_LOW_BITS = (1 << 32) - 1


def stable_topk(scores: torch.Tensor, count: int, *, allow_sync: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` highest of ``scores`` [R, V] float32, no NaN, and their token ids, both [R, min(count, V)].
    With ``allow_sync`` they are on the host; otherwise on the device of ``scores``, which is not waited for. The ids of
    scores of -inf are not defined.
    """
    count = min(count, scores.shape[1])
    return _topk_with_ties_resolved(scores, count) if allow_sync else _topk_by_unique_keys(scores, count)


def _topk_by_unique_keys(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts integers that are unique: above, the bits of the score in the order of the scores; below, the id."""
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(_LOW_BITS, _LOW_BITS - scores.shape[1], -1, device=scores.device)
    indices = (ordered.long() << 32).bitwise_or_(ids).topk(count, dim=-1).indices
    return scores.gather(1, indices), indices


def _topk_with_ties_resolved(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks for equal scores only in rows where it matters which of them were chosen."""
    # One more than asked for: only where it equals the last does it matter which of the equal ones were chosen.
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
