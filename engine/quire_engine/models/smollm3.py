"""SmolLM3 (Hugging Face 2025)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import windows_by_layer_type
from quire_engine.errors import ModelError
from quire_engine.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama in which some layers do not rotate queries and keys (NoPE). Some layers may have a window."""

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        layers, rotates = hf.num_hidden_layers, hf.no_rope_layers
        if len(rotates) < layers:
            raise ModelError(f"{path} has {len(rotates)} no_rope_layers for {layers} layers.")
        fields = super().config_fields(path, hf)
        if hf.use_sliding_window:
            fields["sliding_windows"] = windows_by_layer_type(path, hf)
        return {**fields, "nope_layers": tuple(index for index in range(layers) if not rotates[index])}
