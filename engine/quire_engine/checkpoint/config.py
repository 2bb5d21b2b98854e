"""A model folder's configuration: ``DecoderConfig`` for native decoders, and facts of any model: end tokens, revision,
rope length.

``config.json`` is read through transformers' configuration classes, so that defaults and both spellings of the rope
parameters have the same meaning as there. They take long to import, so a file that needs no defaults is read without
them (``plain_config``). Code from a model folder is never run.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quire_proto.folders import no_such_path

from quire_engine.checkpoint.architecture import architecture_of, own_architecture, with_served_class
from quire_engine.checkpoint.end_tokens import end_token_ids
from quire_engine.checkpoint.gguf import GGUF_SUFFIX, GgufFile, find_gguf, gguf_config
from quire_engine.checkpoint.plain_config import plain_config
from quire_engine.checkpoint.text_part import text_config
from quire_engine.core.pooling import PoolerConfig
from quire_engine.errors import DamagedFileError, ModelError
from quire_engine.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    import torch

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
MAX_LAYERS = 4096  # lists of this length are created before any weight is read
MAX_HEADER_BYTES = 100_000_000
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration, known before its weights are read.

    ``max_length`` is the longest sequence in tokens. ``eos_token_ids`` end an output. ``model_revision`` identifies the
    folder's contents: it is equal for equal folders. ``pooler_config`` says how the model pools prompts; None if it
    generates.
    """

    is_native: ClassVar[bool] = False
    """Whether a class of the registry runs the model, and not transformers."""

    architecture: str
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    model_revision: str
    pooler_config: PoolerConfig | None = field(default=None, kw_only=True)

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to earlier tokens, so that a prompt can be computed in chunks."""
        return True


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts, in the layers where ``is_moe_layer``.

    Each token goes to ``num_experts_per_tok`` of ``num_experts`` experts, of inner size ``moe_intermediate_size``. The
    router's weights add up to 1 with ``norm_topk_prob``. They are rounded to the model's dtype with ``round_weights``,
    and are float32 otherwise. With a ``swiglu_limit`` the activation is clamped, and ``swiglu_alpha`` multiplies its
    gate.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    round_weights: bool
    is_moe_layer: tuple[bool, ...]
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """The configuration of a decoder with a native implementation, as plain numbers.

    ``sliding_windows`` has one entry per layer: the number of latest tokens that a token attends to, including itself,
    or None for all. ``rope_frequencies`` [head_dim / 2] are radians per position, with all scaling applied. Cosines and
    sines are multiplied by ``rope_scale`` (YaRN's attention factor). Layers with a window may have other frequencies,
    the ``local`` ones. Layers in ``nope_layers`` do not rotate queries and keys. ``attention_scale`` multiplies scores,
    and ``norm_offset`` is added to stored norm weights. With a ``logit_soft_cap`` a logit becomes
    ``logit_soft_cap * tanh(logit / logit_soft_cap)``. A model that pools prompts makes no logits, and may have no head.
    """

    is_native = True

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_scale: float
    sliding_windows: tuple[int | None, ...]
    rope_frequencies: tuple[float, ...] = field(repr=False)
    rope_scale: float
    local_rope_frequencies: tuple[float, ...] = field(default=(), repr=False, kw_only=True)
    local_rope_scale: float = field(default=1.0, kw_only=True)
    nope_layers: tuple[int, ...] = field(default=(), kw_only=True)
    norm_offset: float = field(default=0.0, kw_only=True)
    logit_soft_cap: float | None = field(default=None, kw_only=True)
    qkv_bias: bool = field(default=False, kw_only=True)
    attention_output_bias: bool = field(default=False, kw_only=True)
    mlp_bias: bool = field(default=False, kw_only=True)
    moe: MoEConfig | None = field(default=None, kw_only=True)
    makes_logits: bool = field(default=True, kw_only=True)

    @classmethod
    def read(cls, folder: Path, fields_of: Callable[[str, Path, Any], Mapping[str, Any]]) -> "DecoderConfig":
        """Reads ``config.json``, and ``generation_config.json`` if it exists, or a GGUF file. ``fields_of`` returns the
        fields that an architecture sets itself, from its name, the file's path and transformers' configuration. Raises
        ``ModelError``.
        """
        path = config_path(folder)
        raw = read_config_json(folder)
        architecture = architecture_of(path, raw)
        if not is_supported(architecture, raw):
            raise ModelError(f"{path} names {architecture}, and supported are {', '.join(ARCHITECTURES)}.")
        check_sizes(path, raw)
        hf = _parse_config(path, architecture, raw)
        is_nested = "full_attention" in hf.rope_parameters
        frequencies, scale = _rope_frequencies(
            path, hf, raw.get("rope_factors"), "full_attention" if is_nested else None
        )
        local = _rope_frequencies(path, hf, None, "sliding_attention") if is_nested else ((), 1.0)
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
            attention_scale=_head_dim(hf) ** -0.5,
            sliding_windows=(None,) * hf.num_hidden_layers,
            rope_frequencies=frequencies,
            rope_scale=scale,
            local_rope_frequencies=local[0],
            local_rope_scale=local[1],
            max_length=_max_length(hf),
            eos_token_ids=eos_token_ids(folder, raw, hf.vocab_size),
            model_revision=compute_revision(folder),
        )
        config = replace(config, **fields_of(architecture, path, hf))
        _check_shape(path, config)
        return config

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "DecoderConfig":
        """The configuration whose ``asdict`` went through JSON, which makes lists of its tuples."""
        moe, pooler = values["moe"], values["pooler_config"]
        parts = {
            "moe": moe and MoEConfig(**_with_tuples(moe)),
            "pooler_config": pooler and PoolerConfig.from_plain(pooler),
        }
        return cls(**{**_with_tuples(values), **parts})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def is_supported(architecture: str, raw: dict[str, Any]) -> bool:
    """Whether a native class serves the model of a ``config.json``. Models with the same architecture but another
    model type or activation are not supported.
    """
    own = own_architecture(architecture)
    if own is None or raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        return False
    key, activation = own.activation
    return (raw.get("model_type", own.model_type), raw.get(key, activation)) == (own.model_type, activation)


def check_sizes(path: Path, raw: dict[str, Any]) -> None:
    """Raises ``ModelError`` if sizes of a model with a native implementation are missing or wrong."""
    own = own_architecture(architecture_of(path, raw))
    required = [name for name in REQUIRED_SIZES if own is None or name not in own.optional_sizes]
    for name in required:
        if name not in raw:
            raise ModelError(f"{path} has no {name}.")
    for name in (*REQUIRED_SIZES, *OPTIONAL_SIZES):
        value = raw.get(name)
        if (value is not None or name in required) and not is_positive_int(value):
            raise ModelError(f"{path} says that {name} is {value!r}, and it must be a whole number above 0.")
    if raw["num_hidden_layers"] > MAX_LAYERS:
        raise ModelError(f"{path} says that num_hidden_layers is {raw['num_hidden_layers']}; {MAX_LAYERS} can be read.")


def _parse_config(path: Path, architecture: str, raw: dict[str, Any]) -> Any:
    own = own_architecture(architecture)
    assert own is not None, "it is supported"
    if plain := plain_config(own.model_type, raw):
        return plain
    from transformers import CONFIG_MAPPING

    return to_hf_config(path, raw, CONFIG_MAPPING[own.model_type])


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def attention_biases(hf: Any) -> dict[str, bool]:
    """Returns the fields of ``DecoderConfig`` for ``attention_bias``, which gives all projections of attention a bias
    or none.
    """
    bias = bool(hf.attention_bias)
    return {"qkv_bias": bias, "attention_output_bias": bias}


def same_window(path: Path, hf: Any) -> tuple[int | None, ...]:
    """Returns the window of each layer of a model whose layers all have ``sliding_window`` or none. Raises
    ``ModelError``.
    """
    layers: int = hf.num_hidden_layers
    return (_window(path, hf),) * layers


def windows_by_layer_type(path: Path, hf: Any) -> tuple[int | None, ...]:
    """Returns the window of each layer of a model in which only layers of type ``sliding_attention`` have one. Raises
    ``ModelError``.
    """
    layers: int = hf.num_hidden_layers
    window = _window(path, hf)
    if window is None:
        return (None,) * layers
    if len(hf.layer_types) != layers:
        raise ModelError(f"{path} has {len(hf.layer_types)} layer_types for {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _window(path: Path, hf: Any) -> int | None:
    window: int | None = getattr(hf, "sliding_window", None)
    if window is not None and not is_positive_int(window):
        raise ModelError(f"{path} says that sliding_window is {window!r}, and it must be a whole number above 0.")
    return window


def _max_length(hf: Any) -> int:
    rope, length = hf.rope_parameters, int(hf.max_position_embeddings)
    nested = [each for each in rope.values() if isinstance(each, dict)]
    return min(rope_max_length(length, each) for each in nested or [rope])


def _rope_frequencies(
    path: Path, hf: Any, factors: Sequence[float] | None, layer_type: str | None
) -> tuple[tuple[float, ...], float]:
    """Returns frequencies [head_dim / 2] and scale, by transformers' own functions, for the length that the weights
    were trained for. ``factors``, which a GGUF file may have, divide the frequencies. With a ``layer_type``, uses the
    rope parameters of that type.
    """
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"{path} asks for rope of type {kind!r}, and supported are {', '.join(SUPPORTED_ROPE_TYPES)}.")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path} rotates only a part of each head, which is not supported.")
    try:
        frequencies, scale = _compute_rope_frequencies(kind, hf, parameters, layer_type)
        if factors is not None:
            frequencies = tuple(each / factor for each, factor in zip(frequencies, factors, strict=True))
    except Exception as error:  # noqa: BLE001 - a wrong parameter fails wherever the formula uses it
        raise ModelError(f"{path} has rope parameters that do not work: {one_line(error)}.") from None
    if not all(map(math.isfinite, (*frequencies, scale))):
        raise ModelError(f"{path} has rope parameters that lead to numbers which are not finite.")
    return frequencies, scale


def _compute_rope_frequencies(
    kind: str, hf: Any, parameters: dict[str, Any], layer_type: str | None
) -> tuple[tuple[float, ...], float]:
    import torch

    if kind in ("default", "llama3"):
        size = _head_dim(hf)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        plain = 1.0 / (parameters["rope_theta"] ** exponents)
        return tuple((plain if kind == "default" else _llama3_frequencies(plain, parameters)).tolist()), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), layer_type=layer_type)
    return tuple(frequencies.tolist()), float(scale)


def _llama3_frequencies(plain: "torch.Tensor", rope: dict[str, Any]) -> "torch.Tensor":
    """Returns Llama 3.1's frequencies: low ones divided by ``factor``, high ones unchanged, and a mixture in
    between.
    """
    import torch

    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    divided = torch.where(wavelengths > length / low, plain / rope["factor"], plain)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * divided / rope["factor"] + share * divided
    is_between = ~(wavelengths < length / high) * ~(wavelengths > length / low)
    return torch.where(is_between, mixed, divided)


def _check_shape(path: Path, config: DecoderConfig) -> None:
    if config.moe is not None and config.moe.num_experts_per_tok > config.moe.num_experts:
        raise ModelError(
            f"{path} sends each token to {config.moe.num_experts_per_tok} of {config.moe.num_experts} experts."
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path} has {config.num_heads} attention heads, which {config.num_kv_heads} KV heads do not divide."
        )
    if config.head_dim % 2:
        raise ModelError(f"{path} has a head dimension of {config.head_dim}, and rope needs an even one.")
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        raise ModelError(f"{path} says that rms_norm_eps is {config.rms_norm_eps}, which is not a number from 0 on.")


def config_path(folder: Path) -> Path:
    """Returns the file with a model's configuration: ``config.json``, or a GGUF file."""
    return find_gguf(folder) or folder / "config.json"


def read_config_json(folder: Path) -> dict[str, Any]:
    """Returns the object in ``config.json``, or its equivalent from a GGUF file. For a multimodal model, returns the
    configuration of its text part. ``architectures`` names the class that serves it. Raises ``ModelError`` if there is
    no file, or if only code of the folder knows the class.
    """
    path = config_path(folder)
    if path.suffix == GGUF_SUFFIX:
        return gguf_config(GgufFile.read(path))
    return text_config(with_served_class(path, read_json(path)))


def quantization_of(folder: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    """Returns how ``config.json`` says that the stored weights are quantised; None if they are not."""
    config = raw.get("quantization_config") or raw.get("compression_config") or None
    if config is not None and not isinstance(config, dict):
        raise ModelError(f"{config_path(folder)} has a quantization_config that is not an object.")
    return config


def to_hf_config(path: Path, raw: dict[str, Any], config_class: Any) -> Any:
    """Returns ``raw`` as transformers' ``config_class``, with its defaults. Raises ``ModelError``."""
    ours = ("dtype", "torch_dtype", "eos_token_id")  # read by other rules than in transformers
    values = {key: value for key, value in raw.items() if key not in ours}
    try:
        return config_class.from_dict(values)
    except Exception as error:  # noqa: BLE001 - transformers checks with exceptions of many kinds
        raise ModelError(f"{path} is not a {config_class.__name__}: {one_line(error)}.") from None


def rope_max_length(length: int, rope: dict[str, Any]) -> int:
    """Returns the longest sequence in tokens for a configured ``length``. With YaRN it is at least the original length
    times the factor, because some configurations keep the original as ``length``.

    With dynamic scaling and with LongRoPE it is the length at which the frequencies change: keys in the cache cannot be
    rotated again.
    """
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original is not None:
        return min(length, int(original))
    if rope.get("rope_type") != "yarn" or rope.get("factor") is None:
        return length
    return max(length, int(rope["factor"] * rope["original_max_position_embeddings"]))


def eos_token_ids(folder: Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end an output: the union of ``generation_config.json``, ``config.json`` and the
    tokenizer.
    """
    path = folder / "generation_config.json"
    generation = read_json(path).get("eos_token_id") if path.is_file() else None
    named = [(path, generation), (config_path(folder), raw.get("eos_token_id"))]
    return end_token_ids(named, folder, vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ``ModelError`` like ``read_json_value``, and if it holds something
    else.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} is not a JSON object.")
    return value


def read_json_value(path: Path) -> Any:
    """Returns the value in a JSON file. Raises ``ModelError`` if the file is missing, or if a value is NaN or infinite.
    Infinity is allowed in lists: there it stands for a bound that never applies, as in ``time_step_limit``.
    """
    if not path.parent.is_dir():
        raise ModelError(f"There is no model to load: {no_such_path(str(path.parent))}.")
    try:
        value = json.loads(path.read_bytes())
        _check_finite(path, path.name, value)
        return value
    except FileNotFoundError:
        raise ModelError(f"The model folder {path.parent} has no {path.name}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise DamagedFileError(f"{path} is not valid JSON.") from None


def _check_finite(path: Path, name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_finite(path, key, each)
    elif isinstance(value, list):
        for each in value:
            _check_finite(path, name, None if each == math.inf else each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ModelError(f"{path} says that {name} is {json.dumps(value)}, which no model can have.")


def one_line(error: BaseException) -> str:
    """Returns the message of ``error`` on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def is_positive_int(value: object) -> bool:
    """Whether ``value`` is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def compute_revision(folder: Path) -> str:
    """Returns a hash of ``config.json`` and of the weight files' names, sizes, headers and samples, or of a GGUF file.

    Samples are needed because fine-tunes of one base share headers and sizes. Reading all gigabytes would slow every
    start.
    """
    path = config_path(folder)
    if path.suffix == GGUF_SUFFIX:
        return _gguf_revision(path)
    digest = blake2b(path.read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_safetensors_header(path))
        digest.update(_sample_bytes(path))
    return digest.hexdigest()


def _sample_bytes(path: Path) -> bytes:
    """Returns ``NUM_SAMPLES`` pieces of a file at equal distances, up to its end."""
    try:
        with path.open("rb") as file:
            last = max(0, path.stat().st_size - SAMPLE_BYTES)
            starts = [last * index // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)]
            return b"".join(os.pread(file.fileno(), SAMPLE_BYTES, start) for start in starts)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def _gguf_revision(path: Path) -> str:
    """Returns a hash of a GGUF file's size, metadata, tensor names and samples."""
    file = GgufFile.read(path)
    facts = repr((path.stat().st_size, sorted(file.metadata.items()), sorted(file.tensors)))
    return blake2b(facts.encode() + _sample_bytes(path), digest_size=8).hexdigest()


def _safetensors_header(path: Path) -> bytes:
    """Returns the length and the JSON header at the start of a safetensors file, or less if the file is shorter."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
