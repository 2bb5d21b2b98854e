"""Qwen2 and Qwen2.5 (Yang et al. 2024)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import windows_by_layer_type
from quire_engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases of queries, keys and values. Some layers may have a window."""

    gguf = replace(LlamaForCausalLM.gguf, permutes_heads=False)

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        return {"qkv_bias": True, "sliding_windows": windows_by_layer_type(path, hf)}
