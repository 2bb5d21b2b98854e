"""The configuration of the models that have own code: the Llama family, and mixture of experts on top of it. Knows no
weights and no device.

The folder's ``config.json`` is read through transformers' own configuration classes, so that defaults and both
spellings of the rope parameters mean what they mean there.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

# The architectures that this configuration covers, with the model type that config.json gives them.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
UNIFORM_SLIDING_WINDOW = ("mistral", "mixtral", "qwen3_moe")
OPTIONAL_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")
QK_NORM_MODEL_TYPES = ("qwen3", "qwen3_moe")
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
REQUIRED_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is known of a model before its weights are read.

    ``max_length`` is the longest sequence in tokens. ``eos_token_ids`` end an output. ``model_revision`` is equal for
    equal folders, wherever they lie.
    """

    architecture: str
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    model_revision: str


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention of a model, equal in all its layers: what KV blocks and attention backends are made from."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts, in the layers for which ``layers`` says so.

    Each token goes to ``per_token`` of ``count`` experts, whose inner size is ``ffn_size``. Their weights add up to 1
    where ``normalized``, and are of the model's dtype where ``rounded``, else float32.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    round_weights: bool
    is_moe_layer: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """A decoder of the Llama family, in plain numbers.

    ``windows`` holds one entry a layer: the number of latest tokens that a token sees, itself included, or None for
    all. ``rope_frequencies`` [head_dim / 2] are radians a position with every scaling applied, and cosines and sines
    are multiplied by ``rope_scale`` (YaRN's attention factor).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope_frequencies: tuple[float, ...] = field(repr=False)
    rope_scale: float
    moe: MoEConfig | None

    @classmethod
    def read(cls, folder: Path) -> "DecoderConfig":
        """Reads ``config.json``, and ``generation_config.json`` where there is one. Raises ``ModelError``."""
        path = folder / "config.json"
        raw = read_config_json(folder)
        architecture = architecture_of(path, raw)
        if not is_supported(architecture, raw):
            raise ModelError(f"{path} names {architecture}, and supported are {', '.join(SUPPORTED_ARCHITECTURES)}.")
        _check_sizes(path, raw)
        end_token_ids = eos_token_ids(folder, raw)
        hf = _parse_config(path, architecture, raw)
        frequencies, scale = _rope_frequencies(path, hf)
        qkv_bias, output_bias = _attention_biases(hf)
        config = cls(
            architecture=architecture,
            hidden_size=hf.hidden_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=_head_dim(hf),
            intermediate_size=hf.intermediate_size,
            vocab_size=hf.vocab_size,
            rms_norm_eps=float(hf.rms_norm_eps),
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            qkv_bias=qkv_bias,
            attention_output_bias=output_bias,
            mlp_bias=hf.model_type == "llama" and bool(hf.mlp_bias),
            qk_norm=hf.model_type in QK_NORM_MODEL_TYPES,
            sliding_windows=_sliding_windows(path, hf),
            rope_frequencies=frequencies,
            rope_scale=scale,
            max_length=rope_max_length(int(hf.max_position_embeddings), hf.rope_parameters),
            eos_token_ids=end_token_ids,
            model_revision=compute_revision(folder),
            moe=_moe_config(path, hf),
        )
        _check_shape(path, config)
        return config

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "DecoderConfig":
        """The configuration whose ``asdict`` went through JSON, which makes lists of its tuples."""
        moe = values["moe"]
        return cls(**{**_with_tuples(values), "moe": moe and MoEConfig(**_with_tuples(moe))})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def is_supported(architecture: str, raw: dict[str, Any]) -> bool:
    """Whether there is own code for what a ``config.json`` describes: some models carry the architecture of another
    with a type of their own.
    """
    model_type = SUPPORTED_ARCHITECTURES.get(architecture)
    return model_type is not None and raw.get("model_type", model_type) == model_type


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    for name in REQUIRED_SIZES:
        if name not in raw:
            raise ModelError(f"{path} has no {name}.")
    for name in (*REQUIRED_SIZES, *OPTIONAL_SIZES):
        value = raw.get(name)
        if (value is not None or name in REQUIRED_SIZES) and not is_positive_int(value):
            raise ModelError(f"{path} says that {name} is {value!r}, and it must be a whole number above 0.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path} says that hidden_act is {raw['hidden_act']!r}, and only silu is supported.")


def _parse_config(path: Path, architecture: str, raw: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return to_hf_config(path, raw, CONFIG_MAPPING[SUPPORTED_ARCHITECTURES[architecture]])


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _attention_biases(hf: Any) -> tuple[bool, bool]:
    """Whether queries, keys and values have a bias, and whether the output projection has one."""
    if hf.model_type == "qwen2":
        return True, False
    both = hf.model_type in OPTIONAL_ATTENTION_BIAS and bool(hf.attention_bias)
    return both, both


def _sliding_windows(path: Path, hf: Any) -> tuple[int | None, ...]:
    """The windows of the layers: of all, or of those that are called ``sliding_attention``; Llama has none."""
    layers: int = hf.num_hidden_layers
    window: int | None = getattr(hf, "sliding_window", None)
    if hf.model_type == "llama" or window is None:
        return (None,) * layers
    if not is_positive_int(window):
        raise ModelError(f"{path} says that sliding_window is {window!r}, and it must be a whole number above 0.")
    if hf.model_type in UNIFORM_SLIDING_WINDOW:
        return (window,) * layers
    if len(hf.layer_types) != layers:
        raise ModelError(f"{path} has {len(hf.layer_types)} layer_types for {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _moe_config(path: Path, hf: Any) -> MoEConfig | None:
    if hf.model_type not in ("mixtral", "qwen3_moe"):
        return None
    if hf.num_experts_per_tok > hf.num_experts:
        raise ModelError(f"{path} sends each token to {hf.num_experts_per_tok} of {hf.num_experts} experts.")
    layers = hf.num_hidden_layers
    if hf.model_type == "mixtral":
        return MoEConfig(hf.num_experts, hf.num_experts_per_tok, hf.intermediate_size, True, False, (True,) * layers)
    return MoEConfig(
        num_experts=hf.num_experts,
        num_experts_per_tok=hf.num_experts_per_tok,
        moe_intermediate_size=hf.moe_intermediate_size,
        norm_topk_prob=bool(hf.norm_topk_prob),
        round_weights=True,
        is_moe_layer=_moe_layers(path, hf),
    )


def _moe_layers(path: Path, hf: Any) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer, without those of ``mlp_only_layers``."""
    step, dense = hf.decoder_sparse_step, hf.mlp_only_layers
    if not is_positive_int(step):
        raise ModelError(f"{path} says that decoder_sparse_step is {step!r}, and it must be a whole number above 0.")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(hf.num_hidden_layers))


def _rope_frequencies(path: Path, hf: Any) -> tuple[tuple[float, ...], float]:
    """Frequencies and scale by transformers' own functions, for the length that the weights were trained for."""
    parameters = hf.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"{path} asks for rope of type {kind!r}, and supported are {', '.join(SUPPORTED_ROPE_TYPES)}.")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path} rotates only a part of each head, which is not supported.")
    try:
        frequencies, scale = _compute_rope_frequencies(kind, hf)
    except Exception as error:  # noqa: BLE001 - a wrong parameter fails wherever the formula uses it
        raise ModelError(f"{path} has rope parameters that do not work: {one_line(error)}.") from None
    if not all(map(math.isfinite, (*frequencies, scale))):
        raise ModelError(f"{path} has rope parameters that lead to numbers which are not finite.")
    return frequencies, scale


def _compute_rope_frequencies(kind: str, hf: Any) -> tuple[tuple[float, ...], float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "default":
        size = _head_dim(hf)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return tuple((1.0 / (hf.rope_parameters["rope_theta"] ** exponents)).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _check_shape(path: Path, config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path} has {config.num_heads} attention heads, which {config.num_kv_heads} KV heads do not divide."
        )
    if config.head_dim % 2:
        raise ModelError(f"{path} has a head dimension of {config.head_dim}, and rope needs an even one.")
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        raise ModelError(f"{path} says that rms_norm_eps is {config.rms_norm_eps}, which is not a number from 0 on.")
