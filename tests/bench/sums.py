"""Sums over ranks: `python -m tests.bench.sums`.

Microseconds of a sum over 2, 4, ... ranks, which are processes, for tensors of several sizes: through shared memory,
through gloo, and gathered by gloo and added up in the order of the ranks, as more than two ranks had to before. Ranks
begin each turn together, and the median of the turns counts.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from quire_engine.distributed.communicator import GroupCoordinator
from quire_engine.distributed.rank_group import file_store

TOKENS = (1, 8, 64, 512, 2048)
TURNS = 7
SECONDS = 0.15

Way = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    options = parse_options()
    if options.rank is not None:
        return measure(options)
    for size in options.ranks:
        with TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.bench.sums", "--hidden", str(options.hidden), "--size", str(size)]
            started = [subprocess.Popen([*command, "--folder", folder, "--rank", str(rank)]) for rank in range(size)]
            for each in started:
                each.wait()
    return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=576, help="numbers of a token, in bfloat16")
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    group = GroupCoordinator(options.rank, options.size, torch.device("cpu"), ordered=True)
    group.connect(file_store(options.folder, options.size), None)
    sockets = group._process_group

    def gloo(x: torch.Tensor) -> torch.Tensor:
        sockets.allreduce([x]).wait()
        return x

    def gathered(x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((options.size, *x.shape))
        sockets.allgather([list(parts.unbind())], [x]).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    ways: dict[str, Way] = {"shared memory": group.all_reduce, "gloo": gloo, "gathered": gathered}
    for tokens in TOKENS:
        x = torch.randn(tokens, options.hidden).bfloat16()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            for name, way in ways.items():
                seconds[name].append(mean_seconds(way, x, sockets))
        if options.rank == 0:
            cells = "  ".join(f"{name} {1e6 * median(each):9.1f} us" for name, each in seconds.items())
            print(f"{options.size} ranks, {tokens:5} x {options.hidden}:  {cells}", flush=True)
    group.close()


def mean_seconds(way: Way, x: torch.Tensor, sockets: object) -> float:
    """Of as many calls as take some time, equally many on all ranks."""
    begin = time.perf_counter()
    way(x.clone())
    calls = torch.tensor([SECONDS / TURNS / max(1e-6, time.perf_counter() - begin)])
    sockets.allreduce([calls]).wait()  # type: ignore[attr-defined] # and all begin together
    count = int(calls.clamp(3, 3000))
    begin = time.perf_counter()
    for _ in range(count):
        way(x)
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main()
