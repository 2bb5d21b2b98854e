"""``DecoderStack``: the layers of a decoder, or of one stage of a pipeline, around one residual stream."""

import sys
from collections.abc import Sequence

import torch

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.core.executor import WeightStats
from quire_engine.distributed.communicator import PendingSum, shard
from quire_engine.distributed.pipeline import is_last
from quire_engine.layers.decoder_layer import updated
from quire_engine.layers.norm import Norm, RMSNorm, no_norm
from quire_engine.layers.rotary import CosSin, RotaryEmbedding
from quire_engine.layers.streamed import Layer
from quire_engine.layers.weight_loader import WeightLoader


class DecoderStack:
    """The ``layers`` of a rank, and the norm after a model's last. ``weight_stats`` count reads of layers on disk or in
    host memory; None if no layer is offloaded.
    """

    def __init__(
        self, config: DecoderConfig, weights: WeightLoader, layers: Sequence[Layer], weight_stats: WeightStats | None
    ) -> None:
        self.layers = layers
        self.weight_stats = weight_stats
        self._rope = RotaryEmbedding(config, weights.device)
        self._is_last = is_last(weights.stage)
        self._norm: Norm = RMSNorm(config, weights, "model.norm") if self._is_last else no_norm
        self._ranks = weights.token_communicator
        self._split_above = _split_above(weights)

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads what a layer computes."""
        return any(layer.waits_for_device for layer in self.layers)

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can repeat all layers."""
        return all(layer.is_capturable for layer in self.layers)

    def __call__(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        *,
        may_split: bool,
    ) -> torch.Tensor:
        """See ``LayeredModel.layers``. A stage other than the last returns the residual stream for the next stage. If
        it ``may_split``, a large step is computed in two halves.
        """
        tokens, angles = len(states), self._rope.cos_sin(positions)
        if may_split and tokens > self._split_above:
            return self._overlapped(states, angles, kv, attention)
        residual, update = states[shard(tokens, self._ranks)], None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            update = layer(residual, update, angles, layer_kv, attention)
        return self._ranks.all_gather(self._norm(residual, update), tokens)

    def _overlapped(
        self, states: torch.Tensor, angles: CosSin, kv: Sequence[LayerKV], attention: AttentionBackend
    ) -> torch.Tensor:
        """Does the work of a call for a step whose rows are computed in two halves (dual batch overlap)."""
        residuals = states.chunk(2)
        updates: Sequence[PendingSum | None] = (None, None)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            updates = layer.overlapped(residuals, updates, angles, layer_kv, attention)
        normed = [self._norm(*half) for half in updated(residuals, updates)]
        return torch.cat(normed) if self._is_last else states

    def experts_only(self, no_tokens: torch.Tensor) -> None:
        """Computes the tokens of other engines with this rank's experts. ``no_tokens`` is [0, hidden]."""
        for layer in self.layers:
            layer.experts_only(no_tokens)


def _split_above(weights: WeightLoader) -> int:
    """Returns the most tokens of a step that is not computed in two halves. On a GPU, steps that may be captured as
    CUDA graphs are not split.
    """
    config = weights.options.config
    if not config.enable_dbo or weights.communicator.size == 1:
        return sys.maxsize
    return config.dbo_prefill_token_threshold
