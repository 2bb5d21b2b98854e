"""What a model folder says about its model, read once and checked; knows no weights and no device.

The folder's ``config.json`` is read through transformers' own configuration classes, so that defaults and both
spellings of the rope parameters mean what they mean there. No code from a folder is ever run.
"""

import json
import math
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from quire_engine.models.errors import ModelError

SUPPORTED = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MAX_HEADER_BYTES = 100_000_000
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family, in plain numbers.

    ``windows`` holds one entry a layer: the number of latest tokens that a token sees, itself included, or None for
    all. ``rope_frequencies`` [head_dim / 2] are radians a position with every scaling applied, and cosines and sines
    are multiplied by ``rope_scale`` (YaRN's attention factor). ``max_length`` is the longest sequence in tokens.
    ``model_revision`` is equal for equal folders, wherever they lie.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    tied_head: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope_frequencies: tuple[float, ...] = field(repr=False)
    rope_scale: float
    max_length: int
    eos_token_ids: tuple[int, ...]
    model_revision: str

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        """Reads ``config.json``, and ``generation_config.json`` where there is one. Raises ``ModelError``."""
        path = folder / "config.json"
        raw = read_json(path)
        architecture = _architecture(path, raw)
        _check_sizes(path, raw)
        eos_token_ids = _eos_token_ids(folder, raw)
        hf = _parse(path, architecture, raw)
        frequencies, scale = _rope(path, hf)
        qkv_bias, output_bias = _attention_biases(architecture, hf)
        config = cls(
            architecture=architecture,
            hidden_size=hf.hidden_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=_head_dim(hf),
            ffn_size=hf.intermediate_size,
            vocab_size=hf.vocab_size,
            norm_eps=float(hf.rms_norm_eps),
            tied_head=bool(hf.tie_word_embeddings),
            qkv_bias=qkv_bias,
            attention_output_bias=output_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(hf.mlp_bias),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_windows(path, hf),
            rope_frequencies=frequencies,
            rope_scale=scale,
            max_length=_max_length(hf),
            eos_token_ids=eos_token_ids,
            model_revision=_revision(folder),
        )
        _check_shape(path, config)
        return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``ModelError`` where there is none, or where it holds NaN or Infinity."""
    if not path.parent.is_dir():
        raise ModelError(f"The model folder {path.parent} does not exist.")
    try:
        value = json.loads(path.read_bytes(), parse_constant=lambda name: _not_finite(path, name))
    except FileNotFoundError:
        raise ModelError(f"The model folder {path.parent} has no {path.name}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def _not_finite(path: Path, name: str) -> NoReturn:
    raise ModelError(f"{path} holds {name}, which is not a number that a model can have.")


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in SUPPORTED:
        said = f"the architecture {name}" if name else "no architecture"
        raise ModelError(f"{path} names {said}, and supported are {', '.join(SUPPORTED)}.")
    if raw.get("auto_map"):
        raise ModelError(f"{path} has auto_map, but code from a model folder is never run.")
    if raw.get("quantization_config"):
        raise ModelError(f"{path} has quantization_config, and quantized weights are not supported.")
    return name


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    for name in SIZES:
        if name not in raw:
            raise ModelError(f"{path} has no {name}.")
    for name in (*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = raw.get(name)
        if (value is not None or name in SIZES) and not _is_positive(value):
            raise ModelError(f"{path} says that {name} is {value!r}, and it must be a whole number above 0.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path} says that hidden_act is {raw['hidden_act']!r}, and only silu is supported.")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parse(path: Path, architecture: str, raw: dict[str, Any]) -> Any:
    import transformers

    values = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    try:
        return getattr(transformers, SUPPORTED[architecture]).from_dict(values)
    except Exception as error:  # noqa: BLE001 - transformers checks with exceptions of many kinds
        raise ModelError(f"{path} is not a configuration of {architecture}: {_reason(error)}.") from None


def _reason(error: BaseException) -> str:
    """The message of ``error`` on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _attention_biases(architecture: str, hf: Any) -> tuple[bool, bool]:
    """Whether queries, keys and values have a bias, and whether the output projection has one."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    both = architecture != "MistralForCausalLM" and bool(hf.attention_bias)
    return both, both


def _windows(path: Path, hf: Any) -> tuple[int | None, ...]:
    """Mistral's window is that of all layers, Qwen's that of its ``sliding_attention`` layers; Llama has none."""
    layers: int = hf.num_hidden_layers
    window: int | None = getattr(hf, "sliding_window", None)
    if hf.model_type == "llama" or window is None:
        return (None,) * layers
    if not _is_positive(window):
        raise ModelError(f"{path} says that sliding_window is {window!r}, and it must be a whole number above 0.")
    if hf.model_type == "mistral":
        return (window,) * layers
    if len(hf.layer_types) != layers:
        raise ModelError(f"{path} has {len(hf.layer_types)} layer_types for {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _rope(path: Path, hf: Any) -> tuple[tuple[float, ...], float]:
    """Frequencies and scale by transformers' own functions, for the length that the weights were trained for."""
    parameters = hf.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ModelError(f"{path} asks for rope of type {kind!r}, and supported are {', '.join(ROPE_KINDS)}.")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path} rotates only a part of each head, which is not supported.")
    try:
        frequencies, scale = _frequencies(kind, hf)
    except Exception as error:  # noqa: BLE001 - a wrong parameter fails wherever the formula uses it
        raise ModelError(f"{path} has rope parameters that do not work: {_reason(error)}.") from None
    if not all(map(math.isfinite, (*frequencies, scale))):
        raise ModelError(f"{path} has rope parameters that lead to numbers which are not finite.")
    return frequencies, scale


def _frequencies(kind: str, hf: Any) -> tuple[tuple[float, ...], float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "default":
        size = _head_dim(hf)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return tuple((1.0 / (hf.rope_parameters["rope_theta"] ** exponents)).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _max_length(hf: Any) -> int:
    """Trained length, stretched by YaRN's factor where ``max_position_embeddings`` is still the length before it.

    With dynamic scaling the length ends where scaling would begin: keys in the cache cannot be turned again.
    """
    length = int(hf.max_position_embeddings)
    rope = hf.rope_parameters
    if rope.get("rope_type") != "yarn" or rope.get("factor") is None:
        return length
    return max(length, int(rope["factor"] * rope["original_max_position_embeddings"]))


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an output: those of ``generation_config.json``, else those of ``config.json``, else none."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        path, value = folder / "config.json", raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ModelError(f"{path} says that eos_token_id is {value!r}, which is neither a token id nor a list of them.")
    return tuple(dict.fromkeys(ids))


def _check_shape(path: Path, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path} has {config.num_heads} attention heads, which {config.num_kv_heads} KV heads do not divide."
        )
    if config.head_dim % 2:
        raise ModelError(f"{path} has a head dimension of {config.head_dim}, and rope needs an even one.")
    if not (math.isfinite(config.norm_eps) and config.norm_eps >= 0):
        raise ModelError(f"{path} says that rms_norm_eps is {config.norm_eps}, which is not a number from 0 on.")


def _revision(folder: Path) -> str:
    """Hash of ``config.json`` and of names, sizes, headers and samples of the weight files.

    Fine-tunes of one base share headers and sizes, hence the samples; reading all gigabytes would slow every start.
    """
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_header(path))
        digest.update(_samples(path))
    return digest.hexdigest()


def _samples(path: Path) -> bytes:
    """Pieces of a file at even distances, its end among them."""
    try:
        with path.open("rb") as file:
            last = max(0, path.stat().st_size - SAMPLE_BYTES)
            starts = [last * index // (SAMPLES - 1) for index in range(SAMPLES)]
            return b"".join(os.pread(file.fileno(), SAMPLE_BYTES, start) for start in starts)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def _header(path: Path) -> bytes:
    """The length and the JSON header that a safetensors file begins with, as far as they are there."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
