"""Single places in a matrix of scores: what a change of a few tokens a row costs. Knows no parameters."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

TokenArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def token_array(token_ids: Sequence[int], vocab_size: int) -> TokenArray:
    """The ids as int64, without those that no row of scores has a place for."""
    array = np.array(token_ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)]


def cells(scores: torch.Tensor, rows: Sequence[int], token_ids: Sequence[TokenArray]) -> TokenArray:
    """Where the tokens of each of ``rows`` lie in ``scores`` [R, V], flat: row after row, [N]."""
    starts = np.repeat(np.array(rows, dtype=np.int64) * scores.shape[1], [len(ids) for ids in token_ids])
    places: TokenArray = np.concatenate(token_ids) + starts
    return places


def per_cell(values: Sequence[float], lengths: Sequence[int]) -> FloatArray:
    """One value of each row as one of each of its cells, [N]."""
    return np.repeat(np.array(values, dtype=np.float32), lengths)
