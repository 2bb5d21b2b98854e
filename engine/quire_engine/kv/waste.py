"""How much of the KV memory is held for nothing: slots without a token, and blocks that nobody can reach.

Tables are given as pairs of a table and the tokens that are computed in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.kv.memory import KVCacheManager
from quire_engine.kv.pool import BlockPool
from quire_engine.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class KVCacheFragmentation:
    """Slots of the device blocks that are in use, and those of them that hold no computed token; and blocks of both
    pools that nobody can reach, None where they were not looked for.
    """

    empty_slots: int
    used_slots: int
    leaked_blocks: int | None = None

    @property
    def ratio(self) -> float:
        """Empty slots as a part of held ones; 0 when none is held."""
        return self.empty_slots / self.used_slots if self.used_slots else 0.0


def measure_fragmentation(memory: KVCacheManager, tables: Iterable[tuple[BlockTable, int]]) -> KVCacheFragmentation:
    """What ``tables``, all that hold device blocks, leave empty. O(tables): only last blocks can be.

    A block that several tables share counts once, as full as the fullest of them has it.
    """
    size = memory.block_size
    empty: dict[int, int] = {}
    for table, num_computed_tokens in tables:
        for index in range(num_computed_tokens // size, len(table.block_ids)):
            block_id = table.block_ids[index]
            missing = size - max(0, num_computed_tokens - index * size)
            empty[block_id] = min(missing, empty.get(block_id, size))
    return KVCacheFragmentation(sum(empty.values()), _in_use(memory.device_pool) * size)


def count_leaked_blocks(memory: KVCacheManager, tables: Iterable[BlockTable]) -> int:
    """Blocks of both pools that are not free although none of ``tables``, which are all that there are, holds them. 0,
    or memory was lost. O(blocks held).
    """
    device: set[int] = set()
    host: set[int] = set()
    for table in tables:
        device.update(table.block_ids)
        host.update(table.host_block_ids)
    return _in_use(memory.device_pool) - len(device) + _in_use(memory.host_pool) - len(host)


def _in_use(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_free
