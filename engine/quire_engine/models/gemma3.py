"""Gemma 3 (Gemma Team 2025), its text part."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.checkpoint.config import DecoderConfig, is_positive_int, windows_by_layer_type
from quire_engine.distributed.communicator import PendingSum
from quire_engine.errors import ModelError
from quire_engine.kernels.ops import gelu_mul, scale
from quire_engine.layers.attention import Attention
from quire_engine.layers.decoder_layer import DecoderLayer, updated
from quire_engine.layers.linear import start_sum
from quire_engine.layers.mlp import GatedMLP
from quire_engine.layers.norm import RMSNorm
from quire_engine.layers.rotary import CosSin
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.decoder import DecoderModel
from quire_engine.quantization.base import Embedding

_GLOBAL, _LOCAL = 0, 1
"""Indexes of the rotation frequencies, in the order in which ``RotaryEmbedding.cos_sin`` stacks them."""


class Gemma3ForCausalLM(DecoderModel):
    """Gemma 3: most layers have a window and rotation frequencies of their own. Embeddings are scaled by the root of
    their size, and logits may have a soft cap.
    """

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        if not is_positive_int(scalar := hf.query_pre_attn_scalar):
            raise ModelError(
                f"{path} has a query_pre_attn_scalar of {scalar!r}, and it must be a whole number above 0."
            )
        bias = bool(hf.attention_bias)
        return {
            "qkv_bias": bias,
            "attention_output_bias": bias,
            "attention_scale": scalar**-0.5,
            "sliding_windows": windows_by_layer_type(path, hf),
            "norm_offset": 1.0,
            "logit_soft_cap": hf.final_logit_softcapping,
        }

    @classmethod
    def load_layer(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> DecoderLayer:
        """See ``DecoderModel``."""
        attention, name = Attention(config, weights, index, qk_norm=True), f"model.layers.{index}.mlp"
        mlp = GatedMLP.load(weights, name, config.hidden_size, config.intermediate_size, activation=gelu_mul)
        return Gemma3DecoderLayer(config, weights, index, attention, mlp)

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self._logit_soft_cap = config.logit_soft_cap
        if self._embedding is not None:
            # Rounded to the model's dtype, as in transformers.
            factor = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
            self._embedding = _scaled(self._embedding, factor)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``."""
        logits, cap = super().logits(hidden), self._logit_soft_cap
        return logits if cap is None else (logits / cap).tanh_() * cap


def _scaled(embedding: Embedding, factor: float) -> Embedding:
    return lambda token_ids: scale(embedding(token_ids), factor)


class Gemma3DecoderLayer(DecoderLayer):
    """Attention and feed-forward network, each between two norms, around one residual stream. An update is normed
    before it is added.
    """

    def __init__(
        self, config: DecoderConfig, weights: WeightLoader, index: int, attention: Attention, mlp: GatedMLP
    ) -> None:
        super().__init__(config, weights, index, attention, mlp)
        norm = partial(RMSNorm, weights, size=config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)
        self._pre_feedforward_norm = norm(f"model.layers.{index}.pre_feedforward_layernorm")
        self._post_feedforward_norm = norm(f"model.layers.{index}.post_feedforward_layernorm")
        self._rotation = _GLOBAL if self.attn.window is None else _LOCAL

    def __call__(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        angles: CosSin,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See ``DecoderLayer``."""
        states = self._attention.qkv_proj(self._input_norm(residual, update))
        states = self._attention.output_proj(self._attention(states, self._own(angles), kv, attention))
        states = self._pre_feedforward_norm(residual, self._post_attention_norm(states))
        return self._post_feedforward_norm(self._mlp(states))

    def overlapped(
        self,
        residuals: Sequence[torch.Tensor],
        updates: Sequence[PendingSum | None],
        angles: CosSin,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> Sequence[PendingSum]:
        """See ``DecoderLayer``."""
        states = torch.cat([self._attention.qkv_proj(self._input_norm(*half)) for half in updated(residuals, updates)])
        states = self._attention(states, self._own(angles), kv, attention)
        sums = [start_sum(self._attention.output_proj, half) for half in states.chunk(2)]
        updates = [_NormedSum(each, self._post_attention_norm) for each in sums]
        sums = [self._mlp.start(self._pre_feedforward_norm(*half)) for half in updated(residuals, updates)]
        return [_NormedSum(each, self._post_feedforward_norm) for each in sums]

    def _own(self, angles: CosSin) -> CosSin:
        cos, sin = angles
        return cos[self._rotation], sin[self._rotation]


class _NormedSum(PendingSum):
    """A sum over the ranks that is normed after it has arrived."""

    def __init__(self, pending: PendingSum, norm: RMSNorm) -> None:
        super().__init__(pending.parts, pending.work)
        self._norm = norm

    def wait(self) -> torch.Tensor:
        """See ``PendingSum``."""
        return self._norm(super().wait())
