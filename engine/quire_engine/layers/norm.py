"""Normalization layers."""

from collections.abc import Callable

import torch

from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.kernels.ops import add, add_rms_norm, norm_by_sums, rms_norm, square_sums
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


class TokenNorms:
    """Root mean square normalization of all queries and of all keys of a token, over the heads of all ranks.
    ``attention`` is the name under which their weights are stored.
    """

    def __init__(self, config: DecoderConfig, weights: WeightLoader, attention: str) -> None:
        self._communicator, self._eps = weights.communicator, config.rms_norm_eps
        self._widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)]
        self._weights = [
            weights.load_fused([f"{attention}.{part}_norm.weight"], [(width,)], weights.communicator)
            for part, width in zip("qk", self._widths, strict=True)
        ]

    def __call__(self, projected: torch.Tensor) -> None:
        """Normalizes the queries and keys of ``projected`` [T, this rank's queries, keys and values] in place."""
        tokens, outputs = projected.shape
        queries, keys = map(len, self._weights)
        parts = projected.split_with_sizes((queries, keys, outputs - queries - keys), dim=1)[:2]
        own = torch.empty(tokens, 2, dtype=torch.float32, device=projected.device)
        for part, out in zip(parts, own.unbind(1), strict=True):
            square_sums(part, out)
        sums = self._communicator.all_reduce(own).unbind(1)
        for part, total, weight, width in zip(parts, sums, self._weights, self._widths, strict=True):
            norm_by_sums(part, total, weight, self._eps, width=width)
