"""Gemma 3 (Gemma Team 2025), its text part."""

from pathlib import Path
from typing import Any

import torch

from quire_engine.checkpoint.config import DecoderConfig, attention_biases, is_positive_int, windows_by_layer_type
from quire_engine.errors import ModelError
from quire_engine.kernels.ops import gelu_mul, scale
from quire_engine.layers.attention import Attention
from quire_engine.layers.decoder_layer import DecoderLayer, LayerNorms
from quire_engine.layers.mlp import GatedMLP
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.decoder import DecoderModel
from quire_engine.quantization.base import Embedding

_NORMS = LayerNorms(
    attention_input="input_layernorm",
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)


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
        return {
            **attention_biases(hf),
            "attention_scale": scalar**-0.5,
            "sliding_windows": windows_by_layer_type(path, hf),
            "norm_offset": 1.0,
            "logit_soft_cap": hf.final_logit_softcapping,
        }

    @classmethod
    def load_layer(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> DecoderLayer:
        """See ``DecoderModel``."""
        attention, name = Attention(config, weights, index, qk_norm="head"), f"model.layers.{index}.mlp"
        mlp = GatedMLP.load(weights, name, config.hidden_size, config.intermediate_size, activation=gelu_mul)
        return DecoderLayer(config, weights, index, attention, mlp, norms=_NORMS)

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
