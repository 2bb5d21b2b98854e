"""Weights in int8, made as a checkpoint with plain weights is read: one scale for each output channel."""

import torch

from quire_engine.kernels.packed_linear import make_product, quantize
from quire_engine.quantization.base import DenseMethod, Embedding, Linear


class Int8Method(DenseMethod):
    """Layers hold their weight in int8. Embeddings stay as they are."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        return Int8Linear(weight, bias)


class Int8TableMethod(DenseMethod):
    """Heads and embeddings are held in int8, and as one where they are tied."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        return Int8Linear(weight, bias)

    def pack_embedding(self, table: torch.Tensor) -> Embedding:
        """See ``DenseMethod.pack_embedding``."""
        return Int8Linear(table).rows

    def pack_tied(self, table: torch.Tensor) -> tuple[Embedding, Linear]:
        """See ``DenseMethod.pack_tied``."""
        head = Int8Linear(table)
        return head.rows, head


class Int8Linear:
    """A ``Linear`` whose weight is held in int8: accurate to about two digits, in half of bf16's memory.

    Args: ``weight`` [out, in] and ``bias`` [out] or None, of one dtype, on the CPU. The layer keeps neither.
    A row of a result depends on its own inputs alone, bit for bit.
    """

    __slots__ = ("_dtype", "_matmul", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._hold(*quantize(weight), bias, weight.dtype)

    @classmethod
    def from_quantized(
        cls, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> "Int8Linear":
        """The layer of a ``weight`` int8 [out, in] and ``scales`` fp32 [out], for activations of ``dtype``. The kernel
        has -128 as any other number.
        """
        layer = cls.__new__(cls)
        layer._hold(weight, scales, bias, dtype)
        return layer

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._dtype = dtype
        self._matmul = make_product(weight, scales, bias, dtype)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._matmul.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._matmul.matmul(self._checked(x), gated=False)

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.forward_silu_mul``; gate and up are not rounded before they are multiplied."""
        if self.out_features % 2:
            raise ValueError(f"{self.out_features} outputs are not a gate and as many to multiply with it")
        return self._matmul.matmul(self._checked(x), gated=True)

    def rows(self, channels: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as an ``Embedding`` returns them."""
        return self._matmul.rows(channels).to(self._dtype)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with contiguous rows, as the kernel needs. Raises ``ValueError`` for another shape, dtype or device."""
        if x.dtype is not self._dtype or not x.is_cpu or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"int8: {x.dtype} {tuple(x.shape)} on {x.device} is not {self._dtype} [T, {self.in_features}]"
            )
        return x if x.stride(1) == 1 else x.contiguous()
