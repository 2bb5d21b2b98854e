"""OLMo 2 (OLMo Team 2025)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import attention_biases
from quire_engine.layers.decoder_layer import LayerNorms
from quire_engine.models.llama import LlamaForCausalLM


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Llama with norms of outputs instead of inputs, and with norms of all queries and of all keys of a token."""

    qk_norm = "token"
    norms = LayerNorms(
        attention_input=None,
        attention_output="post_attention_layernorm",
        mlp_input=None,
        mlp_output="post_feedforward_layernorm",
    )

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        del path
        return attention_biases(hf)
