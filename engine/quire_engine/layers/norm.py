"""Normalisation layers."""

import torch

from quire_engine.kernels.ops import add_rms_norm, rms_norm
from quire_engine.layers.weight_loader import WeightLoader


def load_norm_weight(weights: WeightLoader, name: str, size: int, offset: float) -> torch.Tensor:
    """Loads the weight [size] of a norm, to which ``offset`` is added in float32: Gemma stores its distance from 1."""
    weight = weights.load_fused([f"{name}.weight"], [(size,)])
    return weight if offset == 0 else (weight.float() + offset).to(weight.dtype)


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019) of the last dimension. ``offset`` is as in
    ``load_norm_weight``.
    """

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self._weight = load_norm_weight(weights, name, size, offset)
        self._eps = eps

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises ``states`` [T, size], to which ``update`` [T, size] is added in place first."""
        if update is None:
            return rms_norm(states, self._weight, self._eps)
        return add_rms_norm(update, states, self._weight, self._eps)
