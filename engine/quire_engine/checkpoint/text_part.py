"""The text part of a multimodal model (``…ForConditionalGeneration``). Its configuration and weights describe a causal
language model, which is served alone. The parts for images and audio are not read.
"""

import re
from collections.abc import Iterable
from typing import Any

# The classes of text parts, by the ``model_type`` of ``text_config``. The Qwen-VL models rotate queries and keys by
# three positions (time, height and width), which are equal for text: there they are Qwen2 and Qwen3.
TEXT_PARTS = {
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma3n_text": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4_text": ("llama4_text", "Llama4ForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
}
# Values that are constant in the code of a text part, and settings in the code of its class.
_CONSTANTS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
# Model types whose older files have the text settings next to ``vision_config`` instead of in ``text_config``.
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
# Model types whose embeddings are tied if the whole model or its text part says so. For others only the whole model
# counts.
_EITHER_TIES = ("llava", "llava_next", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
_OF_ALL_PARTS = ("eos_token_id", "quantization_config", "compression_config")
# Prefixes of the names of image and audio parts.
_BESIDE_TEXT = (
    "visual.",
    "vision_",
    "multi_modal_projector.",
    "mm_projector.",
    "audio_",
    "embed_vision.",
    "embed_audio.",
    "image_newline",
)
_MROPE = {"mrope_section", "mrope_interleaved"}
# The prefix of a name in the text part. The body of the whole model may come before and after it, also twice.
_OF_TEXT_PART = re.compile(r"(?:model\.)*(?:language_model|text_model)\.(?:model\.)*(?P<rest>.+)")
# The names in a decoder of text alone, whose body may have been saved alone.
_OF_DECODER = re.compile(r"(?:model\.)*(?P<rest>(?:layers|embed_tokens|norm|lm_head|score)(?:\..+)?)")
_HEADS = ("lm_head", "score")
_EMBEDDING = "model.embed_tokens.weight"


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text part of the model of ``raw``, in the form of ``config.json``. Returns
    ``raw`` itself for a model of text alone, or if its text part is not in ``TEXT_PARTS``.
    """
    names = raw.get("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith("ForConditionalGeneration")):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        flat = _FLAT.get(str(raw.get("model_type")))
        text = {**raw, "model_type": flat} if flat else {}
    part = TEXT_PARTS.get(str(text.get("model_type")))
    if part is None or raw.get("is_encoder_decoder"):
        return raw
    made = {key: value for key, value in text.items() if key not in ("vision_config", "audio_config")}
    made |= {key: raw[key] for key in _OF_ALL_PARTS if raw.get(key) is not None}
    tied = [each["tie_word_embeddings"] for each in (raw, text) if "tie_word_embeddings" in each]
    if tied:
        made["tie_word_embeddings"] = any(tied) if raw.get("model_type") in _EITHER_TIES else tied[0]
    model_type, architecture = part
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(made.get(name), dict) and model_type != text["model_type"]:
            made[name] = _without_sections(made[name])
    made |= _CONSTANTS.get(text["model_type"], {})
    return {**made, "model_type": model_type, "architectures": [architecture]}


def _without_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Returns rope parameters without the settings for three positions."""
    if not _MROPE & rope.keys():
        return rope
    plain = {key: value for key, value in rope.items() if key not in _MROPE}
    kinds = {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}
    return plain | kinds


def text_name(name: str) -> str:
    """Returns the name that a tensor or a module of a text part has in a model of text alone; ``name`` itself if it
    belongs to another part. Names in checkpoints, adapters and lists of quantised layers all pass through it.
    """
    found = _OF_TEXT_PART.fullmatch(name) or _OF_DECODER.fullmatch(name)
    if found is None:
        return name
    rest = found["rest"]
    return rest if rest.partition(".")[0] in _HEADS else f"model.{rest}"


def is_beside_text(name: str) -> bool:
    """Whether a tensor or module belongs to an image or audio part."""
    return name.removeprefix("model.").startswith(_BESIDE_TEXT)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the names of tensors in a model of text alone, by their ``stored`` names. For a multimodal model, only
    tensors of its text part. If two get the same name, the one that needs no change wins. Names of models with other
    layer names stay unchanged.
    """
    names = list(stored)
    if any(_OF_TEXT_PART.fullmatch(name) for name in names):
        made = {name: text_name(name) for name in names if text_name(name) != name or name.startswith(_HEADS)}
    else:
        made = {name: text_name(name) for name in names}
        if _EMBEDDING not in made.values() and "lm_head.weight" not in made.values():
            made = dict(zip(names, names, strict=True))
    exact = {name for name, target in made.items() if name == target}
    return {name: target for name, target in made.items() if name == target or target not in exact}
