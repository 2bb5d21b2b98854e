"""A linear layer on a GPU whose every row of results depends on that row of its input alone, bit for bit."""

import torch

from quire_engine.kernels.fused import silu_mul
from quire_engine.kernels.invariant import batch_invariant_linear


class BatchInvariantLinear:
    """``x @ weight.T + bias``. A ``Linear``. ``weight`` [out, in] and ``bias`` [out] or None, in bf16 or fp16."""

    __slots__ = ("_bias", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.__call__``."""
        return batch_invariant_linear(x, self._weight, self._bias)

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.gated``."""
        return silu_mul(self(x))
