"""Tokens sent to the ranks of their experts beside ranks that all have every token: `python -m tests.bench.all_to_all`.

A model with experts in bfloat16, in 2, 4, ... ranks of one thread. For each number of tokens, as one prompt and as
sequences that decode: milliseconds of a step both ways, and KiB that rank 0 sends for each token of a layer, where a
sum is a reduce-scatter and an all-gather. The ways take turns, each in processes of its own; medians. `--sockets` has
sums go through gloo, as where memory cannot be shared.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

WAYS = ("allgather_reducescatter", "alltoall")
TURNS = 9
BLOCK_SIZE = 16


def main() -> None:
    options = parse_options()
    if options.way:
        print(json.dumps(measure(options)))
        return
    sizes = f"{options.experts} experts, {options.chosen} of them a token, hidden {options.hidden}"
    print(f"{sizes}, {options.layers} layers; milliseconds of a step, KiB sent for each token of a layer")
    make_model(options)
    for size in options.ranks:
        rounds = [{way: measure_apart(way, size) for way in WAYS} for _ in range(options.rounds)]
        for name in rounds[0][WAYS[0]]:
            cells = []
            for way in WAYS:
                milliseconds, kib = (median(each[way][name][part] for each in rounds) for part in (0, 1))
                cells.append(f"{way} {milliseconds:8.2f} ms {kib:7.2f} KiB")
            print(f"{size} ranks, {name:>16}:  {'  '.join(cells)}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    for name, default in (("experts", 32), ("chosen", 2), ("hidden", 512), ("inner", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".run/bench-experts"))
    parser.add_argument("--sockets", action="store_true", help="sums go through gloo")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> None:
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        moe_intermediate_size=options.inner,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(options.folder)


def measure_apart(way: str, size: int) -> dict[str, tuple[float, float]]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.all_to_all", *sys.argv[1:], "--way", way, "--ranks", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(done.stdout)


def measure(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step, and KiB sent for each token of a layer, of each workload."""
    from quire_engine.config import EngineArgs
    from quire_engine.distributed import shared_memory
    from quire_engine.factory import load_executor

    config = EngineArgs(
        model=options.folder,
        tensor_parallel_size=options.ranks[0],
        all2all_backend=options.way,
        max_num_seqs=max(options.tokens),
        block_size=BLOCK_SIZE,
        kv_cache_memory=1 << 28,
        swap_space=0.0,
    )
    # What rank 0 cannot make, all do without.
    without = patch.object(shared_memory, "library", lambda: None) if options.sockets else nullcontext()
    with without, bytes_sent() as sent:
        executor = load_executor(config, owns_process=True)
        return measure_steps(options, executor, sent)


def measure_steps(options: argparse.Namespace, executor: Any, sent: list[float]) -> dict[str, tuple[float, float]]:
    """As ``measure``, of an executor that adds the bytes of each collective to ``sent``."""
    from quire_engine.worker.cpu_graph import CpuGraphRunner

    from tests.support.steps import make_step

    measured = {}
    for count in options.tokens:
        for name, chunks in (("prompt", one_prompt(count)), ("decode", sequences(count))):
            step = make_step(0, chunks)
            seconds = []
            for _ in range(2 + TURNS):  # the first ones capture
                begin = perf_counter()
                executor.execute_model(step)
                seconds.append(perf_counter() - begin)
            # Eagerly, as the interpreter does not see what a graph sends.
            with patch.object(CpuGraphRunner, "forward", lambda *_: None):
                sent.clear()
                executor.execute_model(step)
            measured[f"{count} {name}"] = 1e3 * median(seconds[2:]), sum(sent) / 1024 / count / options.layers
    executor.close()
    return measured


def one_prompt(count: int) -> list[Any]:
    from tests.support.steps import KnownChunk

    return [KnownChunk(0, random_tokens(count), 0, list(range(1, -(-count // BLOCK_SIZE) + 1)))]


def sequences(count: int) -> list[Any]:
    """Sequences of one token each."""
    from tests.support.steps import KnownChunk

    return [KnownChunk(each, [token], 0, [1 + each]) for each, token in enumerate(random_tokens(count))]


def random_tokens(count: int) -> list[int]:
    return torch.randint(3, 1024, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@contextmanager
def bytes_sent() -> Iterator[list[float]]:
    """The bytes that this rank sends to others in each collective, for models that are made meanwhile."""
    from quire_engine.distributed.communicator import GroupCoordinator as Group
    from quire_engine.distributed.communicator import shard_sizes

    sent: list[float] = []
    inside = [0]

    def counted(name: str, count: Callable[..., float]) -> Any:
        work = getattr(Group, name)

        def call(group: Group, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
            if not inside[0]:
                sent.append(count(group, tensor, *rest))
            inside[0] += 1
            try:
                return work(group, tensor, *rest)
            finally:
                inside[0] -= 1

        return patch.object(Group, name, call)

    def others_rows(group: Group, tensor: torch.Tensor) -> float:
        rows = len(tensor) - shard_sizes(len(tensor), group)[group.rank]
        return rows * tensor[0].nbytes

    def own_rows(group: Group, tensor: torch.Tensor, *_: int) -> float:
        return (group.size - 1) * tensor.nbytes

    def sent_rows(group: Group, tensor: torch.Tensor, to: Sequence[int], _: Sequence[int]) -> float:
        return (sum(to) - to[group.rank]) * tensor.element_size() * tensor[:1].numel()

    def both(group: Group, tensor: torch.Tensor) -> float:
        return 2 * (group.size - 1) / group.size * tensor.nbytes

    with (
        counted("all_reduce", both),
        counted("reduce_scatter", others_rows),
        counted("all_gather", own_rows),
        counted("all_to_all", sent_rows),
    ):
        yield sent


if __name__ == "__main__":
    main()
