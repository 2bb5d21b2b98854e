"""The architectures with a native implementation, by their name in ``config.json``.

The table imports no model, so that processes without torch can read it. ``models/loader.py`` imports a class when it is
needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

POOLED_FORMS = ("Model", "ForSequenceClassification")
"""Suffixes of the names of architectures that pool prompts, in place of ForCausalLM."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder in ``quire_engine.models``: the file ``module`` has a class with the architecture's name.

    ``model_type`` is its name in ``config.json``, and ``gguf`` its name in GGUF files; None if those are not supported.
    A model with another ``activation`` (key, value) runs through transformers. Files may leave out ``optional_sizes``,
    for which transformers has defaults.
    """

    module: str
    model_type: str
    gguf: str | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    optional_sizes: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Architecture] = {
    "Gemma3ForCausalLM": Architecture(
        "gemma3",
        "gemma3_text",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        optional_sizes=("num_attention_heads", "vocab_size"),
    ),
    "GptOssForCausalLM": Architecture("gpt_oss", "gpt_oss"),
    "LlamaForCausalLM": Architecture("llama", "llama", gguf="llama"),
    "MistralForCausalLM": Architecture("mistral", "mistral"),
    "MixtralForCausalLM": Architecture("mixtral", "mixtral"),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo2"),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen2", gguf="qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen3", gguf="qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "qwen3_moe"),
    "SmolLM3ForCausalLM": Architecture("smollm3", "smollm3"),
}


def registered_name(architecture: str) -> str | None:
    """Returns the key of ``ARCHITECTURES`` for an architecture or for its pooling form; None without a
    native implementation.
    """
    for form in POOLED_FORMS:
        if architecture.endswith(form):
            architecture = f"{architecture.removesuffix(form)}ForCausalLM"
    return architecture if architecture in ARCHITECTURES else None
