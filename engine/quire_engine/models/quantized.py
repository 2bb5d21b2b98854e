"""A linear layer whose weight is held in int8 for the processor. It knows nothing of models and of how weights are
named.
"""

import torch

from quire_engine.kernels.int8 import make_product, quantize


class Int8Linear:
    """``x @ weight.T + bias`` to about two digits, from half of bf16's memory. A ``Linear``.

    Args: ``weight`` [out, in] and ``bias`` [out] or None, of one dtype, on the CPU. The layer keeps neither.
    A row of a result depends on its own inputs alone, bit for bit.
    """

    __slots__ = ("_dtype", "_matmul", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self._matmul = make_product(*quantize(weight), bias, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._matmul.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._matmul.product(self._checked(x), gated=False)

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.gated``; gate and up are not rounded before they meet."""
        if self.out_features % 2:
            raise ValueError(f"{self.out_features} outputs are not a gate and as many to multiply with it")
        return self._matmul.product(self._checked(x), gated=True)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, as the compiled kernel may read it."""
        if x.dtype is not self._dtype or not x.is_cpu or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"int8: {x.dtype} {tuple(x.shape)} on {x.device} is not {self._dtype} [T, {self.in_features}]"
            )
        return x if x.stride(1) == 1 else x.contiguous()
