"""Reads and checks an adapter folder as PEFT writes it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Settings that would change the output but are not implemented are refused. Nothing is read with pickle.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
from quire_proto.folders import no_such_path
from quire_proto.hashing import HASH_BYTES
from safetensors import SafetensorError
from safetensors.torch import load

from quire_engine.checkpoint.text_part import is_beside_text, text_name
from quire_engine.errors import LoRAError, LoRANotFoundError, first_line

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
T = TypeVar("T")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Apart from its numbers, a file has the names and shapes of its tensors.
_MAX_HEADER_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 1 << 20
_MAX_ALPHA = 1e9
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")

# Settings that make an adapter something other than ``W + scale * B @ A``, with what they make of it.
_UNSUPPORTED = {
    "use_dora": "a weight-decomposed adapter (DoRA)",
    "use_qalora": "a QALoRA adapter",
    "lora_bias": "an adapter with biases",
    "modules_to_save": "an adapter with whole modules of its own (modules_to_save)",
    "layer_replication": "an adapter that repeats layers (layer_replication)",
    "trainable_token_indices": "an adapter with embeddings of its own (trainable_token_indices)",
    "target_parameters": "an adapter of parameters instead of layers (target_parameters)",
    "alora_invocation_tokens": "an adapter that some tokens switch on (aLoRA)",
    "fan_in_fan_out": "an adapter for transposed weights (fan_in_fan_out)",
    "use_bdlora": "an adapter of block-diagonal matrices (use_bdlora)",
    "arrow_config": "a router between adapters (arrow_config)",
    "kasa_config": "a KaSA adapter (kasa_config)",
    "monteclora_config": "an adapter with random weights (monteclora_config)",
}
# How PEFT may initialize the matrices without changing the model's weights.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
# Keys of rank_pattern and alpha_pattern are regular expressions. Without groups and with few repetitions they match
# fast.
_PATTERN = re.compile(r"[\w.\\*^\[\]-]{1,256}")
_MAX_PATTERNS, _MAX_REPETITIONS = 1024, 2


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """What an adapter adds to one linear layer: ``x @ a.T @ b`` for inputs [T, in]. ``a`` is [r, in]. ``b`` is [r,
    out], transposed and multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """The ``weights`` of an adapter by the names of the model's layers, and the ``digest`` of its two files."""

    digest: bytes
    weights: Mapping[str, LoRAWeights]

    @classmethod
    def read(cls, folder: Path, targets: Mapping[str, tuple[int, int]], max_rank: int) -> "LoRAAdapter":
        """Reads an adapter for a model in which adapters may change ``targets``, layers [out, in] by name. Raises
        ``LoRAError`` with one sentence, or ``LoRANotFoundError`` if the folder has no adapter.
        """
        try:
            text = _read_file(folder, CONFIG_FILE, _MAX_CONFIG_BYTES)
        except LoRAError as error:
            raise LoRANotFoundError(str(error)) from None
        scaling = _Scaling.read(folder / CONFIG_FILE, text, max_rank)
        largest = adapter_bytes(targets, max_rank) + _MAX_HEADER_BYTES
        data = _read_file(folder, WEIGHTS_FILE, largest)
        path = folder / WEIGHTS_FILE
        try:
            tensors: dict[str, torch.Tensor] = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise LoRAError(f"{path} is not a whole safetensors file: {first_line(error)}.") from None
        digest = blake2b(len(text).to_bytes(8, "little") + text + data, digest_size=HASH_BYTES).digest()
        return cls(digest, _pair_weights(path, tensors, targets, scaling))


def adapter_bytes(targets: Mapping[str, tuple[int, int]], max_rank: int) -> int:
    """Returns the most memory that an adapter of ``targets`` takes, in bytes, at 4 bytes per number."""
    return 4 * max_rank * sum(sum(shape) for shape in targets.values())


def _read_file(folder: Path, name: str, largest: int) -> bytes:
    """Returns the bytes of a file, at most ``largest``."""
    path = folder / name
    try:
        folder.stat()
        # Opening a pipe would block otherwise.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LoRAError(f"{path} is not a file.")
            data = file.read(largest + 1)
    except FileNotFoundError:
        raise LoRAError(_what_is_missing(folder, name)) from None
    except OSError as error:
        raise LoRAError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise LoRAError(f"{str(folder)!a} is not the name of a folder.") from None
    if len(data) > largest:
        raise LoRAError(f"{path} is larger than {largest} bytes, which is more than an adapter of this model can be.")
    return data


def _what_is_missing(folder: Path, name: str) -> str:
    if not folder.exists():
        return f"There is no adapter to load: {no_such_path(str(folder))}."
    if name == WEIGHTS_FILE and (folder / PICKLE_FILE).is_file():
        return (
            f"{folder / PICKLE_FILE} is a pickle, which can hold a program and is not read: load the adapter with PEFT "
            f"and save it again, save_pretrained(..., safe_serialization=True), which writes {WEIGHTS_FILE}."
        )
    return f"The adapter's folder {folder} has no {name}."


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The rank of each layer's matrices, and the scale of their product, as in PEFT: ``rank`` and ``alpha``, except for
    layers whose names match one of the patterns.
    """

    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def read(cls, path: Path, text: bytes, max_rank: int) -> "_Scaling":
        """Reads the settings of an adapter. Raises ``LoRAError`` if they are not supported."""
        try:
            config: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise LoRAError(f"{path} is not valid JSON.") from None
        _check_kind(path, config)
        ranks, alphas = (_patterns(path, config, name) for name in ("rank_pattern", "alpha_pattern"))
        for rank in (config.get("r"), *ranks.values()):
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise LoRAError(f"{path} has no rank: r must be a whole number above 0, and so each of rank_pattern.")
            if rank > max_rank:
                raise LoRAError(f"{path} has the rank {str(rank)[:20]}, and --max-lora-rank is {max_rank}.")
        for alpha in (config.get("lora_alpha"), *alphas.values()):
            if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= _MAX_ALPHA:
                raise LoRAError(f"{path} has no scale: lora_alpha must be a number, and so each of alpha_pattern.")
        return cls(config["r"], config["lora_alpha"], bool(config.get("use_rslora")), ranks, alphas)

    def of(self, module: str) -> tuple[int, float]:
        """Returns the rank of one layer, and the scale of its ``B @ A``."""
        rank, alpha = _match(self.ranks, module, self.rank), _match(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _check_kind(path: Path, config: Any) -> None:
    """Raises ``LoRAError`` for settings of anything other than ``W + scale * B @ A``."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise LoRAError(f"{path} does not describe a LoRA adapter: its peft_type must be LORA.")
    for name, what in _UNSUPPORTED.items():
        if config.get(name):
            raise LoRAError(f"{path} describes {what}, which is not served.")
    if config.get("bias", "none") != "none":
        raise LoRAError(f"{path} describes an adapter with biases (bias), which is not served.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in _PLAIN_INITS:
        raise LoRAError(
            f"{path} describes an adapter that changes the model's own weights (init_lora_weights is {init!r}), which "
            "is not served; PEFT can convert some when it saves them (path_initial_model_for_weight_conversion)."
        )


def _patterns(path: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a setting that maps regular expressions to values."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise LoRAError(f"{path} has a {name} that is none of at most {_MAX_PATTERNS} entries.")
    for pattern in patterns:
        try:
            if _PATTERN.fullmatch(pattern) and pattern.count("*") <= _MAX_REPETITIONS and re.compile(pattern):
                continue
        except re.error:
            pass
        raise LoRAError(
            f"{path} has a {name} for {pattern[:64]!r}: only parts of names are served, with wildcards but no groups."
        )
    return patterns


def _match(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Applies PEFT's rule: returns the value of the first pattern that matches the name, whole or after a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _pair_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]], scaling: _Scaling
) -> dict[str, LoRAWeights]:
    """Returns the tensors as pairs, by layer. Ignores tensors for vision and audio parts, because those parts are not
    loaded. Raises ``LoRAError`` for any other tensor that has no pair or fits no layer.
    """
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    stored: dict[str, str] = {}
    for name, tensor in tensors.items():
        found = _TENSOR_NAME.fullmatch(name)
        if found is not None and is_beside_text(found["module"]):
            continue
        module = "" if found is None else text_name(found["module"])
        if found is None or module not in shapes:
            raise LoRAError(
                f"{path} has the tensor {name}, and what adapters may change here is {_layer_names(shapes)}."
            )
        if stored.setdefault(module, found["module"]) != found["module"]:
            raise LoRAError(f"{path} has two names for the layer {module}: {stored[module]} and {found['module']}.")
        rank, (outputs, inputs) = scaling.of(found["module"])[0], shapes[module]
        expected = [rank, inputs] if found["matrix"] == "A" else [outputs, rank]
        if list(tensor.shape) != expected:
            raise LoRAError(
                f"{path} has {name} in the shape {list(tensor.shape)}, but this model and the rank {rank} ask for "
                f"{expected}."
            )
        if tensor.dtype not in DTYPES:
            raise LoRAError(f"{path} stores {name} as {tensor.dtype}, which is not supported.")
        pairs.setdefault(module, {})[found["matrix"]] = tensor
    if not pairs:
        raise LoRAError(f"{path} has no tensors of a text model.")
    return {module: _scaled(path, module, pair, scaling.of(stored[module])[1]) for module, pair in pairs.items()}


def _scaled(path: Path, module: str, pair: Mapping[str, torch.Tensor], scale: float) -> LoRAWeights:
    if len(pair) < 2:
        raise LoRAError(f"{path} has only one of the two matrices lora_A and lora_B of {module}.")
    weights = LoRAWeights(pair["A"], (pair["B"].float() * scale).T)
    if not (weights.a.isfinite().all() and weights.b.isfinite().all()):
        raise LoRAError(f"{path} has numbers that are not finite, or are not once they are scaled, for {module}.")
    return weights


def _layer_names(shapes: Iterable[str]) -> str:
    """Returns the last parts of the names of all layers, without duplicates."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in shapes))
