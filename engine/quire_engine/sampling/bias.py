"""Logit bias: a constant that a request adds to the scores of tokens it names."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quire_proto.sampling import SamplingParams

from quire_engine.device.transfers import upload_arrays
from quire_engine.sampling.cells import FloatArray, TokenArray, cells


@dataclass(frozen=True, slots=True)
class Bias:
    """What to add to which tokens, each of them named once."""

    token_ids: TokenArray
    values: FloatArray

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "Bias | None":
        """The bias that ``params`` ask for; tokens outside of the vocabulary have none."""
        pairs = [pair for pair in params.logit_bias if 0 <= pair[0] < vocab_size]
        if not pairs:
            return None
        token_ids, values = zip(*pairs, strict=True)
        return cls(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))


def add_bias(scores: torch.Tensor, biased: Sequence[tuple[int, Bias]]) -> None:
    """Adds to ``scores`` [R, V] float32, in place, the bias of each row named."""
    if biased:
        places = cells(scores, [row for row, _ in biased], [bias.token_ids for _, bias in biased])
        values = np.concatenate([bias.values for _, bias in biased])
        scores.view(-1).index_add_(0, *upload_arrays((places, values), scores.device))
