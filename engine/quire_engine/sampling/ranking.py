"""The highest scores of each row, in one certain order: falling, and equal ones by rising token id."""

import torch


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` highest of ``scores`` [R, V], no NaN, and their token ids, both [R, count], on the host; all V of
    them where there are no more.
    """
    count = min(count, scores.shape[1])
    # One more than asked for: only where it equals the last does it matter which of the equal ones were chosen.
    values, ids = (part.cpu() for part in scores.topk(min(count + 1, scores.shape[1]), dim=-1))
    border = values[:, count - 1]
    cut = (values[:, -1] == border) if values.shape[1] > count else torch.zeros(len(scores), dtype=torch.bool)
    values, ids = values[:, :count], ids[:, :count].clone()
    for row in (cut & (border > -torch.inf)).nonzero().squeeze(1).tolist():
        tied = values[row] == border[row]
        ids[row, tied] = (scores[row] == border[row].item()).nonzero().squeeze(1)[: int(tied.sum())].cpu()
    return _by_value_then_id(values, ids)


def _by_value_then_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
