"""Linear layers whose weights keep their dtype.

``PackedLinear`` packs its weight once for the processor. By default torch lets oneDNN or MKL rearrange the weight in
every call. Here it is rearranged once, and the plain copy is freed. The library that multiplies depends on the
processor and the dtype:

* ``kernels.linear``, if it uses the best available instructions. For fp32 that means AVX2 or AVX-512. For bf16 it means
  the bf16 products of AVX-512, unless there are matrix registers (AMX), or AVX2 alone. One packing serves any number of
  rows, and a row's result has the same bits in every batch.
* oneDNN with a weight that it packed, elsewhere on the CPU in bf16 and fp32. It sums in another order for other numbers
  of rows. MKL's own packing was slower. With AVX2 alone oneDNN has no bf16.
* ``F.linear`` for all else: fp16, which few processors multiply well, and other devices.

With ``deterministic`` the kernel is used on every processor. Without a kernel, rows are multiplied one by one.

The table shows the time of oneDNN (packed) and of ``F.linear`` relative to the kernel's, for M rows on one core with
AVX-512 and bf16 products, torch 2.13, with weights that no cache holds. ``python -m tests.bench.linear`` repeats the
measurement.

    ===============  =========  =========  =========  =========  =========
    [out, in] dtype  M = 1      M = 8      M = 32     M = 128    M = 2048
    ===============  =========  =========  =========  =========  =========
    3072, 576 bf16   1.26 2.4   1.66 2.5   1.47 1.8   1.12 1.2   1.02 1.1
    576, 1536 bf16   1.14 2.3   1.51 2.1   1.33 1.7   1.13 1.2   1.03 1.1
    49152, 576 bf16  1.18 2.3   1.39 2.2   1.21 1.5   1.04 1.1
    2048, 2048 bf16  1.20 2.3   1.53 2.4   1.38 1.7   1.05 1.1   0.97 1.0
    3072, 576 fp32   1.17 2.3   1.57 3.4   1.36 3.1   1.05 2.5   0.99 2.3
    2048, 2048 fp32  0.98 1.5   1.46 3.2   1.17 2.7   0.97 2.2   0.95 2.2
    ===============  =========  =========  =========  =========  =========

With AVX2 alone (AMD Zen) the same shapes in fp32 gave 0.93 to 1.67 for oneDNN and 0.88 to 3.1 for ``F.linear``. Only
one row with a square weight was below 1. In bf16, for which torch has no instructions there, ``F.linear`` took 1.6 to 2
times as long with one row, and 7.5 to 9.7 times with more.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from quire_engine.kernels.batch_invariant import batch_invariant_linear
from quire_engine.kernels.ops import silu_mul
from quire_engine.kernels.packed_linear import in_arena, is_fast, pack_weight
from quire_engine.quantization.base import DenseMethod, Linear

_EXPECTED_ROWS = 32
# The largest difference, relative to the largest output, that two orders of summation may cause. The bound for fp32
# also rejects products that round their operands to fewer bits.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

MatMul = Callable[[torch.Tensor], torch.Tensor]


class UnquantizedMethod(DenseMethod):
    """Layers store their weight in the model's dtype."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        config = self.options.config
        if not weight.is_cpu:
            weight = in_arena(weight)
        if config.deterministic and weight.is_cuda:
            return BatchInvariantLinear(weight, bias)
        # Only the compiled kernel reads a weight in place, even from a file.
        return PackedLinear(weight, bias, deterministic=config.deterministic or config.weights_memory_gb is not None)


class PackedLinear:
    """Computes ``x @ weight.T + bias`` for a constant weight.

    Args: ``weight`` [out, in] and ``bias`` [out] or None, of one dtype and device. The layer keeps no reference to
    ``weight`` after packing, so the caller can free it by dropping it; a caller that keeps it (a tied embedding) holds
    both copies. With ``deterministic``, a row of a result depends only on that row of ``x``, bit for bit. ``packed`` is
    the weight for the compiled kernel, if that multiplies. Call it from one thread at a time.
    """

    __slots__ = ("_matmul", "_matmul_silu_mul", "in_features", "is_packed", "out_features", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False) -> None:
        self._matmul: MatMul
        self._matmul_silu_mul: MatMul
        self.out_features, self.in_features = weight.shape
        self.packed = own = pack_weight(weight, bias) if deterministic or is_fast(weight.dtype) else None
        if own is not None:
            self.is_packed, self._matmul, self._matmul_silu_mul = True, own.matmul, own.matmul_silu_mul
            return
        packed = None if deterministic else _onednn_packed_matmul(weight, bias)
        self.is_packed = packed is not None
        product = packed or _plain_matmul(weight, bias)
        product = self._matmul = _matmul_row_by_row(product) if deterministic else product
        self._matmul_silu_mul = lambda x: silu_mul(product(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``x`` [T, in], of the weight's dtype and device, to [T, out]."""
        return self._matmul(x)

    def forward_silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Applies ``silu_mul`` to the result of a call. See ``with_activation``."""
        return self._matmul_silu_mul(x)


def _plain_matmul(weight: torch.Tensor, bias: torch.Tensor | None) -> MatMul:
    return lambda x: F.linear(x, weight, bias)


def _matmul_row_by_row(matmul: MatMul) -> MatMul:
    """Multiplies one row at a time, each in fresh memory, because libraries choose an order of summation by the number
    of rows and their alignment.
    """
    return lambda x: torch.cat([matmul(row.clone()) for row in x.split(1)]) if len(x) else matmul(x)


def _onednn_packed_matmul(weight: torch.Tensor, bias: torch.Tensor | None) -> MatMul | None:
    """Returns the product with a weight that oneDNN has packed. Returns None if oneDNN does not support it, or if its
    result differs from ``F.linear``'s.

    torch's packing operators are private and may be missing or change, so any error they raise counts as not supported.
    """
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE or weight.numel() == 0:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise

        def product(x: torch.Tensor) -> torch.Tensor:
            return linear(x, packed, bias, "none", [], "")

        return product if _agrees_with_torch(product, weight, bias) else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _agrees_with_torch(matmul: MatMul, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compares ``matmul`` with ``F.linear`` on noise."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[1], generator=noise).to(weight.dtype)
    expected = F.linear(x, weight, bias).float()
    error = (matmul(x).float() - expected).abs().amax()
    return bool(error <= _TOLERANCE[weight.dtype] * expected.abs().amax())


class BatchInvariantLinear:
    """A ``Linear`` on a GPU. Each row of a result depends only on that row of the input, bit for bit.

    ``weight`` [out, in] and ``bias`` [out] or None, in bf16 or fp16.
    """

    __slots__ = ("_bias", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.__call__``."""
        return batch_invariant_linear(x, self._weight, self._bias)
