"""Logit bias: constants that a request adds to the scores of some tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quire_proto.sampling import SamplingParams

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import FloatArray, TokenArray, flat_indices


@dataclass(frozen=True, slots=True)
class LogitBias:
    """``values`` [N] float32 to add to the scores of ``token_ids`` [N] int64, which are distinct."""

    token_ids: TokenArray
    values: FloatArray

    @classmethod
    def from_params(cls, params: SamplingParams, vocab_size: int) -> "LogitBias | None":
        """The bias that ``params`` ask for, without tokens outside of the vocabulary; None if there is none."""
        pairs = [pair for pair in params.logit_bias if 0 <= pair[0] < vocab_size]
        if not pairs:
            return None
        token_ids, values = zip(*pairs, strict=True)
        return cls(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))


def apply_logit_bias(scores: torch.Tensor, biased: Sequence[tuple[int, LogitBias]]) -> None:
    """Adds to ``scores`` [R, V] float32, in place, each (row, bias) of ``biased``."""
    if biased:
        indices = flat_indices(scores, [row for row, _ in biased], [bias.token_ids for _, bias in biased])
        values = np.concatenate([bias.values for _, bias in biased])
        scores.view(-1).index_add_(0, *upload_arrays((indices, values), scores.device))
