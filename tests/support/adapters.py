"""LoRA adapters as PEFT writes them, and what PEFT's merge makes of a model's weights: ``W + scale * B @ A``."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


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
            a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=generator) * 0.3
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
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    matrices = load_file(adapter / "adapter_model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name in [name for name in matrices if ".lora_A." in name]:
            b, a = matrices[name.replace(".lora_A.", ".lora_B.")], matrices[name]
            parameters[name.removeprefix(PREFIX).replace(".lora_A", "")] += scale * (b.float() @ a.float())
    merged.save_pretrained(folder)
    return folder


def _weights(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
