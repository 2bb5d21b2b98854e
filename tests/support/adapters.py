"""LoRA adapters as PEFT writes them, and what PEFT's merge makes of a model's weights: ``W + scale * B @ A``."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quire_engine.lora.adapter import LoRAAdapter
from quire_engine.models.loader import model_class, read_model_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def read_adapter(folder: Path, model: Path) -> LoRAAdapter:
    """An adapter of ``model``, of a rank of at most 8."""
    config = read_model_config(model)
    return LoRAAdapter.read(folder, model_class(config).lora_targets(config), 8)


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes an adapter of ``model`` into ``folder``: of each attention and dense feed-forward layer that ``targets``
    name. ``config`` are further settings.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(model).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets and ".experts." not in name:
            outputs, inputs = weight.shape
            own = first_match(config.get("rank_pattern", {}), module, rank)
            a = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(outputs, own, generator=generator) * 0.3
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_merged_model(folder: Path, model: Path, adapter: Path) -> Path:
    """Writes ``model`` with ``adapter`` merged into its weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    matrices = load_file(adapter / "adapter_model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name in [name for name in matrices if ".lora_A." in name]:
            b, a = matrices[name.replace(".lora_A.", ".lora_B.")], matrices[name]
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            alpha = first_match(config["alpha_pattern"], module, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            parameters[f"{module}.weight"] += scale * (b.float() @ a.float())
    merged.save_pretrained(folder)
    return folder


def first_match(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as in PEFT's ``get_pattern_key``."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _weights(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
