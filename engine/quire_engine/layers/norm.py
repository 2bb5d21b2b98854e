"""Normalization layers."""

import torch

from quire_engine.kernels.ops import add_rms_norm, rms_norm
from quire_engine.layers.weight_loader import WeightLoader


class RMSNorm:
    """Root mean square normalization (Zhang and Sennrich 2019) of the last dimension. ``offset`` is added to the weight
    [size]: Gemma stores the weight minus 1.
    """

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self._weight = weights.load_fused([f"{name}.weight"], [(size,)])
        self._eps, self._offset = eps, offset

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes ``states`` [T, size], after adding ``update`` [T, size] to it in place."""
        if update is None:
            return rms_norm(states, self._weight, self._eps, offset=self._offset)
        return add_rms_norm(update, states, self._weight, self._eps, offset=self._offset)
