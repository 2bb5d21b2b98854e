"""Matrix products with a weight in four bits: ``scale * (q - zero)`` with whole ``q`` of 0 to 15, and a scale and a
zero for each group of neighbouring inputs of each output channel.

Activations are rounded to int8 as for int8 weights (see ``packed_linear``). Sums within a group of weights are
integers, hence exact; groups are added in fp32 in their order. So a row of a result depends on its own inputs alone,
bit for bit.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quire_engine.kernels.bindings import DTYPES, Int4Call, library
from quire_engine.kernels.packed_linear import (
    GROUP,
    SIDE,
    STEP,
    by_panel,
    halves_of,
    on_huge_pages,
    panels_of,
    round_rows,
)

GROUP_SIZES = (32, 64, 128)
_EIGHT = 2 * STEP


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight ``scales * (q - zeros)`` [out, in], where ``group_size`` neighbouring inputs share a scale and a zero.

    ``q`` uint8 [out, in] of 0 to 15; ``scales`` and ``zeros`` floating-point [out, ceil(in / group_size)]. A zero need
    not be whole: Q4_K's minimum m is the zero m / scale, and a symmetric weight of -8 to 7 has zeros of 8. Raises
    ``ValueError`` for other shapes, dtypes and group sizes.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int

    def __post_init__(self) -> None:
        groups = (len(self.q), -(-self.q.shape[1] // self.group_size))
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"int4: groups of {self.group_size} inputs are not of {GROUP_SIZES}")
        if self.q.dtype is not torch.uint8 or self.scales.shape != groups or self.zeros.shape != groups:
            raise ValueError(
                f"int4: {self.q.dtype} {tuple(self.q.shape)} with scales {tuple(self.scales.shape)} and zeros "
                f"{tuple(self.zeros.shape)} is not uint8 [out, in] with groups {groups}"
            )

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32 [out, in]."""
        inputs = self.q.shape[1]
        scales, zeros = (
            each.float().repeat_interleave(self.group_size, dim=1)[:, :inputs] for each in (self.scales, self.zeros)
        )
        return scales * (self.q.float() - zeros)


class PackedInt4:
    """A quantised weight as the compiled kernel reads it: see ``int4.cpp``. Used by one thread at a time.

    Args: ``weight`` and ``bias`` [out] or None, which are copied, scales and zeros in fp16. ``dtype`` is that of the
    activations, bf16 or fp32.
    """

    __slots__ = ("_buffers", "_call", "_pointer", "_run")

    def __init__(self, kernels: ctypes.CDLL, weight: Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        outputs, inputs = weight.q.shape
        scales, channels = relative_scales(weight.scales.float())
        added = torch.zeros(outputs) if bias is None else bias.float()
        panels = pack_int4(weight.q, scales, weight.zeros.half(), weight.group_size)
        self._buffers = tuple(on_huge_pages(tensor) for tensor in (panels, by_panel(channels), by_panel(added)))
        self._call = Int4Call(
            *(tensor.data_ptr() for tensor in self._buffers),
            inputs=inputs,
            outputs=outputs,
            group=weight.group_size,
            bf16=int(dtype == torch.bfloat16),
        )
        self._pointer = ctypes.pointer(self._call)
        self._run = kernels.quire_int4_linear

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in self._buffers)

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """``x`` [T, in] with contiguous rows -> [T, out], or ``silu(gate) * up`` [T, out / 2] if ``gated``."""
        call, rows = self._call, x.shape[0]
        out = x.new_empty(rows, call.outputs // 2 if gated else call.outputs)
        call.x, call.stride, call.out = x.data_ptr(), x.stride(0), out.data_ptr()
        call.rows, call.gated, call.threads = rows, gated, torch.get_num_threads()
        self._run(self._pointer)
        return out


class PlainInt4:
    """``PackedInt4`` in torch, equal to the last rounding: used where there are no kernels, and as their reference."""

    __slots__ = ("_bias", "_channels", "_group", "_q", "_scales", "_zeros")

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None) -> None:
        self._q = _two_in_a_byte(weight.q)
        self._scales, self._channels = relative_scales(weight.scales.float())
        self._zeros = weight.zeros.half()
        self._group = weight.group_size
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        held = (self._q, self._scales, self._zeros, self._channels, self._bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """See ``PackedInt4.matmul``."""
        total = torch.zeros(len(x), len(self._q))
        groups = zip(self._scales.float().T, self._zeros.float().T, strict=True)
        first = 0
        for inputs in x.float().split(GROUP, dim=1):
            rounded, steps = round_rows(inputs)
            part = torch.zeros_like(total)
            for some in rounded.split(self._group, dim=1):
                scale, zero = next(groups)
                q = _nibbles(self._q[:, first // 2 : -(-(first + some.shape[1]) // 2)])[:, : some.shape[1]]
                # Whole numbers below 2^24 are added exactly in fp32.
                part += scale * F.linear(some, q.float())
                part -= scale * zero * some.sum(1, keepdim=True)
                first += some.shape[1]
            total += part * steps[:, None]
        total *= self._channels
        if self._bias is not None:
            total += self._bias
        if gated:
            gate, up = total.chunk(2, dim=1)
            total = F.silu(gate) * up
        return total.to(x.dtype)


def make_int4_product(weight: Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedInt4 | PlainInt4:
    """``PackedInt4`` where there are kernels for activations of ``dtype``, else ``PlainInt4``."""
    kernels = library() if dtype in DTYPES else None
    return PlainInt4(weight, bias) if kernels is None else PackedInt4(kernels, weight, bias, dtype)


def relative_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``scales`` [out, groups] as fp16, of which each channel's largest lies between a half and one, and the powers of
    two [out] in fp32 that they are relative to.
    """
    _, exponents = torch.frexp(scales.abs().amax(1))
    channels = torch.ldexp(torch.ones(len(scales)), exponents)
    return (scales / channels[:, None]).half(), channels


def pack_int4(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """``q`` uint8 [out, in] with ``scales`` and ``zeros`` fp16 [out, groups] -> uint8 [panels, groups, bytes], as in
    ``int4.cpp``.
    """
    outputs, inputs = q.shape
    groups, side = scales.shape[1], panels_of(outputs) * SIDE
    padded = torch.zeros(2, side, groups * group, dtype=torch.uint8)
    for half, part in zip(padded, halves_of(q), strict=True):
        half[: len(part), :inputs] = part
    low, high = padded.view(2, side, -1, 2, STEP).unbind(3)
    words = (low | high << 4).contiguous().view(torch.int32)  # [2, side, in / 8, 1]
    words = words.view(2, -1, SIDE, groups, group // _EIGHT).permute(1, 3, 4, 0, 2).contiguous()
    parts = [by_panel(part).view(torch.uint8).flatten(2) for part in (scales, zeros)]
    return torch.cat((*parts, words.view(torch.uint8).flatten(2)), dim=2)


def _two_in_a_byte(q: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] of at most 15 -> uint8 [out, ceil(in / 2)], the first of two in the low half."""
    padded = F.pad(q, (0, q.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_two_in_a_byte`` -> uint8 [out, in], in even."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
