"""Mistral (Jiang et al. 2023)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import same_window
from quire_engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases. All layers may have the same window."""

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        return {"sliding_windows": same_window(path, hf)}
