"""An adapter's folder as PEFT writes it, ``adapter_config.json`` and ``adapter_model.safetensors``: read and checked.

What would change the answer and is not done is refused. Nothing is read with pickle.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from quire_proto.hashing import HASH_BYTES
from safetensors import SafetensorError
from safetensors.torch import load

from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.errors import LoRAError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Beside its numbers a file has names and shapes of its tensors.
_MAX_HEADER_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 1 << 20
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")

# What makes of an adapter something else than ``W + scale * B @ A``: a setting, and what it is.
_UNSUPPORTED = {
    "use_dora": "a weight-decomposed adapter (DoRA)",
    "use_qalora": "a QALoRA adapter",
    "lora_bias": "an adapter with biases",
    "modules_to_save": "an adapter with whole modules of its own (modules_to_save)",
    "rank_pattern": "an adapter with other ranks for some modules (rank_pattern)",
    "alpha_pattern": "an adapter with other scales for some modules (alpha_pattern)",
    "layer_replication": "an adapter that repeats layers (layer_replication)",
    "trainable_token_indices": "an adapter with embeddings of its own (trainable_token_indices)",
    "target_parameters": "an adapter of parameters instead of layers (target_parameters)",
    "alora_invocation_tokens": "an adapter that some tokens switch on (aLoRA)",
    "fan_in_fan_out": "an adapter for transposed weights (fan_in_fan_out)",
}
# How PEFT may have initialised the matrices while it left the model's weights as they are.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """What an adapter adds to one linear layer: ``x @ a.T @ b`` for inputs [T, in]. ``a`` [r, in], and ``b`` [r, out],
    transposed and multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """The ``weights`` of an adapter by the names of their layers in the model, and the ``digest`` of its two files."""

    rank: int
    digest: bytes
    weights: Mapping[str, LoRAWeights]

    @classmethod
    def read(cls, folder: Path, config: DecoderConfig, max_rank: int) -> "LoRAAdapter":
        """Reads an adapter of the model that ``config`` describes. Raises ``LoRAError``, with one sentence."""
        shapes = target_shapes(config)
        text = _read_file(folder, CONFIG_FILE, _MAX_CONFIG_BYTES)
        rank, scale = _read_config(folder / CONFIG_FILE, text, max_rank)
        largest = 4 * max_rank * sum(sum(shape) for shape in shapes.values()) + _MAX_HEADER_BYTES
        data = _read_file(folder, WEIGHTS_FILE, largest)
        path = folder / WEIGHTS_FILE
        try:
            tensors: dict[str, torch.Tensor] = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise LoRAError(f"{path} is not a whole safetensors file: {error}.") from None
        digest = blake2b(len(text).to_bytes(8, "little") + text + data, digest_size=HASH_BYTES).digest()
        return cls(rank, digest, _pair_weights(path, tensors, shapes, rank, scale))


def target_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The linear layers that adapters may change, [out, in] by name: those of attention and of dense feed-forward
    networks.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{part}_proj": shape for part, shape in attention.items()}
        if config.moe is None or not config.moe.is_moe_layer[index]:
            shapes |= {f"{layer}.mlp.{part}_proj": shape for part, shape in mlp.items()}
    return shapes


def _read_file(folder: Path, name: str, largest: int) -> bytes:
    """The bytes of a file, at most ``largest``."""
    if not folder.is_dir():
        raise LoRAError(f"The adapter's folder {folder} does not exist.")
    path = folder / name
    if name == WEIGHTS_FILE and not path.is_file() and (folder / PICKLE_FILE).is_file():
        raise LoRAError(
            f"{folder / PICKLE_FILE} is a pickle, which can hold a program and is not read: load the adapter with PEFT "
            f"and save it again, save_pretrained(..., safe_serialization=True), which writes {WEIGHTS_FILE}."
        )
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except FileNotFoundError:
        raise LoRAError(f"The adapter's folder {folder} has no {name}.") from None
    except OSError as error:
        raise LoRAError(f"{path} cannot be read: {error.strerror}.") from None
    if len(data) > largest:
        raise LoRAError(f"{path} is larger than {largest} bytes, which is more than an adapter of this model can be.")
    return data


def _read_config(path: Path, text: bytes, max_rank: int) -> tuple[int, float]:
    """The rank, and the scale of ``B @ A``."""
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise LoRAError(f"{path} is not valid JSON.") from None
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
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LoRAError(f"{path} has no rank: r must be a whole number above 0.")
    if rank > max_rank:
        raise LoRAError(f"{path} has the rank {rank}, and --max-lora-rank is {max_rank}.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise LoRAError(f"{path} has no scale: lora_alpha must be a number.")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pair_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]], rank: int, scale: float
) -> dict[str, LoRAWeights]:
    """The tensors as pairs, by layer. Raises ``LoRAError`` for a tensor that is none of a pair or fits no layer."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR_NAME.fullmatch(name)
        if found is None or found["module"] not in shapes:
            raise LoRAError(
                f"{path} has the tensor {name}, and what adapters may change here is {_layer_names(shapes)}."
            )
        outputs, inputs = shapes[found["module"]]
        expected = [rank, inputs] if found["matrix"] == "A" else [outputs, rank]
        if list(tensor.shape) != expected:
            raise LoRAError(
                f"{path} has {name} in the shape {list(tensor.shape)}, but this model and the rank {rank} ask for "
                f"{expected}."
            )
        if tensor.dtype not in DTYPES:
            raise LoRAError(f"{path} stores {name} as {tensor.dtype}, which is not supported.")
        pairs.setdefault(found["module"], {})[found["matrix"]] = tensor
    if not pairs:
        raise LoRAError(f"{path} has no tensors.")
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise LoRAError(f"{path} has only one of the two matrices lora_A and lora_B of {module}.")
    return {module: LoRAWeights(pair["A"], (pair["B"].float() * scale).T) for module, pair in pairs.items()}


def _layer_names(shapes: Iterable[str]) -> str:
    """The last parts of the names of all layers, once each."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in shapes))
