"""Products with a weight in bf16 or fp32 that never changes, packed once. They know tensors, and nothing of models.

All products of an output are summed in fp32 in the order of its inputs, whatever else is computed with it, and
rounded once: a row of a result depends on its own inputs alone, bit for bit.
"""

import ctypes

import torch

from quire_engine.kernels.fused import silu_mul
from quire_engine.kernels.huge_pages import empty_on_huge_pages
from quire_engine.kernels.library import DTYPES, LinearLayer, library


class PackedWeight:
    """A weight [out, in] and perhaps a bias [out] as the compiled kernel reads them: see ``linear.cpp``.

    Args: ``weight`` and ``bias`` of one of ``DTYPES``, on the CPU. The weight is copied, the bias kept.

    Calls take ``x`` [T, in] of the same dtype, on the CPU, with rows anywhere; ``ValueError`` for anything else. One
    thread calls at a time.
    """

    __slots__ = ("_dtype", "_held", "_inputs", "_layer", "_outputs", "_pointer", "_run")

    def __init__(self, kernels: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        self._dtype = weight.dtype
        self._layer = _describe(kernels, weight.dtype, self._outputs, self._inputs)
        self._pointer, self._run = ctypes.pointer(self._layer), kernels.quire_linear
        room = empty_on_huge_pages(self._layer.bytes)
        self._layer.weight = room.data_ptr()
        plain = weight.detach().contiguous()
        kernels.quire_linear_pack(self._pointer, plain.data_ptr(), torch.get_num_threads())
        added = None if bias is None else bias.detach().to(weight.dtype).expand(self._outputs).contiguous()
        self._layer.bias = None if added is None else added.data_ptr()
        self._held = (room, added)

    @property
    def nbytes(self) -> int:
        """Memory that the packed weight takes, in bytes."""
        return int(self._layer.bytes)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` -> [T, out]."""
        return self._product(x, self._outputs, 0)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu_mul(product(x))`` [T, out / 2], with the same roundings, in one pass."""
        if not self._layer.paired:
            return silu_mul(self.product(x))
        return self._product(x, self._outputs // 2, 1)

    def _product(self, x: torch.Tensor, width: int, gated: int) -> torch.Tensor:
        _check(x, self._dtype, self._inputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, call = x.shape[0], self._layer  # one struct: ctypes takes a microsecond for seven arguments
        out = torch.empty((rows, width), dtype=self._dtype)
        call.x, call.stride, call.rows = x.data_ptr(), x.stride(0), rows
        call.out, call.gated, call.threads = out.data_ptr(), gated, torch.get_num_threads()
        self._run(self._pointer)
        return out


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the kernel for weights of ``dtype`` uses the best instructions of this processor."""
    kernels = library() if dtype in DTYPES else None
    if kernels is None:
        return False
    return bool(_describe(kernels, dtype, 1, 1).fast)


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight | None:
    """The packed weight, or None where there is no kernel for it."""
    if weight.dtype not in DTYPES or not weight.is_cpu or weight.numel() == 0:
        return None
    kernels = library()
    return None if kernels is None else PackedWeight(kernels, weight, bias)


def _describe(kernels: ctypes.CDLL, dtype: torch.dtype, outputs: int, inputs: int) -> LinearLayer:
    layer = LinearLayer(inputs=inputs, outputs=outputs, bf16=int(dtype is torch.bfloat16))
    kernels.quire_linear_describe(ctypes.byref(layer))
    return layer


def _check(x: torch.Tensor, dtype: torch.dtype, inputs: int) -> None:
    if x.dtype is not dtype or x.dim() != 2 or x.shape[1] != inputs or not x.is_cpu:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} on {x.device.type} is not {dtype} [T, {inputs}] on the CPU")
