"""What it costs to read layers from disk in each step: `python -m tests.bench.weights_on_disk --memory 0.4`.

A model of random weights in one process whose layers are in memory, and in one that holds ``--memory`` GiB of them, in
turns; for each number of requests that decode, medians of the tokens a second. The bytes that a step reads over the
seconds of a step say what the disk gives.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
from quire_engine.bench.workload import SHAPES, model_of_shape

from tests.bench.model import make_prompts
from tests.bench.pipeline import run

PROMPT = 32


def main() -> None:
    options = parse_options()
    folder = model_of_shape(options.shape, 0)
    if options.run is not None:
        print(json.dumps(measure(folder, options, options.run or None)))
        return
    rounds = [[measure_apart(options, memory) for memory in (0.0, options.memory)] for _ in range(options.rounds)]
    for place, count in enumerate(options.requests):
        held, read = (statistics.median(each[way][place] for each in rounds) for way in (0, 1))
        print(f"{count:>4} that decode: {held:7.1f} tokens/s in memory, {read:7.1f} from disk: {read / held:.2f}")


def measure_apart(options: argparse.Namespace, memory: float) -> list[float]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.weights_on_disk", "--run", str(memory), "--shape", options.shape]
    command += ["--output", str(options.output), "--requests", *map(str, options.requests)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rates: list[float] = json.loads(done.stdout)
    return rates


def measure(folder: Path, options: argparse.Namespace, memory: float | None) -> list[float]:
    """Tokens a second of each number of requests."""
    from quire_engine.config import EngineArgs
    from quire_engine.factory import load_executor

    config = EngineArgs(
        model=folder, weights_memory_gb=memory, kv_cache_memory=1 << 30, swap_space=0.0, max_num_seqs=256
    )
    executor = load_executor(config, owns_process=True)
    rates = []
    for count in options.requests:
        rate, _ = run(config, executor, [psutil.Process()], make_prompts(count, PROMPT), options.output)
        rates.append(rate)
    executor.close()
    return rates


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-1b")
    parser.add_argument("--memory", type=float, default=0.6, help="GiB of the layers' weights that are held")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--output", type=int, default=16, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=float, help="measures in this process, with so many GiB or 0 for all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
