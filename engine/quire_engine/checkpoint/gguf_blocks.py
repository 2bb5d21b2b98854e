"""Dequantises the blocks of GGUF tensors: numbers that share scales (ggml's ``block_q4_K`` and others)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype).float()


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Returns the fp16 number at byte ``begin`` of each block, as fp32 [blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 2 n]: all low halves, then all high ones."""
    return torch.cat((numbers & 15, numbers >> 4), dim=1)


def _fifth_bits(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Returns the 32 bits at byte ``begin`` as uint8 [blocks, 32], each 0 or 16."""
    bits = blocks[:, begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _dequantized(_whole_q5_0(blocks))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _dequantized(_whole_q8_0(blocks))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima of the eight groups of 32 numbers of Q4_K and Q5_K, fp32 [blocks, 8, 1] each. Each is
    six bits times an fp16 number of the block.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return (_half(blocks, 0) * scales.float())[:, :, None], (_half(blocks, 2) * minima.float())[:, :, None]


def _k_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 128] -> [blocks, 8, 32]."""
    chunks = numbers.unflatten(1, (4, 32))
    return torch.stack((chunks & 15, chunks >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    return (scales * _k_nibbles(blocks[:, 16:]).float() - minima).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    fifth = (blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1).transpose(1, 2) << 4
    return (scales * (_k_nibbles(blocks[:, 48:]) | fifth).float() - minima).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    return _dequantized(_whole_q6_k(blocks))


DEQUANTIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""For each of ``gguf.BLOCKS``: uint8 [blocks, nbytes] -> fp32 [blocks, numbers]."""


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """Weights as whole numbers, equal to ``(values - zeros) * scales``. ``values`` [blocks, groups, numbers] are uint8
    below 16 with zeros, or int8 without. ``scales`` and ``zeros`` are fp32 [blocks, groups].
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def _dequantized(whole: WholeNumbers) -> torch.Tensor:
    return (whole.scales[:, :, None] * whole.values.float()).flatten(1)


def _whole_q4_0(blocks: torch.Tensor) -> WholeNumbers:
    scales = _half(blocks, 0)
    return WholeNumbers(_nibbles(blocks[:, 2:])[:, None], scales, torch.full_like(scales, 8))


def _whole_q4_k(blocks: torch.Tensor) -> WholeNumbers:
    scales, minima = (each.squeeze(2) for each in _k_scales(blocks))
    # In a group with scale 0, all numbers are the negated minimum.
    constant = scales == 0
    values = _k_nibbles(blocks[:, 16:]).masked_fill(constant[:, :, None], 0)
    scales = torch.where(constant, minima, scales)
    return WholeNumbers(values, scales, torch.where(scales == 0, 0, minima / scales))


def _whole_q5_0(blocks: torch.Tensor) -> WholeNumbers:
    numbers = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).view(torch.int8) - 16
    return WholeNumbers(numbers[:, None], _half(blocks, 0))


def _whole_q8_0(blocks: torch.Tensor) -> WholeNumbers:
    return WholeNumbers(blocks[:, None, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _whole_q6_k(blocks: torch.Tensor) -> WholeNumbers:
    low = blocks[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    numbers = (low | high << 4).view(torch.int8) - 32
    return WholeNumbers(numbers.view(-1, 16, 16), _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float())


WHOLE_NUMBERS: dict[str, tuple[int, Callable[[torch.Tensor], WholeNumbers]]] = {
    "Q4_0": (4, _whole_q4_0),
    "Q4_K": (4, _whole_q4_k),
    "Q5_0": (8, _whole_q5_0),
    "Q6_K": (8, _whole_q6_k),
    "Q8_0": (8, _whole_q8_0),
}
"""For types that store whole numbers with scales per group (and zeros, for 4 bits): the bits that hold a number, and a
function uint8 [blocks, nbytes] -> ``WholeNumbers``.
"""
