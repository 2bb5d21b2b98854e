"""How fast KV blocks are copied, within a GPU and between it and the host: `python -m tests.bench.gpu_copies`.

Blocks of a model of 8 B parameters, by the engine's own pools and streams: neighbours, which are one copy, and blocks
scattered over the pool, which are one each. The share is that of one plain copy of as many bytes in the same direction.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.worker.kv_cache import KVCache
from quire_engine.worker.memory import CacheSizes

LAYER = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
BLOCK_SIZE, TRIES = 16, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, default=500, help="copied at once")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    device, figures = torch.device(options.device), list[dict[str, object]]()
    layout = BlockLayout.of([LAYER] * options.layers, BLOCK_SIZE, torch.bfloat16)
    size, count = layout.block_bytes, options.blocks
    cache = KVCache(layout, CacheSizes((2 * count + 1) * size, count * size), device)
    plain = torch.ones(count * size, dtype=torch.uint8, device=device)
    other = torch.empty_like(plain)
    host = torch.empty(count * size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ceilings = {
        "out": lambda: host.copy_(plain, non_blocking=True),
        "in": lambda: plain.copy_(host, non_blocking=True),
        "within": lambda: other.copy_(plain),
    }
    best = {name: seconds(copy, device)[0] for name, copy in ceilings.items()}
    for kind, (near, far) in moves(count).items():
        copies = {
            "out": BlockCopies(blocks_to_swap_out=pairs(near, far)),
            "in": BlockCopies(blocks_to_swap_in=pairs(far, near)),
            "within": BlockCopies(blocks_to_copy=pairs(near, [count + 1 + each for each in far])),
        }
        for name, each in copies.items():
            began = time.time()
            took, ended = seconds(lambda each=each: cache.copy(each), device)
            figure = {
                "name": f"{count} blocks {kind}, {name}",
                "value": count * size / took / 1e9,
                "unit": "GB/s",
                "share": best[name] / took,
                "began": began,
                "ended": ended,
            }
            print(f"{figure['name']}: {figure['value']:.1f} GB/s, {figure['share']:.0%} of a plain copy", flush=True)
            figures.append(figure)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    cache.close()


def moves(count: int) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Blocks of the device's pool, without the null block, and those of the other side."""
    source = random.Random(0)
    near, far = list(range(1, count + 1)), list(range(count))
    return {"side by side": (near, far), "scattered": (source.sample(near, count), source.sample(far, count))}


def pairs(sources: Sequence[int], targets: Sequence[int]) -> list[BlockCopy]:
    return [BlockCopy(*each) for each in zip(sources, targets, strict=True)]


def seconds(copy: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The least time that ``copy`` took until everything was done, and when the last one ended."""
    times = []
    for _ in range(TRIES + 1):
        begin = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:]), time.time()


if __name__ == "__main__":
    main()
