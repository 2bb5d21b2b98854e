"""What the router's prefix index costs, in bytes and in microseconds: `python -m tests.bench.index`.

Memory is measured in a process of its own: so many engines with so many blocks each, none shared, which is the most
that blocks can take; then as much again is stored and removed, as happens in a cache that is full. Times are CPU time
of this thread, the median of many.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
from quire_router.placement.prefix_index import BlockNamespace, PrefixIndex, Tier

MIB = 1 << 20
STEP = 2_000
PROMPT_BLOCKS = 64
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=100, help="for the memory")
    parser.add_argument("--blocks", type=int, default=100_000, help="for the memory: of each engine")
    parser.add_argument("--many", type=int, default=1_000, help="engines to match a prompt against")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--memory-only", action="store_true")
    options = parser.parse_args()
    if options.memory_only:
        measure_memory(options.engines, options.blocks)
        return
    print("  prefix index                                             ")
    for title, microseconds in times(options.many, options.repeats):
        print(f"    {title:<66} {microseconds:>9.1f} µs")
    command = [sys.executable, "-m", "tests.bench.index", "--memory-only"]
    sizes = ["--engines", str(options.engines), "--blocks", str(options.blocks)]
    subprocess.run([*command, *sizes], check=True, timeout=1200)


def measure_memory(engines: int, blocks: int) -> None:
    process, source = psutil.Process(), random.Random(0)
    index = PrefixIndex(engines * blocks)
    before = process.memory_info().rss
    seconds = [fill(index, row, blocks, source) for row in range(engines)]
    full = process.memory_info().rss - before
    replace(index, engines, blocks, source)
    churned = process.memory_info().rss - before
    assert index.counts.blocks == engines * blocks, index.counts
    each = engines * blocks
    print(f"    {each:,} blocks of {engines} engines: {full / MIB:,.0f} MiB, {full / each:.0f} bytes each")
    print(f"    after all were replaced by others: {churned / MIB:,.0f} MiB, {churned / each:.0f} bytes each")
    print(f"    storing a block: {1e6 * statistics.median(seconds) / blocks:.2f} µs (median of the engines)")
    index.clear(0)
    print(f"    sweeping a block: {1e6 * cpu_seconds(lambda: sweep(index)) / blocks:.2f} µs")
    print(f"    whole process: {process.memory_info().rss / MIB:,.0f} MiB")


def fill(index: PrefixIndex, row: int, blocks: int, source: random.Random) -> float:
    """CPU seconds of storing; the names are made apart from it, as they come from a message."""
    total = 0.0
    for _ in range(0, blocks, STEP):
        names = [source.randbytes(16) for _ in range(STEP)]
        total += cpu_seconds(lambda names=names: index.store(row, Tier.DEVICE, names))
    return total


def replace(index: PrefixIndex, engines: int, blocks: int, source: random.Random) -> None:
    """Every engine's blocks go out, a few at a time, and as many others come in."""
    old = {row: [key.to_bytes(16, "big") for key in index._slots.find(row).held] for row in range(engines)}
    for _ in range(0, blocks, STEP):
        for row in range(engines):
            gone, old[row] = old[row][-STEP:], old[row][:-STEP]
            index.remove(row, Tier.DEVICE, gone)
            index.store(row, Tier.DEVICE, [source.randbytes(16) for _ in range(len(gone))])


def sweep(index: PrefixIndex) -> None:
    while index.sweep(STEP):
        pass


def times(engines: int, repeats: int) -> Iterator[tuple[str, float]]:
    space = BlockNamespace("revision", BLOCK_SIZE)
    prompt = [token % 30_000 for token in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    names = list(space.hashes(prompt))

    def measured(index: PrefixIndex, hashes: Callable[[], Iterable[bytes]]) -> float:
        return 1e6 * statistics.median(cpu_seconds(lambda: index.match(hashes(), 0.0, engines)) for _ in range(repeats))

    kinds = {
        "nobody has a block": (lambda row: 0, lambda row: 0),
        "all have all blocks": (lambda row: PROMPT_BLOCKS, lambda row: 0),
        "all have 8 blocks, every tenth all": (lambda row: 8 if row % 10 else PROMPT_BLOCKS, lambda row: 0),
        "each another depth, and as many in the host pool": (lambda row: row % 64, lambda row: row // 64 * 4),
    }
    for title, (device, host) in kinds.items():
        index = PrefixIndex()
        for row in range(engines):
            depth = device(row)
            index.store(row, Tier.DEVICE, names[:depth])
            index.store(row, Tier.HOST, names[depth : depth + host(row)])
        yield f"match {PROMPT_BLOCKS} blocks, {engines} engines: {title}", measured(index, lambda: names)
        if depth:
            yield "  and computing the names", measured(index, lambda: space.hashes(prompt))
        else:
            yield "  and computing the one name that is needed", measured(index, lambda: space.hashes(prompt))
    index = PrefixIndex()
    yield (
        "expect 64 blocks",
        1e6
        * statistics.median(
            cpu_seconds(lambda at=at: index.add_speculative(at % engines, names, at / 1000)) for at in range(repeats)
        ),
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
