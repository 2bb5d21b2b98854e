"""Qwen3 (Yang et al. 2025)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import attention_biases, windows_by_layer_type
from quire_engine.checkpoint.gguf_checkpoint import GgufTensors
from quire_engine.models.llama import LlamaForCausalLM

_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with norms of query and key heads. Some layers may have a window."""

    gguf = GgufTensors({**LlamaForCausalLM.gguf.names, **_HEAD_NORMS})
    qk_norm = "head"

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        return {**attention_biases(hf), "sliding_windows": windows_by_layer_type(path, hf)}
