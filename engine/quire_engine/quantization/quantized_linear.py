"""``QuantizedLinear``: the base of all layers that multiply integers on the CPU."""

from typing import Protocol

import torch

from quire_engine.kernels.packed_groups import GroupedWeight, make_group_product
from quire_engine.kernels.packed_linear import PackedProduct


class Product(Protocol):
    """A matrix product with a packed weight."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        ...

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """Maps ``x`` [T, in] with contiguous rows to [T, out], or to ``silu(gate) * up`` [T, out / 2] if ``gated``."""
        ...


class QuantizedLinear:
    """A ``Linear`` of ``shape`` [out, in] on the CPU, for activations of ``dtype``. It keeps only what ``product``
    stores of weight and bias, in ``bits``. A row of a result depends only on its own inputs, bit for bit.
    """

    __slots__ = ("_dtype", "_product", "bits", "in_features", "out_features")

    def __init__(self, product: Product, shape: torch.Size, bits: int, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = shape
        self.bits = bits
        self._product, self._dtype = product, dtype

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._product.nbytes

    @property
    def packed(self) -> PackedProduct | None:
        """The weight for the compiled kernel, or None if torch multiplies."""
        return self._product if isinstance(self._product, PackedProduct) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._product.matmul(self._checked(x), gated=False)

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Applies ``silu_mul`` to the result of a call, without rounding gate and up first. See ``with_activation``."""
        if self.out_features % 2:
            raise ValueError(f"{self.out_features} outputs are not a gate and as many to multiply with it")
        return self._product.matmul(self._checked(x), gated=True)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` with contiguous rows, as the kernel needs. Raises ``ValueError`` for another shape, dtype or
        device.
        """
        if x.dtype is not self._dtype or not x.is_cpu or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"int{self.bits}: {x.dtype} {tuple(x.shape)} on {x.device} is not {self._dtype} [T, {self.in_features}]"
            )
        return x if x.stride(1) == 1 else x.contiguous()


class GroupedLinear(QuantizedLinear):
    """A layer with a weight of 4 or 8 bits and a scale for each group of inputs."""

    __slots__ = ()

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(make_group_product(weight, bias, dtype), weight.q.shape, weight.bits, dtype)
