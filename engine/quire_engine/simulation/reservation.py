"""KV memory by reservation, as in engines before paging, behind the scheduler's own memory interface; and the use of
each KV slot, with either memory.

An admitted sequence gets one contiguous range of slots, each for one token, from the first hole that is large enough.
It keeps all of them until it ends. So nothing is ever preempted, and waiting sequences wait for a hole. The
reservations are those with which the vLLM paper compares paging: Orca's variants Max, Pow2 and Oracle (Kwon et al.,
SOSP 2023, sections 3.1 and 6.1; there the ranges come from a buddy allocator).
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.block_table import BlockTable, CachedBlocks
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Sequence as RunningSequence

Memory = Literal["paged", "max", "pow2", "oracle"]
Reservation = Callable[[int, int, int], int]
"""Returns the slots to reserve for a sequence that starts with ``num_prompt_tokens``, ends with ``max_tokens``, and
could have had ``max_model_len``. The last token ends the sequence and is never computed, so ``max_tokens - 1`` slots
are enough.
"""


def reserve_max(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Returns as many as any sequence can need."""
    del num_prompt_tokens, max_tokens
    return max_model_len


def reserve_pow2(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Returns the prompt's length plus the output's next power of two, as if its length were known within a factor of
    two.
    """
    num_output = max_tokens - num_prompt_tokens
    return min(num_prompt_tokens + (1 << (num_output - 1).bit_length()), max_model_len)


def reserve_oracle(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Returns what the sequence will need until its end, as if that were known."""
    del num_prompt_tokens, max_model_len
    return max_tokens - 1


RESERVATIONS: Mapping[Memory, Reservation] = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}


class FirstFit:
    """Allocates ranges of the integers ``start .. end - 1``, each from the first hole that is large enough.

    ``holes`` are the free ranges as (start, end), in ascending order; no two of them touch. All operations are linear
    in their number, which is at most one more than the number of allocated ranges.
    """

    def __init__(self, start: int, end: int) -> None:
        self.holes = [(start, end)] if start < end else []

    def find(self, length: int) -> int | None:
        """Returns the index of the hole for the next range of this length; None if none is large enough."""
        return next((index for index, (start, end) in enumerate(self.holes) if end - start >= length), None)

    def allocate(self, length: int) -> int:
        """Allocates a range of this length, above 0, and returns its start. A hole must be large enough."""
        index = self.find(length)
        assert index is not None, f"no hole has {length} slots"
        start, end = self.holes[index]
        self.holes[index : index + 1] = [(start + length, end)] if start + length < end else []
        return start

    def free(self, start: int, length: int) -> None:
        """Frees a range and merges it with adjacent holes."""
        end, index = start + length, bisect(self.holes, (start, start))
        first, last = index, index
        if index and self.holes[index - 1][1] == start:
            first, start = index - 1, self.holes[index - 1][0]
        if index < len(self.holes) and self.holes[index][0] == end:
            last, end = index + 1, self.holes[index][1]
        self.holes[first:last] = [(start, end)]


class ReservingKVCacheManager(KVCacheManager):
    """Reserves contiguous slots: a block has one slot, and a table's blocks are contiguous. It has no prefix cache and
    no host pool, and supports only sequences that are never forked.

    With ``until_batch_ends``, the slots of ended sequences are freed only when no sequence holds any, as in engines
    with static batches. ``ended`` are the tables of ended sequences whose slots are still held.
    """

    def __init__(
        self, capacity: KVCacheConfig, reserve: Reservation, max_model_len: int, *, until_batch_ends: bool = False
    ) -> None:
        slot_bytes = capacity.block_bytes // capacity.block_size
        super().__init__(KVCacheConfig(1, 1 + capacity.usable_tokens, 0, slot_bytes), prefix_caching=False)
        self.ended: list[BlockTable] = []
        self._reserve = reserve
        self._max_model_len = max_model_len
        self._until_batch_ends = until_batch_ends
        self._num_live = 0
        self._slots = FirstFit(1, 1 + capacity.usable_tokens)

    def num_free_blocks_after(self, table: BlockTable, hits: Sequence[CachedBlocks], num_tokens: int) -> int:
        """Returns the size of the pool if a hole fits the table's reservation, else -1. Running sequences have all
        their slots already, so nothing has to stay free for them.
        """
        del hits, num_tokens
        return -1 if self._slots.find(self._reservation(table)) is None else self.device_pool.num_blocks

    def attach_cached_blocks(self, table: BlockTable, hits: Sequence[CachedBlocks]) -> int:
        """Reserves the table's slots. There are never ``hits``, so nothing of the table is computed."""
        length = self._reservation(table)
        start = self._slots.allocate(length)
        (group,) = table.groups
        group.block_ids += range(start, start + length)
        table.num_blocks = length
        for slot in group.block_ids:
            self.device_pool.incref(slot)
        self._num_live += 1
        return len(hits)

    def allocate_slots(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> None:
        """Does nothing, because the slots are reserved."""
        assert num_computed_tokens < num_tokens <= table.num_blocks, "more than was reserved"

    def free_unused_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Does nothing: reserved slots stay."""

    def fork(self, table: BlockTable) -> BlockTable:
        """Raises ``NotImplementedError``: a contiguous range has one owner."""
        raise NotImplementedError("Memory by reservation has one output for each request.")

    def free(self, table: BlockTable) -> None:
        """See ``KVCacheManager.free``. With ``until_batch_ends`` the slots stay in use until all can be freed."""
        if not table.num_blocks:
            return
        self.ended.append(table.copy())
        table.clear()
        self._num_live -= 1
        if self._until_batch_ends and self._num_live:
            return
        for each in self.ended:
            (group,) = each.groups
            self._slots.free(group.block_ids[0], each.num_blocks)
            super().free(each)
        self.ended.clear()

    def check_integrity(self) -> None:
        """Asserts that the holes are the free blocks, and the integrity of the pool."""
        super().check_integrity()
        free = [slot for slot in range(1, 1 + self.device_pool.num_blocks) if self.device_pool.is_free(slot)]
        assert free == [slot for start, end in self._slots.holes for slot in range(start, end)]

    def _reservation(self, table: BlockTable) -> int:
        wanted = self._reserve(table.num_prompt_tokens, table.max_tokens, self._max_model_len)
        return min(wanted, self.device_pool.num_blocks)


@dataclass(slots=True)
class KVSlots:
    """The KV slots of the device by their use. A slot has room for one token, and every slot is in exactly one class.

    ``tokens`` hold a token of a running sequence, or get it in the current step. ``reserved`` are held for a later
    token of the sequence. ``internal`` is internal fragmentation: held, but a token of a running sequence will never be
    there. ``external`` is external fragmentation: free, but too small for the waiting sequences or not requested.
    """

    tokens: float = 0
    reserved: float = 0
    internal: float = 0
    external: float = 0

    @property
    def total(self) -> float:
        """All slots."""
        return self.tokens + self.reserved + self.internal + self.external

    @property
    def waste(self) -> float:
        """The fraction of held slots without a token; 0 if none is held."""
        held = self.tokens + self.reserved + self.internal
        return (self.reserved + self.internal) / held if held else 0.0

    def add(self, other: "KVSlots", weight: float) -> None:
        """Adds the other's slots, ``weight`` times."""
        self.tokens += weight * other.tokens
        self.reserved += weight * other.reserved
        self.internal += weight * other.internal
        self.external += weight * other.external


def count_slots(
    memory: KVCacheManager, running: Iterable[RunningSequence], ended: Iterable[BlockTable] = ()
) -> KVSlots:
    """Counts the device's slots while a scheduled step is computed. ``running`` are all sequences on the device,
    ``ended`` the tables whose sequences have ended. A shared block must be full, as in the prefix cache. O(running +
    ended).
    """
    size, pool = memory.block_size, memory.device_pool
    reserved = empty = 0
    for sequence in running:
        held, computed = sequence.block_table.num_blocks * size, sequence.num_scheduled_tokens
        empty += held - computed
        reserved += max(0, min(held, sequence.group.limit - 1) - computed)
    abandoned = sum(table.num_blocks for table in ended) * size
    in_use = (pool.num_blocks - pool.num_free) * size
    return KVSlots(in_use - empty - abandoned, reserved, empty - reserved + abandoned, pool.num_free * size)
