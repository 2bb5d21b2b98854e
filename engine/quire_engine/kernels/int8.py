"""Products of weights in int8 with activations that are rounded to int8 on the way (dynamic quantisation). They know
tensors, and nothing of models.

A weight has one scale for each output channel; activations have one for each ``GROUP`` numbers of each row, found anew
in every call, so that an outlier takes the digits of its own group only. Sums within a group are integers, hence exact;
groups are added in fp32 in their order. A row of a result therefore depends on its own inputs alone, bit for bit.
"""

import ctypes

import torch
from torch.nn import functional as F

from quire_engine.kernels.huge_pages import on_huge_pages
from quire_engine.kernels.library import DTYPES, Int8Call, library

GROUP = 128
"""Activations of a row that share a scale."""

SIDE, STEP = 16, 4  # the measures of a panel, as in int8.cpp
_LARGEST, _SMALLEST = 127, 1e-35  # a group or channel below the latter counts as zero
_NUMBERS_AT_ONCE = 1 << 22


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [out, in] as int8 [out, in], symmetric, and fp32 scales [out]: ``int8 * scale`` is near ``weight``.

    A channel with a number that is not finite gets a scale that is not finite.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    rows = max(1, _NUMBERS_AT_ONCE // max(1, weight.shape[1]))
    for part, into, scale in zip(weight.split(rows), rounded.split(rows), scales.split(rows), strict=True):
        values, scale[:] = _round(part.float())
        into.copy_(values)
    return rounded, scales


class PackedInt8:
    """A quantised weight as the compiled kernel reads it: see ``int8.cpp``. Used by one thread at a time.

    Args: ``weight`` int8 [out, in] and ``scales`` fp32 [out] as ``quantize`` makes them, ``bias`` [out] or None.
    None of them is kept. ``dtype`` is that of the activations, bf16 or fp32.
    """

    __slots__ = ("_call", "_held", "_pointer", "_run")

    def __init__(
        self,
        kernels: ctypes.CDLL,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        outputs, inputs = weight.shape
        bias = torch.zeros_like(scales) if bias is None else bias.float()
        self._held = tuple(on_huge_pages(tensor) for tensor in (pack_int8(weight), _by_panel(scales), _by_panel(bias)))
        panels, scales, bias = (tensor.data_ptr() for tensor in self._held)
        self._call = Int8Call(panels, scales, bias, inputs=inputs, outputs=outputs, bf16=int(dtype == torch.bfloat16))
        self._pointer = ctypes.pointer(self._call)
        self._run = kernels.quire_int8_linear

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in self._held)

    def product(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """``x`` [T, in], whose rows have no gaps -> [T, out], or [T, out / 2] if ``gated``: see ``Linear.gated``."""
        call, rows = self._call, x.shape[0]
        out = x.new_empty(rows, call.outputs // 2 if gated else call.outputs)
        call.x, call.stride, call.out = x.data_ptr(), x.stride(0), out.data_ptr()
        call.rows, call.gated, call.threads = rows, gated, torch.get_num_threads()
        self._run(self._pointer)
        return out


class PlainInt8:
    """The same in torch, to the last rounding: where there are no kernels, and what they are held against."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._scales = weight, scales
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in (self._weight, self._scales, self._bias) if tensor is not None)

    def product(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """See ``PackedInt8.product``."""
        total = torch.zeros(len(x), len(self._weight))
        for inputs, weight in zip(x.float().split(GROUP, dim=1), self._weight.split(GROUP, dim=1), strict=True):
            rounded, scales = _round(inputs)
            total += _exact_product(rounded, weight) * scales[:, None]
        total *= self._scales
        if self._bias is not None:
            total += self._bias
        if gated:
            gate, up = total.chunk(2, dim=1)
            total = F.silu(gate) * up
        return total.to(x.dtype)


def make_product(
    weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedInt8 | PlainInt8:
    """The compiled product where the kernels and ``dtype``, which is that of the activations, allow it."""
    kernels = library() if dtype in DTYPES else None
    return PlainInt8(weight, scales, bias) if kernels is None else PackedInt8(kernels, weight, scales, bias, dtype)


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] -> uint8 [panels, ceil(in / STEP), 2, SIDE, STEP], 128 added to each."""
    outputs, inputs = weight.shape
    side = _panels(outputs) * SIDE
    padded = torch.zeros(2, side, -(-inputs // STEP) * STEP, dtype=torch.int8)
    for half, part in zip(padded, _halves(weight), strict=True):
        half[: len(part), :inputs] = part
    words = padded.view(torch.int32).view(2, -1, SIDE, padded.shape[2] // STEP).permute(1, 3, 0, 2).contiguous()
    return words.view(torch.uint8).view(*words.shape, STEP).bitwise_xor_(128)


def _by_panel(numbers: torch.Tensor) -> torch.Tensor:
    """fp32 [out] -> [panels, 2, SIDE], in the order of the channels of ``pack``."""
    padded = torch.zeros(2, _panels(len(numbers)) * SIDE)
    for half, part in zip(padded, _halves(numbers), strict=True):
        half[: len(part)] = part
    return padded.view(2, -1, SIDE).transpose(0, 1).contiguous()


def _halves(channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = (len(channels) + 1) // 2
    return channels[:middle], channels[middle:]


def _panels(outputs: int) -> int:
    return -(-((outputs + 1) // 2) // SIDE)


def _exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, N], whole numbers in fp32, by int8 ``weight`` [out, N], without rounding -> [T, out].

    torch's product of integers is private, and wrong for N = 1 (torch 2.13). Without it: fp32 adds integers below
    2^24, as the sums of a group are, exactly in any order.
    """
    multiply = getattr(torch, "_int_mm", None)
    if multiply is None or not len(x) or x.shape[1] == 1:
        return F.linear(x, weight.float())
    product: torch.Tensor = multiply(x.to(torch.int8), weight.t())
    return product


def _round(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [R, N] as whole numbers in fp32, of which the largest of each row is 127, and the scales [R]."""
    most = rows.abs().amax(1)
    vanishes = most < _SMALLEST
    inverse = torch.where(vanishes, 0, _LARGEST / most)
    values = (rows * inverse[:, None]).round_().nan_to_num_(0, 0, 0)
    return values, torch.where(vanishes, 0, most / _LARGEST)
