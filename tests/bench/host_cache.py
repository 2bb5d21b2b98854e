"""Which blocks the host pool keeps, and what that costs in copies: `make bench`.

The real pools without a scheduler or a model: one request after the other finds its prefix, grows and ends. Counted
are, for three workloads and for a host pool that keeps every block or those with a second use, blocks that are copied
to the host and back, and the part of the prompts' blocks that need not be computed. Counts do not depend on the
machine.
"""

import random
from collections.abc import Callable, Iterator

from quire_engine.core.block_pool import BlockCopy, KVCacheConfig
from quire_engine.core.block_table import BlockTable
from quire_engine.core.kv_cache_manager import KVCacheManager

BLOCK, DEVICE, HOST = 16, 1000, 500
REQUESTS = 3000
Workload = Callable[[random.Random], Iterator[list[int]]]


class KeepsEveryBlock(KVCacheManager):
    """As it would be without a choice."""

    def _on_device_eviction(self, block_id: int, name: bytes) -> None:
        found = self.host_pool.get_cached_block(name)
        if found is not None:
            self.host_pool.move_to_back(found)
        elif self.host_pool.num_free:
            target = self.host_pool.allocate()
            self.host_pool.cache_block(target, name)
            self.host_pool.decref(target)
            self._pending_copies.blocks_to_swap_out.append(BlockCopy(block_id, target))


def main() -> None:
    workloads: dict[str, Workload] = {
        "unrelated prompts": unrelated,
        "40 system prompts": system_prompts,
        "conversations": conversations,
    }
    print(f"  blocks of {REQUESTS} requests, {DEVICE} on the device and {HOST} on the host:")
    for name, workload in workloads.items():
        for kind in (KeepsEveryBlock, KVCacheManager):
            copied, back, found, total = run(kind(KVCacheConfig(BLOCK, DEVICE, HOST)), workload)
            kept = "second use" if kind is KVCacheManager else "every block"
            print(
                f"  {name:>18}, {kept:>11}: {copied:>6} copied to the "
                f"host, {back:>5} back, {found / total:.1%} of {total} found"
            )


def run(kv: KVCacheManager, workload: Workload) -> tuple[int, int, int, int]:
    """Blocks that were copied to the host, copied back, found in either pool, and asked for."""
    copied = back = found = total = 0
    for tokens in workload(random.Random(0)):
        table = BlockTable(b"")
        cached = kv.attach_cached_blocks(table, kv.get_cached_blocks(table, tokens))
        kv.allocate_slots(table, cached, len(tokens))
        kv.cache_full_blocks(table, tokens, len(tokens))
        copies = kv.take_pending_copies()
        kv.free(table)
        kv.take_events()
        copied, back = copied + len(copies.blocks_to_swap_out), back + len(copies.blocks_to_swap_in)
        found, total = found + cached // BLOCK, total + len(tokens) // BLOCK
    return copied, back, found, total


def text(seed: int, blocks: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(50_000) for _ in range(blocks * BLOCK)]


def unrelated(generator: random.Random) -> Iterator[list[int]]:
    """Nothing is ever used again."""
    for index in range(REQUESTS):
        yield [*text(index, generator.randint(8, 40)), 0]


def system_prompts(generator: random.Random) -> Iterator[list[int]]:
    """One of 40 prompts of 60 blocks, of which some are far more popular, and then a question."""
    weights = [1 / (1 + rank) for rank in range(40)]
    for index in range(REQUESTS):
        (prompt,) = generator.choices(range(40), weights)
        yield [*text(-1 - prompt, 60), *text(index, generator.randint(2, 12)), 0]


def conversations(generator: random.Random) -> Iterator[list[int]]:
    """One of 60 conversations goes on by a turn, and is replaced by a new one after about eight."""
    going = [text(-1 - index, 4) for index in range(60)]
    for index in range(REQUESTS):
        turn = generator.randrange(60)
        if generator.random() < 1 / 8:
            going[turn] = []
        going[turn] = [*going[turn], *text(index, generator.randint(2, 10))]
        yield [*going[turn], 0]


if __name__ == "__main__":
    main()
