"""Matrix products with a weight of 4 or 8 bits that has a scale for each group of adjacent inputs of each output
channel. With 4 bits the weight is ``scale * (q - zero)`` with integers ``q`` of 0 to 15, with 8 bits ``scale * q`` with
``q`` in int8.

Activations are rounded to int8 as for int8 weights (see ``packed_linear``). Sums within a group of weights are integers
and so exact. Groups are added in fp32 in order, so a row of a result depends only on its own inputs, bit for bit.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quire_engine.kernels.bindings import DTYPES, GroupsCall, library
from quire_engine.kernels.packed_linear import GROUP, STEP, PackedProduct, by_panel, pack_bytes, round_rows

GROUP_SIZES = {4: (32, 64, 128), 8: (16, 32, 64, 128)}
"""The supported group sizes, by bits."""
_EIGHT = 2 * STEP


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [out, in] in which ``group_size`` adjacent inputs share a scale: ``scales * (q - zeros)`` with 4 bits,
    ``scales * q`` with 8.

    ``q`` [out, in] is uint8 of 0 to 15, or int8. ``scales`` and, with 4 bits, ``zeros`` are floating-point [out,
    ceil(in / group_size)]. A zero need not be an integer: Q4_K's minimum m is the zero m / scale, and a symmetric
    weight of -8 to 7 has zeros of 8. Raises ``ValueError`` for other shapes, dtypes and group sizes.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        groups = (len(self.q), -(-self.q.shape[1] // self.group_size))
        if self.group_size not in GROUP_SIZES[self.bits]:
            raise ValueError(f"int{self.bits}: groups of {self.group_size} inputs are not of {GROUP_SIZES[self.bits]}")
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        zeros = self.scales if self.zeros is None else self.zeros
        if self.q.dtype is not dtype or self.scales.shape != groups or zeros.shape != groups:
            raise ValueError(
                f"int{self.bits}: {self.q.dtype} {tuple(self.q.shape)} with scales {tuple(self.scales.shape)} and "
                f"zeros {tuple(zeros.shape)} is not {dtype} [out, in] with groups {groups}"
            )

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 8 if self.zeros is None else 4

    def dequantize(self) -> torch.Tensor:
        """Returns the weight in fp32 [out, in]."""
        q = self.q.float()
        return self._spread(self.scales) * (q if self.zeros is None else q - self._spread(self.zeros))

    def _spread(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.float().repeat_interleave(self.group_size, dim=1)[:, : self.q.shape[1]]


class PackedGroups(PackedProduct):
    """A ``GroupedWeight`` in the layout of ``groups.cpp``.

    Args: ``weight`` and ``bias`` [out] or None, which are copied, with scales and zeros in fp16. ``dtype`` is the dtype
    of activations, bf16 or fp32.
    """

    __slots__ = ()

    def __init__(
        self, kernels: ctypes.CDLL, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        outputs, inputs = weight.q.shape
        scales, channels = relative_scales(weight.scales.float())
        added = torch.zeros(outputs) if bias is None else bias.float()
        panels = pack_groups(weight.q, scales, None if weight.zeros is None else weight.zeros.half(), weight.group_size)
        call = GroupsCall(
            inputs=inputs,
            outputs=outputs,
            bits=weight.bits,
            group=weight.group_size,
            bf16=int(dtype == torch.bfloat16),
        )
        super().__init__(kernels.quire_groups_linear, (panels, by_panel(channels), by_panel(added)), call)


class PlainGroups:
    """``PackedGroups`` in torch, equal up to the last rounding. Used without kernels, and as the kernel's reference."""

    __slots__ = ("_bias", "_channels", "_group", "_q", "_scales", "_zeros")

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None) -> None:
        self._q = weight.q if weight.zeros is None else _two_in_a_byte(weight.q)
        self._scales, self._channels = relative_scales(weight.scales.float())
        self._zeros = None if weight.zeros is None else weight.zeros.half()
        self._group = weight.group_size
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        held = (self._q, self._scales, self._zeros, self._channels, self._bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def matmul(self, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
        """See ``PackedProduct.matmul``."""
        total = torch.zeros(len(x), len(self._q))
        group = first = 0
        for inputs in x.float().split(GROUP, dim=1):
            rounded, steps = round_rows(inputs)
            part = torch.zeros_like(total)
            for some in rounded.split(self._group, dim=1):
                scale = self._scales[:, group].float()
                # fp32 adds integers below 2^24 exactly.
                part += scale * F.linear(some, self._columns(first, some.shape[1]))
                if self._zeros is not None:
                    part -= scale * self._zeros[:, group].float() * some.sum(1, keepdim=True)
                group, first = group + 1, first + some.shape[1]
            total += part * steps[:, None]
        total *= self._channels
        if self._bias is not None:
            total += self._bias
        if gated:
            gate, up = total.chunk(2, dim=1)
            total = F.silu(gate) * up
        return total.to(x.dtype)

    def _columns(self, first: int, count: int) -> torch.Tensor:
        """Returns ``count`` of the integers of all outputs, in fp32."""
        if self._zeros is None:
            return self._q[:, first : first + count].float()
        return _nibbles(self._q[:, first // 2 : -(-(first + count) // 2)])[:, :count].float()


def make_group_product(
    weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedGroups | PlainGroups:
    """Returns ``PackedGroups`` if there are kernels for activations of ``dtype``, else ``PlainGroups``."""
    kernels = library() if dtype in DTYPES else None
    return PlainGroups(weight, bias) if kernels is None else PackedGroups(kernels, weight, bias, dtype)


def relative_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits ``scales`` [out, groups] into fp16 factors and fp32 powers of two [out], one per channel. The largest
    factor of each channel is between 0.5 and 1.
    """
    _, exponents = torch.frexp(scales.abs().amax(1))
    channels = torch.ldexp(torch.ones(len(scales)), exponents)
    return (scales / channels[:, None]).half(), channels


def pack_groups(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> torch.Tensor:
    """Packs ``q`` [out, in] with ``scales`` and, for 4 bits, ``zeros``, both fp16 [out, groups], to uint8 [panels,
    groups, bytes] in the layout of ``groups.cpp``.
    """
    groups = scales.shape[1]
    words = pack_bytes(q, groups * group)  # [panels, in / STEP, 2, SIDE, STEP]
    if zeros is None:
        words = words.bitwise_xor_(128)
    else:
        low, high = words.unflatten(1, (-1, 2)).unbind(2)
        words = low | high << 4
    headers = [by_panel(part).view(torch.uint8).flatten(2) for part in (scales, zeros) if part is not None]
    return torch.cat((*headers, words.reshape(len(words), groups, -1)), dim=2)


def _two_in_a_byte(q: torch.Tensor) -> torch.Tensor:
    """Packs uint8 [out, in] of at most 15 to uint8 [out, ceil(in / 2)], the first of two in the low half."""
    padded = F.pad(q, (0, q.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_two_in_a_byte``. Returns uint8 [out, in] with an even number of inputs."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
