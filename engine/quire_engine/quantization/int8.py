"""Weights in int8, quantized when a checkpoint with plain weights is read, with one scale per output channel."""

import torch

from quire_engine.kernels.packed_linear import make_product, quantize
from quire_engine.quantization.base import DenseMethod, Embedding, Linear
from quire_engine.quantization.quantized_linear import QuantizedLinear


class Int8Method(DenseMethod):
    """Layers store their weight in int8. Embeddings stay as they are."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        return Int8Linear(weight, bias)


class Int8TableMethod(DenseMethod):
    """Heads and embeddings store their weight in int8. Tied ones share it."""

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


class Int8Linear(QuantizedLinear):
    """A ``Linear`` with its weight in int8: accurate to about two digits, in half of bf16's memory.

    Args: ``weight`` [out, in] and ``bias`` [out] or None, of one dtype, on the CPU.
    """

    __slots__ = ("_table",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._hold(*quantize(weight), bias, weight.dtype)

    @classmethod
    def from_quantized(
        cls, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> "Int8Linear":
        """Makes a layer from ``weight`` int8 [out, in] and ``scales`` fp32 [out], for activations of ``dtype``. The
        kernel treats -128 like any other number.
        """
        layer = cls.__new__(cls)
        layer._hold(weight, scales, bias, dtype)
        return layer

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._table = make_product(weight, scales, bias, dtype)
        super().__init__(self._table, weight.shape, 8, dtype)

    def rows(self, channels: torch.Tensor) -> torch.Tensor:
        """Returns rows of the weight, like an ``Embedding``."""
        return self._table.rows(channels).to(self._dtype)
