"""Weights in MXFP4, the format of gpt-oss's experts: numbers of 4 bits (e2m1) in groups of 32 that share a power of two
(OCP Microscaling Formats, version 1.0). In memory they have the model's dtype, which represents them exactly.
"""

import torch

from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.errors import ModelError

BLOCKS, SCALES = "_blocks", "_scales"
"""The name suffixes of the two tensors that store a weight."""
GROUP = 32
# The values of the 4 bits: a sign, 2 bits of exponent and 1 of fraction.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers [..., groups * 32] of ``dtype``. ``blocks`` [..., groups, 16] are bytes with two numbers each,
    the first in the low bits. ``scales`` [..., groups] are bytes with the exponents of the groups' powers of two, plus
    127.
    """
    values = torch.tensor(VALUES, device=blocks.device)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(-2)
    exponents = scales.int().unsqueeze(-1) - SCALE_BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).to(dtype)


def is_mxfp4(checkpoint: Checkpoint, name: str) -> bool:
    """Whether an expert weight is stored in MXFP4."""
    return name + BLOCKS in checkpoint and name + SCALES in checkpoint


def mxfp4_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int, int]:
    """Returns the shape [experts, out, in] of an expert weight. Raises ``ModelError``."""
    packed, shape = checkpoint.shape(name + BLOCKS), checkpoint.shape(name + SCALES)
    if len(shape) != 3 or packed != (*shape, GROUP // 2):
        raise ModelError(f"{name} has blocks {list(packed)} for scales {list(shape)}, which is not MXFP4.")
    experts, outputs, groups = shape
    return experts, outputs, groups * GROUP


def load_mxfp4(checkpoint: Checkpoint, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight [out, in] of one expert, on the CPU."""
    blocks, scales = (checkpoint.load_part(name + part, expert) for part in (BLOCKS, SCALES))
    return dequantize_mxfp4(blocks, scales, dtype)
