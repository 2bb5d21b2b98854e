"""The configuration of a model without own code, as transformers reads it, and what of it cannot be served."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from quire_engine.models.errors import ModelError
from quire_engine.models.folder import (
    architecture_of,
    compute_revision,
    eos_token_ids,
    is_positive_int,
    one_line,
    read_config_json,
    rope_max_length,
    to_hf_config,
)

SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
# Up to here it is looked at what a token sees (see ``attention``), so no sequence may be longer.
MAX_PROBED_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """``parsed`` is transformers' configuration, and ``model_class`` the class that it is for."""

    hf_config: Any = field(repr=False)
    model_class: Any = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> "TransformersConfig":
        """Reads ``config.json``, and ``generation_config.json`` where there is one. Raises ``ModelError``, also for
        models that KV blocks or attention backends cannot serve, as far as their configuration tells.
        """
        path = folder / "config.json"
        raw = read_config_json(folder)
        architecture = architecture_of(path, raw)
        parsed = to_hf_config(path, raw, _config_class(path, architecture, raw))
        _check_text_only(path, parsed)
        return cls(
            architecture=architecture,
            vocab_size=_positive_int(path, parsed, "vocab_size"),
            max_length=_max_length(path, parsed),
            eos_token_ids=eos_token_ids(folder, raw),
            model_revision=compute_revision(folder),
            hf_config=parsed,
            model_class=_model_class(path, architecture),
        )


def _config_class(path: Path, architecture: str, raw: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{path} describes an encoder with a decoder ({architecture}); only decoders can be served.")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != architecture:
        raise ModelError(
            f"{path} names {architecture} of type {model_type!r}, which is no causal language model of transformers "
            f"{__version__}; own code is there for {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    return CONFIG_MAPPING[model_type]


def _model_class(path: Path, architecture: str) -> Any:
    import transformers

    model_class = getattr(transformers, architecture)
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(f"{path} names {architecture}, which keeps a state that KV blocks cannot hold.")
    if not model_class._supports_attention_backend:
        raise ModelError(f"{path} names {architecture}, whose attention cannot be replaced by a paged one.")
    return model_class


def _check_text_only(path: Path, parsed: Any) -> None:
    try:
        text_only = parsed.get_text_config() is parsed
    except ValueError:
        text_only = False
    if not text_only:
        raise ModelError(f"{path} describes a model of more than text ({parsed.model_type}), which is not supported.")
    for kind in getattr(parsed, "layer_types", None) or ():
        if kind not in SUPPORTED_LAYER_TYPES:
            raise ModelError(
                f"{path} has layers of type {kind!r}, and supported are {', '.join(SUPPORTED_LAYER_TYPES)}."
            )


def _positive_int(path: Path, parsed: Any, name: str) -> int:
    value: Any = getattr(parsed, name, None)
    if not is_positive_int(value):
        raise ModelError(f"{path} says that {name} is {value!r}, and it must be a whole number above 0.")
    return int(value)


def _max_length(path: Path, parsed: Any) -> int:
    _positive_int(path, parsed, "max_position_embeddings")
    try:
        return max_sequence_length(parsed)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} has rope parameters that do not work: {one_line(error)}.") from None


def max_sequence_length(parsed: Any) -> int:
    """The longest sequence in tokens, for the rope of every kind of layer.

    LongRoPE ends at the length before it was stretched: the frequencies change there, for all keys.
    """
    length = int(parsed.max_position_embeddings)
    return min([MAX_PROBED_LENGTH, *(_rope_length(length, rope) for rope in _rope_parameters(parsed))])


def _rope_parameters(parsed: Any) -> list[dict[str, Any]]:
    """The rope parameters: one set for all layers, or one for each kind of layer."""
    parameters = getattr(parsed, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]


def _rope_length(length: int, rope: dict[str, Any]) -> int:
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original is not None:
        return min(length, int(original))
    return rope_max_length(length, rope)
