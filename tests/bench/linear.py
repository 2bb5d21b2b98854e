"""Products with packed weights beside oneDNN's and torch's: `python -m tests.bench.linear`.

For each shape of a weight and each number of rows: how fast the compiled kernel is, and the time of oneDNN with a
weight that it packed once, where it has such products, and of `F.linear`, over the kernel's. There are as many copies
of a weight as do not fit the caches, as in a model. All take turns; on one thread its processor time is taken, and
otherwise the time on the wall; the least of many calls counts.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from quire_engine.kernels.packed_linear import pack_weight
from torch.nn import functional as F

SHAPES = ((3072, 576), (960, 576), (576, 1536), (576, 576), (49152, 576), (2048, 2048))
ROWS = (1, 8, 32, 64, 128, 512, 2048)
BEYOND_CACHES = 1 << 27  # bytes
WORK = 1e10  # multiplications between two looks at the clock
TURNS = 9

Product = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {options.threads} threads; GFLOP/s and GB/s of the kernel, others' time over the kernel's")
    for outputs, inputs in SHAPES:
        ways = make_ways(outputs, inputs, dtype)
        for rows in ROWS:
            if rows * outputs <= 1 << 23:
                seconds = measure(ways, torch.randn(rows, inputs).to(dtype), outputs, options.threads)
                print(describe(outputs, inputs, rows, dtype, seconds), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def make_ways(outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, list[Product]]:
    """For each way as many layers as do not fit the caches, whose weights are the same."""
    weight = torch.randn(outputs, inputs).to(dtype)
    copies = max(1, BEYOND_CACHES // weight.nbytes)
    makers = {"kernel": kernel, "oneDNN": packed_by_onednn, "F.linear": plain}
    ways: dict[str, list[Product]] = {}
    for way, make in makers.items():
        with suppress(RuntimeError):  # of oneDNN, on a processor for whose numbers of this dtype it has no instructions
            ways[way] = [make(weight) for _ in range(copies)]
    return ways


def kernel(weight: torch.Tensor) -> Product:
    packed = pack_weight(weight, None)
    if packed is None:
        raise SystemExit("the kernels cannot be compiled here")
    return packed.matmul


def packed_by_onednn(weight: torch.Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def plain(weight: torch.Tensor) -> Product:
    copy = weight.clone()
    return lambda x: F.linear(x, copy)


def measure(ways: dict[str, list[Product]], x: torch.Tensor, outputs: int, threads: int) -> dict[str, float]:
    """The least mean seconds of a call of each way."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    calls = max(1, min(len(ways["kernel"]), int(WORK / (x.numel() * outputs))))
    least = dict.fromkeys(ways, float("inf"))
    for layers in turns(ways, calls):
        for way, chosen in layers.items():
            begin = clock()
            for layer in chosen:
                layer(x)
            least[way] = min(least[way], (clock() - begin) / calls)
    return least


def turns(ways: dict[str, list[Product]], calls: int) -> Iterator[dict[str, Sequence[Product]]]:
    """The layers to call in each turn, others than the time before."""
    for turn in range(TURNS):
        order = list(ways) if turn % 2 else list(reversed(ways))
        yield {way: [ways[way][(turn * calls + i) % len(ways[way])] for i in range(calls)] for way in order}


def describe(outputs: int, inputs: int, rows: int, dtype: torch.dtype, seconds: dict[str, float]) -> str:
    own = seconds["kernel"]
    speed = 2e-9 * rows * outputs * inputs / own
    reading = 1e-9 * outputs * inputs * dtype.itemsize / own
    ratios = "".join(f"  {way} {time / own:5.2f}" for way, time in seconds.items() if way != "kernel")
    return f"[{outputs}, {inputs}] x {rows:<5}{1e6 * own:9.0f} us {speed:6.0f} GFLOP/s {reading:5.1f} GB/s{ratios}"


if __name__ == "__main__":
    main()
