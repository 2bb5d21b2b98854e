"""The most probable token of each row, the lowest id of equal ones: the whole cost of a greedy draw."""

import numpy as np
import torch

from quire_engine.kernels.scan import argmax_rows
from quire_engine.sampling.cells import TokenArray


def lowest_argmax(scores: torch.Tensor, *, allow_sync: bool = True) -> torch.Tensor:
    """The lowest token id with the highest of ``scores`` [R, V], any float dtype: [R] int64 on their device. Any valid
    id where a row has a NaN.

    With ``allow_sync`` on the CPU the compiled kernel does it, or numpy, which looks at a vector of scores at a time
    where torch looks at one score.
    """
    if not allow_sync or scores.device.type != "cpu" or not scores.numel():
        return scores.max(-1).indices
    ids = argmax_rows(scores)
    if ids is not None:
        return ids
    if scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))
    if scores.dtype == torch.bfloat16:
        return torch.from_numpy(_bfloat16_argmax(scores))
    return scores.max(-1).indices


def _bfloat16_argmax(scores: torch.Tensor) -> TokenArray:
    """The bits of positive numbers, read as integers, are in the numbers' order and above those of negative numbers,
    whose order is the opposite one.
    """
    bits = scores.view(torch.int16).numpy()
    ids: TokenArray = bits.argmax(-1)
    highest = bits[np.arange(len(bits)), ids]
    negative, zero = np.flatnonzero(highest < 0), np.flatnonzero(highest == 0)
    if len(negative):
        ids[negative] = bits[negative].argmin(-1)
    if len(zero):  # 0 and -0 are equal numbers of different bits
        ids[zero] = scores[torch.from_numpy(zero)].max(-1).indices.numpy()
    return ids
