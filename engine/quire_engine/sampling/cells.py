"""Flat indices into a matrix of scores, for logits processors that change a few tokens of each row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

TokenArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def token_array(token_ids: Sequence[int], vocab_size: int) -> TokenArray:
    """The ids as int64, without those outside of the vocabulary."""
    array = np.array(token_ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)]


def flat_indices(scores: torch.Tensor, rows: Sequence[int], token_ids: Sequence[TokenArray]) -> TokenArray:
    """Indices [N] into ``scores`` [R, V] flattened, of ``token_ids[i]`` in row ``rows[i]``, row after row."""
    starts = np.repeat(np.array(rows, dtype=np.int64) * scores.shape[1], [len(ids) for ids in token_ids])
    indices: TokenArray = np.concatenate(token_ids) + starts
    return indices


def repeat_per_index(values: Sequence[float], lengths: Sequence[int]) -> FloatArray:
    """``values[i]`` repeated ``lengths[i]`` times, float32 [N]: one value of each row for each of its indices."""
    return np.repeat(np.array(values, dtype=np.float32), lengths)
