"""Two ranks of one thread beside one process of two, on the same cores: `python -m tests.bench.tensor_parallel`.

A model of 110 M parameters in float32, whose heads two ranks can share, in turns, each way in processes of its own;
medians of the tokens a second. `--sockets` has sums go through gloo, as where memory cannot be shared.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.bench.model import make_prompts
from tests.bench.pipeline import OUTPUT, PROMPT, run

LONG_PROMPT, LONG_PROMPTS = 512, 4
SIZES = {
    "vocab_size": 49152,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--folder", type=Path, default=Path(".run/bench-110m"))
    parser.add_argument("--sockets", action="store_true", help="sums go through gloo")
    parser.add_argument("--run", type=int, help="measures so many ranks in this process, and prints JSON")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(options.folder)
    if options.run:
        print(json.dumps(measure(options)))
        return
    rounds = [{size: measure_apart(options, size) for size in (1, 2)} for _ in range(options.rounds)]
    for name in rounds[0][1]:
        one, two = (statistics.median(each[size][name] for each in rounds) for size in (1, 2))
        print(f"{name:>18}: {one:7.0f} tokens/s in one process, {two:7.0f} in two ranks: {two / one:.2f}", flush=True)


def measure_apart(options: argparse.Namespace, size: int) -> dict[str, float]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.tensor_parallel", "--run", str(size), "--folder", str(options.folder)]
    if options.sockets:
        command.append("--sockets")
    done = subprocess.run([*command, "--requests", *map(str, options.requests)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each workload."""
    from quire_engine.config import EngineArgs
    from quire_engine.distributed import shared_memory
    from quire_engine.factory import load_executor

    config = EngineArgs(
        model=options.folder,
        dtype="float32",
        tensor_parallel_size=options.run,
        kv_cache_memory=1 << 29,
        swap_space=0.0,
    )
    # What rank 0 cannot make, all do without.
    with patch.object(shared_memory, "library", lambda: None) if options.sockets else patch.dict({}):
        executor = load_executor(config, owns_process=True)
    processes = [psutil.Process(), *psutil.Process().children()]
    measured = {}
    for count in options.requests:
        measured[f"{count} that decode"] = run(config, executor, processes, make_prompts(count, PROMPT), OUTPUT)[0]
    prompts = make_prompts(LONG_PROMPTS, LONG_PROMPT)
    measured[f"prompts of {LONG_PROMPT}"] = run(config, executor, processes, prompts, 1)[0]
    executor.close()
    return measured


if __name__ == "__main__":
    main()
