"""Weights of 4 bits with a scale and a zero for each group of inputs. They are quantized when a checkpoint with plain
weights is read, or stored that way (AWQ, GPTQ, compressed-tensors and Q4_K; see ``GroupedWeight``).
"""

import torch

from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_groups import GROUP_SIZES, GroupedWeight
from quire_engine.quantization.base import DenseMethod, Linear
from quire_engine.quantization.quantized_linear import GroupedLinear

_LEVELS = 15
# Fractions of a group's range to try: if few numbers are near its ends, a finer scale for the others is better.
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_NUMBERS_AT_ONCE = 1 << 20


class Int4Method(DenseMethod):
    """Layers store their weight in 4 bits."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.pack``."""
        return GroupedLinear(quantize_int4(weight), bias, weight.dtype)


def quantize_int4(weight: torch.Tensor, group_size: int = 32) -> GroupedWeight:
    """Quantizes ``weight`` [out, in] to 4 bits. For each group it tries several ranges and uses the scale and zero with
    the least squared error. A group with a non-finite number gets a non-finite scale.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group_size)
    q = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales, zeros = torch.empty(outputs, groups), torch.empty(outputs, groups)
    whole = inputs - inputs % group_size
    for columns, size in ((slice(0, whole), group_size), (slice(whole, inputs), inputs - whole)):
        some = slice(columns.start // group_size, -(-columns.stop // group_size))
        rows = max(1, _NUMBERS_AT_ONCE // max(1, columns.stop - columns.start))
        for first in range(0, outputs if size and some.start < some.stop else 0, rows):
            part = slice(first, first + rows)
            groups_of_part = weight[part, columns].float().unflatten(1, (-1, size))
            values, scales[part, some], zeros[part, some] = _search(groups_of_part)
            q[part, columns] = values.flatten(1)
    return GroupedWeight(q, scales, zeros, group_size)


def _search(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes fp32 [out, groups, group] to q uint8 [out, groups, group], scales and zeros [out, groups]."""
    kernels = library()
    if kernels is None or w.shape[2] not in GROUP_SIZES[4]:
        return _torch_search(w)
    w = w.contiguous()
    q, scales, zeros = torch.empty_like(w, dtype=torch.uint8), torch.empty(w.shape[:2]), torch.empty(w.shape[:2])
    kernels.quire_int4_search(
        *(each.data_ptr() for each in (w, q, scales, zeros)), scales.numel(), w.shape[2], torch.get_num_threads()
    )
    return q, scales, zeros


def _torch_search(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_search`` in torch, equal up to the last rounding."""
    low, high = w.amin(2, keepdim=True).clamp(max=0), w.amax(2, keepdim=True).clamp(min=0)
    step = (high - low) / _LEVELS
    best_scale, best_zero = step, torch.where(step == 0, 0, -low / step)
    best = _error(w, _whole(w, best_scale, best_zero), best_scale, best_zero)
    start = best_zero
    for part in _RANGES:
        q = _whole(w, step * part, start)
        scale, zero = _fit(w, q, step * part, start)
        error = _error(w, q, scale, zero)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return _whole(w, best_scale, best_zero).to(torch.uint8), best_scale.squeeze(2), best_zero.squeeze(2)


def _whole(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (w * inverse + zero).round_().nan_to_num_(0, 0, 0).clamp_(0, _LEVELS)


def _fit(
    w: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least-squares scale and zero for ``q``, or the given ones if all of ``q`` is the same."""
    mean, level = w.mean(2, keepdim=True), q.mean(2, keepdim=True)
    centred = q - level
    fitted = (centred * w).sum(2, keepdim=True) / centred.square().sum(2, keepdim=True)
    usable = fitted > 0
    fitted = torch.where(usable, fitted, scale)
    return fitted, torch.where(usable, (level - mean / fitted).clamp(0, _LEVELS), zero)


def _error(w: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (scale * (q - zero) - w).square().sum(2, keepdim=True)
