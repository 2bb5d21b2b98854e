"""Llama 2 and 3 (Touvron et al. 2023), and the methods that derived architectures override."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from quire_engine.checkpoint.config import DecoderConfig, attention_biases
from quire_engine.checkpoint.gguf_checkpoint import GgufTensors
from quire_engine.layers.attention import Attention
from quire_engine.layers.decoder_layer import PRE_NORMS, DecoderLayer, LayerNorms
from quire_engine.layers.mlp import GatedMLP, MoE
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.decoder import DecoderModel

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LlamaForCausalLM(DecoderModel):
    """Llama. Its projections may have biases."""

    gguf = GgufTensors(_GGUF_NAMES, permutes_heads=True)

    qk_norm: ClassVar[Literal["head", "token"] | None] = None
    """Which norms queries and keys have. See ``Attention``."""

    norms: ClassVar[LayerNorms] = PRE_NORMS
    """The norms of a layer."""

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        del path
        return {**attention_biases(hf), "mlp_bias": bool(hf.mlp_bias)}

    @classmethod
    def load_layer(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> DecoderLayer:
        """See ``DecoderModel``."""
        attention = Attention(config, weights, index, qk_norm=cls.qk_norm)
        return DecoderLayer(config, weights, index, attention, cls.load_mlp(config, weights, index), norms=cls.norms)

    @classmethod
    def load_mlp(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> GatedMLP | MoE:
        """Loads the feed-forward network of layer ``index``."""
        name = f"model.layers.{index}.mlp"
        return GatedMLP.load(weights, name, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
