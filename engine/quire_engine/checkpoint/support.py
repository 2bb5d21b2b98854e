"""Which models are served, judged by ``config.json`` alone: before any weights are there, and without torch.

The engine checks this first. The model fetcher checks it too, and refuses with the same sentence before it downloads.
For models without a native implementation, only transformers can tell the rest (``checked_by_transformers``), which
``read_model_config`` asks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_engine.checkpoint.architecture import (
    GENERATING_FORMS,
    architecture_of,
    own_architecture,
    refuse_code,
)
from quire_engine.checkpoint.config import check_sizes, is_supported, quantization_of, rope_max_length
from quire_engine.checkpoint.plain_config import plain_config
from quire_engine.checkpoint.stored_schemes import check_stored_scheme, is_dequantized, stored_bits
from quire_engine.errors import ModelError
from quire_engine.models.registry import POOLED_FORMS

STATE_LAYER_TYPES = ("linear_attention", "conv")
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *STATE_LAYER_TYPES)
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config")
_FAMILIES = "such as Qwen 3, Llama 3 or Mistral"


class UnsupportedModelError(ModelError):
    """A model that is not served. ``instead`` is what to do, as the end of a sentence."""

    def __init__(self, sentence: str, instead: str) -> None:
        super().__init__(sentence)
        self.instead = instead


def check_support(path: Path, raw: dict[str, Any], quantization: str | None = None) -> None:
    """Raises ``ModelError`` if a model is not served, judged by its ``config.json`` at ``path`` with the contents
    ``raw``. Also if ``--quantization`` does not support the model.
    """
    architecture = architecture_of(path, raw)
    stored = quantization_of(path.parent, raw)
    if stored is not None and is_dequantized(architecture, stored):
        stored = None
    if stored is not None:
        _check_stored(path, stored)
    if is_supported(architecture, raw):
        check_sizes(path, raw)
        check_stored_bits(stored, quantization)
        return
    _check_kind(path, architecture, raw)
    name = quantization or (stored and stored.get("quant_method"))
    if name is not None:
        # Imports all settings, which the model fetcher rarely needs.
        from quire_engine.config.capabilities import THROUGH_TRANSFORMERS, Feature

        raise UnsupportedModelError(
            THROUGH_TRANSFORMERS.refused[Feature.QUANTIZATION].format(quantization=name, architecture=architecture),
            "serve it without --quantization" if stored is None else "take its checkpoint that is not quantised",
        )


def check_stored_bits(stored: Mapping[str, Any] | None, quantization: str | None) -> None:
    """Raises ``ModelError`` if a checkpoint is quantised in other bits than ``--quantization`` names."""
    bits = set() if stored is None else stored_bits(stored)
    if quantization is None or not bits or {f"int{count}" for count in bits} == {quantization}:
        return
    from quire_engine.config.capabilities import OTHER_BITS, Feature

    listed = " and ".join(map(str, sorted(bits)))
    raise UnsupportedModelError(
        OTHER_BITS.refused[Feature.QUANTIZATION].format(bits=listed, quantization=quantization),
        "leave --quantization out",
    )


def checked_by_transformers(path: Path, raw: dict[str, Any]) -> bool:
    """Whether only transformers can tell if the model is served."""
    return not is_supported(architecture_of(path, raw), raw)


def plain_max_length(path: Path, raw: dict[str, Any]) -> int | None:
    """Returns the longest sequence in tokens according to ``raw`` of ``config.json``; None if only transformers can
    tell.
    """
    architecture = architecture_of(path, raw)
    own = own_architecture(architecture)
    if own is None or not is_supported(architecture, raw):
        return None
    plain = plain_config(own.model_type, raw)
    return rope_max_length(plain.max_position_embeddings, plain.rope_parameters) if plain else None


def check_max_model_len(asked: int | None, max_length: int) -> None:
    """Raises ``ModelError`` unless ``--max-model-len``, if given, is between 1 and ``max_length`` tokens."""
    if asked is not None and not 1 <= asked <= max_length:
        raise ModelError(
            f"--max-model-len is {asked}, and this model's sequences have 1 to {max_length} tokens: change it, or "
            "leave it out."
        )


def _check_stored(path: Path, stored: dict[str, Any]) -> None:
    try:
        check_stored_scheme(stored)
    except ModelError as error:
        raise UnsupportedModelError(
            f"{path} has a quantization_config that is not read. {error}",
            "take the model's plain checkpoint (with --quantization int4 where memory is short), or one in AWQ, GPTQ, "
            "FP8 or GGUF",
        ) from None


def _check_kind(path: Path, architecture: str, raw: dict[str, Any]) -> None:
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{path} describes an encoder with a decoder ({architecture}); only decoders can be served.",
            f"take a decoder {_FAMILIES}",
        )
    if architecture.endswith(POOLED_FORMS):
        return
    if not architecture.endswith(GENERATING_FORMS):
        refuse_code(path, raw)
        raise UnsupportedModelError(
            f"{path} names {architecture}, which makes no text (and no embeddings or scores, as classes do whose names "
            "end in Model or ForSequenceClassification).",
            f"take a causal language model {_FAMILIES}",
        )
    if architecture.endswith("ForConditionalGeneration") or any(key in raw for key in _OTHER_INPUTS):
        raise UnsupportedModelError(
            f"{path} describes a model of more than text ({architecture}), of whose text part nothing is known here.",
            f"take one for text alone {_FAMILIES}",
        )
    for kind in raw.get("layer_types") or ():
        if kind not in SUPPORTED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{path} has layers of type {kind!r}, and supported are {', '.join(SUPPORTED_LAYER_TYPES)}.",
                f"take a model whose layers all have attention, {_FAMILIES}",
            )
