"""Small random model folders, and the ways in which people publish such folders: other keys, names and files."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.folder_changes import Change, edit
from tests.support.model_folders import byte_level, write_model_folder

Weights = dict[str, torch.Tensor]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARY = byte_level().get_vocab_size()
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
}


@cache
def _base(kind: str) -> Path:
    model_type, changes = _KINDS[kind]
    folder = write_model_folder(Path(mkdtemp(prefix=f"quire-{kind}-")))
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def small_folder(folder: Path, kind: str = "llama") -> Path:
    """A folder with a random model of ``kind`` and a tokenizer, as transformers writes it."""
    return Path(shutil.copytree(_base(kind), folder))


@cache
def _vision_base() -> Path:
    parts = {"text_config": {**_SIZES, "model_type": "llama"}, "vision_config": _VISION}
    config = AutoConfig.for_model("llava", **parts, image_token_index=VOCABULARY - 1)
    torch.manual_seed(3)
    folder = Path(mkdtemp(prefix="quire-vision-"))
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def vision_folder(folder: Path) -> Path:
    """A folder with a random model that sees, whose text part is a Llama: names begin with ``language_model.``."""
    return Path(shutil.copytree(_vision_base(), folder))


def config(**changes: Any) -> Change:
    """A change of ``config.json``."""
    return edit("config.json", **changes)


def weights(change: Callable[[Weights], Weights]) -> Change:
    """A change of the tensors."""

    def apply(folder: Path) -> None:
        made = {name: tensor.contiguous() for name, tensor in change(load_file(folder / SINGLE)).items()}
        save_file(made, folder / SINGLE, {"format": "pt"})

    return apply


def renamed(rename: Callable[[str], str]) -> Change:
    """Other names for all tensors."""
    return weights(lambda old: {rename(name): tensor for name, tensor in old.items()})


def prefixed(before: str, body: str) -> Change:
    """Names that begin with ``body`` instead of ``before``."""
    return renamed(lambda name: body + name.removeprefix(before) if name.startswith(before) else name)


def without(*names: str) -> Change:
    """A folder that lacks tensors."""
    return weights(lambda old: {name: tensor for name, tensor in old.items() if name not in names})


def random_tensor(*shape: int) -> torch.Tensor:
    """Random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 0.3


def added(**tensors: Callable[[Weights], torch.Tensor]) -> Change:
    """More tensors, each made from those that are there."""
    return weights(lambda old: {**old, **{name: make(old) for name, make in tensors.items()}})


def sharded(
    *, indexed: bool = True, claimed: Mapping[str, str] = {}, unlisted: tuple[str, ...] = (), lost: int | None = None
) -> Change:
    """Two shards, of which one may be ``lost``. The index also claims ``claimed``, and does not list ``unlisted``."""

    def change(folder: Path) -> None:
        stored = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        names = sorted(stored)
        places = {name: f"model-{1 + (2 * at >= len(names)):05}-of-00002.safetensors" for at, name in enumerate(names)}
        for number in (1, 2):
            file = f"model-{number:05}-of-00002.safetensors"
            if number != lost:
                part = {name: stored[name] for name in names if places[name] == file}
                save_file(part, folder / file, {"format": "pt"})
        listed = {name: file for name, file in places.items() if name not in unlisted} | dict(claimed)
        if indexed:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))

    return change
