"""What LoRA adapters cost a batch: `python -m tests.bench.lora`.

A model of random weights with so many adapters, whose requests decode together: in turns without adapters, with one for
all requests, and with several. Medians of tokens a second, each over that without.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from quire_engine.bench.workload import SHAPES

from tests.bench.model import make_model, make_prompts

PROMPT, OUTPUT = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["q", "k", "v", "o", "gate", "up", "down"])
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    options = parser.parse_args()
    folder = make_model(Path(f".run/bench-{options.shape}"), {**SHAPES[options.shape], "max_position_embeddings": 2048})
    with tempfile.TemporaryDirectory() as adapters:
        run(options, folder, Path(adapters))


def run(options: argparse.Namespace, folder: Path, adapters: Path) -> None:
    from quire_engine.config import EngineArgs
    from quire_engine.core.lora import LoRARequest
    from quire_engine.factory import load_executor

    config = EngineArgs(
        model=folder,
        kv_cache_memory=1 << 30,
        swap_space=0.0,
        max_num_seqs=256,
        enable_lora=True,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
    )
    executor = load_executor(config, owns_process=True)
    loras = []
    for number in range(1, options.adapters + 1):
        path = write_adapter(adapters / str(number), folder, options, number)
        loras.append(executor.check_lora(LoRARequest(str(number), number, path)))
    kinds = {"none": [None], "one": loras[:1], f"{options.adapters} adapters": loras}
    for count in options.requests:
        prompts = make_prompts(count, PROMPT)
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds + 1):
            for kind, mixed in kinds.items():
                rates[kind].append(measure(config, executor, prompts, mixed))
        medians = {kind: statistics.median(each[1:]) for kind, each in rates.items()}  # the first ones read and capture
        shown = ", ".join(f"{kind} {rate:.0f} ({rate / medians['none']:.2f})" for kind, rate in medians.items())
        print(f"{count:>4} that decode, tokens/s: {shown}")
    executor.close()


def measure(config, executor, prompts: list[list[int]], loras: list) -> float:
    """Tokens a second of requests that decode, with these adapters in turn."""
    from quire_engine.core.engine_core import EngineCore
    from quire_engine.core.request import Request
    from quire_engine.factory import make_scheduler
    from quire_proto.sampling import SamplingParams

    core = EngineCore(make_scheduler(config, executor), executor, lambda _: None)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.scheduler.add_request(Request(str(index), prompt, params, lora=loras[index % len(loras)]))
    core.step()  # the prompts
    begin = perf_counter()
    while core.scheduler.has_work:
        core.step()
    return len(prompts) * (OUTPUT - 1) / (perf_counter() - begin)


def write_adapter(folder: Path, model: Path, options: argparse.Namespace, seed: int) -> Path:
    """An adapter of the ``--targets`` of every layer of the model, as PEFT writes it, with random numbers."""
    from quire_engine.models.loader import model_class, read_model_config
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors, rank = {}, options.rank
    described = read_model_config(model)
    for name, (outputs, inputs) in model_class(described).lora_targets(described).items():
        if name.rpartition(".")[2].removesuffix("_proj") not in options.targets:
            continue
        for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator, dtype=torch.bfloat16) / math.sqrt(inputs)
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
