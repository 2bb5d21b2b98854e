"""Reads a complete ``config.json`` without transformers, whose configuration classes take two of the four seconds in
which an engine starts.

``plain_config`` returns None if a default, another spelling or a check of transformers could matter. Such files, and
files with mistakes, are read by transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Switches that older files leave out. transformers' default for them is off.
_OFF_BY_DEFAULT = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_WHOLE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_LEFT_TO_TRANSFORMERS = {"layer_types", "partial_rotary_factor", "original_max_position_embeddings"}
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The attributes of transformers' configuration of a dense Llama-family model that the engine uses."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: None = None
    rope_parameters: dict[str, Any] = field(default_factory=dict)


def plain_config(model_type: str, raw: Mapping[str, Any]) -> PlainConfig | None:
    """Returns the configuration, or None if transformers has to read it."""
    rope = _rope_parameters(raw)
    switches = {name: raw.get(name, False) for name in _OFF_BY_DEFAULT}
    sizes = {name: raw.get(name) for name in _WHOLE}
    head_dim = raw.get("head_dim")
    if head_dim is None and model_type != "qwen3" and _all_whole(sizes.values()):
        head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]  # type: ignore[operator]
    readable = (
        model_type in ("llama", "mistral", "qwen2", "qwen3")
        and rope is not None
        and _all_whole((*sizes.values(), head_dim))
        and all(isinstance(switch, bool) for switch in switches.values())
        and isinstance(raw.get("rms_norm_eps"), float)
        and not _LEFT_TO_TRANSFORMERS & raw.keys()
        and raw["hidden_size"] % raw["num_attention_heads"] == 0
        and not _has_windows(model_type, raw, switches["use_sliding_window"])
    )
    if not readable or rope is None or head_dim is None:
        return None
    return PlainConfig(
        model_type=model_type,
        head_dim=head_dim,
        rms_norm_eps=raw["rms_norm_eps"],
        tie_word_embeddings=switches["tie_word_embeddings"],
        attention_bias=switches["attention_bias"],
        mlp_bias=switches["mlp_bias"],
        rope_parameters=rope,
        **sizes,  # type: ignore[arg-type]  # whole numbers, as was checked
    )


def _all_whole(values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _has_windows(model_type: str, raw: Mapping[str, Any], use_sliding_window: bool) -> bool:
    """Whether some layer may have a sliding window. Mistral has one by default; Qwen has a switch for it."""
    if model_type == "mistral":
        return raw.get("sliding_window", "default") is not None
    return model_type != "llama" and use_sliding_window


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the rope parameters in transformers' current spelling, if their type needs no library."""
    theta, scaling = raw.get("rope_theta"), raw.get("rope_scaling")
    if "rope_parameters" in raw:
        given = raw["rope_parameters"]
        if theta is not None or scaling is not None or not isinstance(given, dict):
            return None
        theta, scaling = given.get("rope_theta"), {key: value for key, value in given.items() if key != "rope_theta"}
    if not _is_number(theta) or not isinstance(scaling, dict | None):
        return None
    scaling = dict(scaling or {"rope_type": "default"})
    kind = scaling.pop("rope_type", None)
    if (kind, set(scaling)) not in (("default", set()), ("llama3", set(_LLAMA3_FIELDS))):
        return None
    if not all(_is_number(value) for value in scaling.values()):
        return None
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        return None
    return {"rope_theta": theta, "rope_type": kind, **scaling}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
