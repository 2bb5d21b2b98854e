"""A linear layer whose weight is packed once for the processor. It knows nothing of models and of how weights
are named.

On the CPU torch's ``F.linear`` lets oneDNN (bf16) or MKL (fp32) rearrange the weight in every call. Here
oneDNN rearranges it once, and the plain copy is let go. Measured on two cores (AVX-512 with
bf16 products), torch 2.13, medians of calls in alternation, as time of ``F.linear`` over time packed:

    ===============  =====  =====  =====  ======  ========
    [out, in] dtype  M = 1  M = 8  M = 32  M = 64  M = 2048
    ===============  =====  =====  =====  ======  ========
    3072, 576 bf16     2.2    1.7     1.4     1.3       1.05
    49152, 576 bf16    1.4    1.5     1.4     1.2
    3072, 576 fp32     3.0    2.7     2.9     3.0       2.3
    49152, 576 fp32    3.7    4.6     3.3     3.5
    ===============  =====  =====  =====  ======  ========

MKL's own packing (``mkl._mkl_reorder_linear_weight``) gained only at M = 1, where oneDNN was still 1.8 times
as fast, so both dtypes go through oneDNN. The number of rows given as a hint made no difference from 1 to
2048; one packing serves decode and prefill. fp16 has no good product on most processors and is left to
``F.linear``, as is everything that is not on a CPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional as F

from quire_engine.kernels.fused import silu_mul
from quire_engine.models.options import LoadOptions

_HINTED_ROWS = 32
# What two orders of summation may differ by, relative to the largest output. The bound for fp32 also refuses
# products that round their operands to fewer bits.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

Product = Callable[[torch.Tensor], torch.Tensor]


class Linear(Protocol):
    """``x @ weight.T + bias`` for a weight [out, in] that never changes, however it is held."""

    @property
    def in_features(self) -> int:
        """Numbers of an input row."""
        ...

    @property
    def out_features(self) -> int:
        """Numbers of an output row."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out], both of the model's dtype and device."""
        ...

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` [T, out / 2], where the first half of the outputs is the gate and the second ``up``."""
        ...


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, options: LoadOptions) -> Linear:
    """The layer of ``weight`` [out, in] and ``bias`` [out], held as ``options`` say. Raises ``ModelError``."""
    del options
    return PackedLinear(weight, bias)


class PackedLinear:
    """``x @ weight.T + bias`` for a weight that never changes.

    Args: ``weight`` [out, in] and ``bias`` [out] or None, of one dtype and device. The layer keeps no
    reference to ``weight`` once it is packed, so it is freed when the caller drops it; a caller that keeps it
    (a tied embedding) holds both copies.
    """

    __slots__ = ("_product", "in_features", "out_features", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        packed = _packed_product(weight, bias)
        self.packed = packed is not None
        self._product = packed or _plain_product(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in], of the weight's dtype and device -> [T, out]."""
        return self._product(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.gated``."""
        return silu_mul(self(x))


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """The product with a packed weight, or None where there is no such thing or its result is not the plain
    one's.

    torch's packing operators are private, and may be missing or change. Hence whatever they raise means: do
    without.
    """
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE or weight.numel() == 0:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINTED_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise

        def product(x: torch.Tensor) -> torch.Tensor:
            return linear(x, packed, bias, "none", [], "")

        return product if _agrees(product, weight, bias) else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _agrees(product: Product, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compares with ``F.linear`` on noise."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[1], generator=noise).to(weight.dtype)
    expected = F.linear(x, weight, bias).float()
    error = (product(x).float() - expected).abs().amax()
    return bool(error <= _TOLERANCE[weight.dtype] * expected.abs().amax())
