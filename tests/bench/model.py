"""The model and the requests that the benchmarks here share: 135 M random bf16 weights, prompts of random tokens,
systems that take turns. Speed beside other engines is measured by ``quire-engine bench``.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_engine.bench.workload import SHAPES

MIB = 1 << 20
SHAPE: dict[str, Any] = {**SHAPES["135m"], "max_position_embeddings": 2048}


def make_model(folder: Path, shape: dict[str, Any] = SHAPE) -> Path:
    """The 135 M model, or one of another shape, written once."""
    if not (folder / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_prompts(count: int, length: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, SHAPE["vocab_size"]) for _ in range(length)] for _ in range(count)]


def measure(systems: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each round, the systems in alternation."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            begin = time.perf_counter()
            rates[name].append(run() / (time.perf_counter() - begin))
    return rates
