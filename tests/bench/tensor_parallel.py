"""Two ranks of one thread beside one process of two, on the same cores: `python -m tests.bench.tensor_parallel`.

A model of 110 M parameters in float32, whose heads two ranks can share, in turns, each way in processes of its own;
medians of the tokens a second. `--sockets` has sums go through gloo, as where memory cannot be shared. `--dbo` compares
two ranks whose sums do so with and without `--enable-dbo`, which concerns the prompts alone.
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
    parser.add_argument("--dbo", action="store_true", help="two ranks, with --enable-dbo and without, through gloo")
    parser.add_argument("--enable-dbo", action="store_true", help="what --run measures is with it")
    parser.add_argument("--run", type=int, help="measures so many ranks in this process, and prints JSON")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(options.folder)
    if options.run:
        print(json.dumps(measure(options)))
        return
    ways = {"in one process": ["--run", "1"], "in two ranks": ["--run", "2"]}
    if options.dbo:
        ways = {"in two ranks": ["--run", "2"], "with --enable-dbo": ["--run", "2", "--enable-dbo"]}
    rounds = [{way: measure_apart(options, flags) for way, flags in ways.items()} for _ in range(options.rounds)]
    first, second = ways
    for name in rounds[0][first]:
        one, two = (statistics.median(each[way][name] for each in rounds) for way in ways)
        print(f"{name:>18}: {one:7.0f} tokens/s {first}, {two:7.0f} {second}: {two / one:.2f}", flush=True)


def measure_apart(options: argparse.Namespace, flags: list[str]) -> dict[str, float]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.tensor_parallel", *flags, "--folder", str(options.folder)]
    if options.sockets or options.dbo:
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
        enable_dbo=options.enable_dbo,
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
