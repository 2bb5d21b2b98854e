"""Normalization layers."""

from collections.abc import Callable

import torch

from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.kernels.ops import add, add_rms_norm, rms_norm
from quire_engine.layers.weight_loader import WeightLoader

Norm = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Adds an update [T, hidden] or None to the residual stream [T, hidden] in place. Returns the sum, normalized."""


class RMSNorm:
    """Root mean square normalization (Zhang and Sennrich 2019) of hidden states. Gemma stores the weight minus
    ``config.norm_offset``.
    """

    def __init__(self, config: DecoderConfig, weights: WeightLoader, name: str) -> None:
        self._weight = weights.load_fused([f"{name}.weight"], [(config.hidden_size,)])
        self._eps, self._offset = config.rms_norm_eps, config.norm_offset

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes ``states`` [T, hidden], after adding ``update`` [T, hidden] to it in place."""
        if update is None:
            return rms_norm(states, self._weight, self._eps, offset=self._offset)
        return add_rms_norm(update, states, self._weight, self._eps, offset=self._offset)


def no_norm(states: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
    """Adds ``update`` to ``states`` in place, like a ``Norm``. Returns ``states`` themselves."""
    if update is not None:
        add(update, states)
    return states
