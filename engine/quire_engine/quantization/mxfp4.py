"""Weights in MXFP4, as gpt-oss stores its experts: numbers of four bits (e2m1) in groups of 32 that share a power of
two (OCP Microscaling Formats, version 1.0). They are held in the model's dtype, in which they are exact.
"""

import torch

GROUP = 32
# The values of the four bits: a sign, two bits of an exponent and one of a fraction.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., groups * 32] of ``dtype``. ``blocks`` [..., groups, 16] are bytes of two numbers each, the first
    one in the lower bits, and ``scales`` [..., groups] bytes the exponents of the groups' powers of two, plus 127.
    """
    values = torch.tensor(VALUES, device=blocks.device)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(-2)
    exponents = scales.int().unsqueeze(-1) - SCALE_BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).to(dtype)
