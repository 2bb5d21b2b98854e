"""The logarithm and exponential used in sampling, as sequences of single IEEE operations in float32.

A library's logarithm differs in the last bit between processors, and a draw can depend on that bit. These functions
give the same bits wherever additions, products and quotients are rounded one by one: in torch on any device, and in
``kernels/sample.cpp`` and ``kernels/gumbel_argmax.py``, which repeat them operation by operation. So the order of
operations below is part of the definition, and none may be fused with another.
"""

import torch

# The square root of 1/2 as bits of a float32, and the mask of the fraction bits, 2^23 - 1.
_ROOT_HALF, _FRACTION = 0x3F3504F3, 0x007FFFFF
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e3p-1"), float.fromhex("0x1.2fefa2p-17")
_LOG = tuple(map(float.fromhex, ("0xaaaaaap-24", "0xccce13p-25", "0x91e9eep-25", "0xf89e26p-26")))
_LOG2_E = float.fromhex("0x1.715476p0")
_EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)

WEIGHT_BITS = 40
"""The most probable token of a row has weight 2^40."""


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits positive normal float32 numbers ``(1 + f) * 2^exponent`` into ``f`` and ``exponent``, both float32. ``1 +
    f`` is between the square roots of 1/2 and 2.
    """
    above = x.view(torch.int32) - _ROOT_HALF
    exponent = above.bitwise_right_shift(23).float()
    return above.bitwise_and_(_FRACTION).add_(_ROOT_HALF).view(torch.float32) - 1, exponent


def log_of_parts(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Returns the natural logarithm of ``(1 + f) * 2^exponent``, accurate to one unit in the last place. Uses FreeBSD's
    polynomial.
    """
    one, two, three, four = _LOG
    s = f / (f + 2)
    z = s * s
    w = z * z
    rest = (w * four).add_(two).mul_(w).add_((w * three).add_(one).mul_(z))
    half = (f * f).mul_(0.5)
    return s.mul_(rest.add_(half)).add_(exponent * _LN2_LOW).sub_(half).add_(f).add_(exponent * _LN2_HIGH)


def exponential_of_uniform(uniform: torch.Tensor) -> torch.Tensor:
    """Returns ``-log(1 - uniform)`` of float32 numbers from 2^-32 to 1 - 2^-24, accurate in the last places even near
    0.
    """
    f, exponent = split(1 - uniform)
    # Near 1, where 1 - u would lose the low bits of u, -u itself is the fraction.
    return log_of_parts(torch.where(exponent == 0, -uniform, f), exponent).neg_()


def weights(scores: torch.Tensor) -> torch.Tensor:
    """Returns ``2^40 * exp(scores)`` truncated to int64, for float32 scores of at most 0.

    Integer sums are the same in any order: by a sort, by a histogram, or by slices across threads. The sum of a million
    tokens fits.
    """
    power = (scores * _LOG2_E).clamp_(min=-60.0)
    whole = power.round()  # round half to even
    f = power.sub_(whole)
    value = torch.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        value.mul_(f).add_(coefficient)
    shift = whole.int().add_(WEIGHT_BITS).bitwise_left_shift_(23)
    return value.view(torch.int32).add_(shift).view(torch.float32).long()
