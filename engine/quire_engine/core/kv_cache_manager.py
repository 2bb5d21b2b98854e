"""The KV memory of an engine: the device pool, the host pool, and every way in which a block table may change.

Each block that a table holds is released on one path only (``free``), whatever ended the sequence.

Bookkeeping runs ahead of the contents: what it decides while a step is scheduled is collected as copies, which the
executor carries out before it computes, first those to the host, then those within the device, then those from the
host; those to the host that are made ahead of need run beside what it computes. So that this order is right whatever
was decided when, a host block that is to be read is held until the step is scheduled (``take_pending_copies``): nothing
can be written over it meanwhile. On the device nothing needs holding: only sequences that have no chunk in the step yet
are preempted, so no block that the step writes is freed by it. Nor is anything held for a step that is in flight while
the next one is scheduled: it is carried out first, copies and all.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time_ns
from typing import NamedTuple

from quire_proto.hashing import ROOT, hash_block

from quire_engine.core.block_pool import (
    BlockCopies,
    BlockCopy,
    BlockPool,
    BlockStored,
    KVCacheConfig,
    KVCacheEvent,
    Tier,
)
from quire_engine.core.kv_disk import DiskContents, DiskTier


@dataclass(slots=True)
class BlockTable:
    """The blocks that hold the tokens of one sequence, on the device or, while it is swapped out, on the host.

    ``block_ids[i]`` holds tokens ``[i * block_size, (i + 1) * block_size)``; exactly one of the two lists is in
    use.

    ``block_hashes`` are the hashes of the sequence's full blocks as far as they were needed; they only ever grow,
    because known tokens do not change. ``num_cached_blocks`` counts the blocks of the device table that were offered to
    the pool under their name, and ``num_swapped_ahead`` those of them that ``swap_ahead`` has seen to. After a fork,
    ``tail_shared`` says that the last block may be shared although it is not full. The sequence begins with
    ``num_prompt_tokens`` and ends with ``max_tokens`` at most, which only memory that reserves needs to know.
    """

    extra_key: bytes
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_swapped_ahead: int = 0
    tail_shared: bool = False
    num_prompt_tokens: int = 0
    max_tokens: int = 0

    def copy(self) -> "BlockTable":
        """The same blocks for a sequence that is forked from this one; the caller adds the references."""
        return BlockTable(
            self.extra_key,
            [*self.block_ids],
            [],
            [*self.block_hashes],
            self.num_cached_blocks,
            self.num_swapped_ahead,
            self.tail_shared,
            self.num_prompt_tokens,
            self.max_tokens,
        )

    def extend_block_hashes(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Computes names until there are ``num_blocks`` of them; all their tokens must be known."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else ROOT
            self.block_hashes.append(hash_block(parent, token_ids[start : start + block_size], self.extra_key))


class CachedBlock(NamedTuple):
    """A block that holds what is needed, and the pool that it is in."""

    block_id: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class SwapCost:
    """What a table costs: the bytes that swapping it out and in again moves, or the tokens that no cache holds and that
    would be computed again instead. What moves either way, because the host's cache has it, is no part of either.
    """

    bytes_to_move: int
    uncached_tokens: int


class KVCacheManager:
    """Moves blocks between pools and tables. All counts are in blocks, all lengths in tokens.

    With ``host_caching``, named blocks that the device pool gives up stay in the host pool until that needs the room,
    if they were used a second time. What one request computed and no other asked for is forgotten, but its name is
    remembered, so that it is kept once it was computed again. Most blocks are never used again, and where the device
    pool is full of them every new block would cost a copy that the step has to wait for. (SGLang's HiCache chooses so
    with ``write_through_selective``; the remembered names are what the ghost entries are in ARC and 2Q.)

    ``num_used_ahead`` counts the blocks that ``swap_out`` found on the host because ``swap_ahead`` had copied them.
    ``disk`` is the tier behind the host pool, None where there is none; it needs ``host_caching``. ``clock`` is in
    nanoseconds.
    """

    def __init__(
        self,
        capacity: KVCacheConfig,
        *,
        prefix_caching: bool = True,
        host_caching: bool = True,
        disk: DiskContents | None = None,
        clock: Callable[[], int] = time_ns,
    ) -> None:
        self.block_size = capacity.block_size
        self.block_bytes = capacity.block_bytes
        self.prefix_caching = prefix_caching
        self.host_caching = prefix_caching and host_caching and capacity.host_blocks > 0
        self._events: list[KVCacheEvent] = []
        self._pending_copies = BlockCopies()
        self._pinned_host_blocks: list[int] = []
        # Host blocks that were copied ahead, and that no swap has used since.
        self._unused_ahead: set[int] = set()
        self.num_used_ahead = 0
        # Device blocks with a second use, and names that were given up after one, the longest ago first.
        self._reused_blocks: set[int] = set()
        self._evicted_after_one_use: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted_hashes = capacity.device_blocks + capacity.host_blocks
        emit = self._events.append
        on_evict = self._offload_evicted if self.host_caching else None
        self.device_pool = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, emit=emit, on_evict=on_evict)
        # Where nothing looks for prefixes in the host pool, its names are no news to a router.
        self.host_pool = BlockPool(
            capacity.host_blocks,
            Tier.HOST,
            emit=emit if self.host_caching else None,
            on_evict=self._on_host_eviction,
        )
        self.disk: DiskTier | None = None
        if disk is not None and self.host_caching:
            self.disk = DiskTier(disk, self.device_pool, self.host_pool, clock=clock)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    # Finding and starting

    def get_cached_blocks(self, table: BlockTable, token_ids: Sequence[int]) -> list[CachedBlock]:
        """Blocks that already hold the longest prefix of ``token_ids``. At least one token is left to compute.

        They are only found, not taken: pass them to ``attach_cached_blocks`` before anything else changes.
        """
        if not self.prefix_caching:
            return []
        hits: list[CachedBlock] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_block_hashes(token_ids, index + 1, self.block_size)
            hit = self._find_cached(table.block_hashes[index])
            if hit is None:
                break
            hits.append(hit)
        return hits

    def num_free_blocks_after(self, table: BlockTable, hits: Sequence[CachedBlock], num_tokens: int) -> int:
        """Device blocks that stay free, below 0 if they do not suffice, when the table takes ``hits`` and grows to
        ``num_tokens``.
        """
        on_device = [hit.block_id for hit in hits if hit.tier is Tier.DEVICE]
        revived = sum(self.device_pool.is_free(block_id) for block_id in on_device)
        held = len(table.block_ids) + len(on_device)
        return self.device_pool.num_free - revived - (self.num_blocks_for(num_tokens) - held)

    def attach_cached_blocks(self, table: BlockTable, hits: Sequence[CachedBlock]) -> int:
        """Starts an empty table with the blocks that ``get_cached_blocks`` found; returns the tokens that they hold."""
        # All hits are taken before anything is allocated, which could be one of them.
        for hit in hits:
            (self.device_pool.incref if hit.tier is Tier.DEVICE else self._pin_host_block)(hit.block_id)
        for index, hit in enumerate(hits):
            is_there = hit.tier is Tier.DEVICE
            table.block_ids.append(
                hit.block_id if is_there else self._load_from_host(hit.block_id, table.block_hashes[index])
            )
        if self.host_caching:
            self._reused_blocks.update(table.block_ids)
        if self.disk is not None and hits:
            self.disk.on_reuse(table.block_hashes[: len(hits)])
        table.num_cached_blocks = len(hits)
        return len(hits) * self.block_size

    def count_tiers(self, table: BlockTable, hits: Sequence[CachedBlock]) -> tuple[int, int]:
        """How many of the blocks that a request begins with were on the host, and how many of these had come from disk
        and were not used since.
        """
        on_host = sum(hit.tier is Tier.HOST for hit in hits)
        return on_host, 0 if self.disk is None else self.disk.count_loaded(table.block_hashes[: len(hits)])

    def load_from_disk(
        self, table: BlockTable, token_ids: Sequence[int], rate: float, *, may_begin: bool = True
    ) -> tuple[list[bytes], int]:
        """Begins to load what continues the prefix of ``token_ids`` that the other tiers have, if that is faster than
        computing it at ``rate`` tokens a second. Returns the hashes of the blocks to wait for, and how many there is no
        room for now, as ``DiskTier.load``, which has ``may_begin``.
        """
        if self.disk is None or not self.disk.is_on:
            return [], 0
        on_host: list[int] = []
        missing: list[bytes] = []
        num_found = first_missing = 0
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_block_hashes(token_ids, index + 1, self.block_size)
            block_hash = table.block_hashes[index]
            hit = self._find_cached(block_hash)
            if hit is None and not self.disk.has(block_hash):
                break
            if hit is None:
                first_missing = first_missing if missing else index
                missing.append(block_hash)
            elif hit.tier is Tier.HOST:
                on_host.append(hit.block_id)
            num_found = index + 1
        recompute_seconds = (num_found - first_missing) * self.block_size / rate
        if not missing or not self.disk.pays(len(missing), recompute_seconds):
            return [], 0
        # What the host has of the prefix is not given up for the rest of it.
        for block_id in on_host:
            self.host_pool.incref(block_id)
        wanted = self.disk.load(self._pending_copies, missing, may_begin=may_begin)
        for block_id in reversed(on_host):
            self.host_pool.decref(block_id)
        return wanted

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks. Whoever grows first gets a copy of a last block that is not full."""
        for block_id in table.block_ids:
            self.device_pool.incref(block_id)
        table.tail_shared = True
        return table.copy()

    # Growing

    def num_blocks_needed(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> int:
        """Device blocks that it takes to compute ``[num_computed_tokens, num_tokens)`` into the table."""
        more = -(-num_tokens // self.block_size) - len(table.block_ids)
        parting = table.tail_shared and self._tail_is_shared(table, num_computed_tokens)
        return more + parting if more > 0 else parting

    def allocate_slots(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> None:
        """Lets tokens ``[num_computed_tokens, num_tokens)`` be computed into the table, whose last block becomes its
        own if others share it. The caller made sure that the blocks are there.
        """
        if table.tail_shared and self._tail_is_shared(table, num_computed_tokens):
            self._copy_on_write(table, num_computed_tokens // self.block_size)
        while len(table.block_ids) * self.block_size < num_tokens:
            table.block_ids.append(self.device_pool.allocate())

    def free_unused_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Gives back the device blocks behind those that ``num_computed_tokens`` fill: they hold nothing but rejected
        drafts.
        """
        while len(table.block_ids) > self.num_blocks_for(num_computed_tokens):
            self.device_pool.decref(table.block_ids.pop())

    def cache_full_blocks(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the blocks that ``num_computed_tokens`` tokens fill findable by later requests."""
        full = num_computed_tokens // self.block_size
        if not self.prefix_caching or full <= table.num_cached_blocks:
            return
        table.extend_block_hashes(token_ids, full, self.block_size)
        for index in range(table.num_cached_blocks, full):
            self.device_pool.cache_block(table.block_ids[index], table.block_hashes[index])
        table.num_cached_blocks = full

    # Swapping

    def can_swap_out(self, num_computed_tokens: int) -> bool:
        """Whether the host pool has room for all computed blocks; its free blocks with a name count as room."""
        return 0 < self.num_blocks_for(num_computed_tokens) <= self.host_pool.num_free

    def swap_cost(self, table: BlockTable, num_computed_tokens: int) -> SwapCost:
        """What it costs to take the table off the device, either way. Blocks that others hold, and those that the host
        has already, are cached.
        """
        blocks = self.num_blocks_for(num_computed_tokens)
        on_host = cached = reloaded = 0
        for index in range(table.num_cached_blocks):
            is_on_host = self._is_on_host(table.block_hashes[index])
            on_host += is_on_host
            is_shared = self.device_pool.is_shared(table.block_ids[index])
            if cached == index and (is_shared or (is_on_host and self.host_caching)):
                cached += 1
                reloaded += not is_shared
        return SwapCost(
            bytes_to_move=(2 * blocks - on_host - reloaded) * self.block_bytes,
            uncached_tokens=max(0, num_computed_tokens - cached * self.block_size),
        )

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> int:
        """Moves the table to the host pool; returns how many blocks are copied for that.

        A full block that the host pool holds already is taken from there and not copied.
        """
        before = len(self._pending_copies.blocks_to_swap_out)
        for index, source in enumerate(table.block_ids[: self.num_blocks_for(num_computed_tokens)]):
            target, is_new = self._host_block(table, index)
            table.host_block_ids.append(target)
            if is_new:
                self._pending_copies.blocks_to_swap_out.append(BlockCopy(source, target))
        self._release_device(table)
        return len(self._pending_copies.blocks_to_swap_out) - before

    def swap_ahead(self, table: BlockTable, limit: int) -> int:
        """Copies up to ``limit`` full blocks of a table that stays on the device to the host, beside the step that is
        scheduled, so that a later ``swap_out`` finds them there; returns how many. Nobody holds the copies: the host
        pool gives them up as other blocks that are found by their name, the longest there first.

        To be called when all else of the step is scheduled: what was freed before may be written in it.
        """
        before = len(self._pending_copies.blocks_to_swap_ahead)
        while table.num_swapped_ahead < table.num_cached_blocks and limit and self.host_pool.num_free:
            index = table.num_swapped_ahead
            if not self._is_on_host(table.block_hashes[index]):
                target = self.host_pool.allocate()
                self.host_pool.cache_block(target, table.block_hashes[index])
                self._pinned_host_blocks.append(target)
                self._unused_ahead.add(target)
                self._pending_copies.blocks_to_swap_ahead.append(BlockCopy(table.block_ids[index], target))
                limit -= 1
            table.num_swapped_ahead += 1
        return len(self._pending_copies.blocks_to_swap_ahead) - before

    def num_blocks_needed_to_swap_in(self, table: BlockTable, num_tokens: int) -> int:
        """Free device blocks that ``swap_in`` and an ``allocate_slots`` to ``num_tokens`` would take."""
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        in_use = sum(block_id is not None and not self.device_pool.is_free(block_id) for block_id in found)
        return self.num_blocks_for(num_tokens) - in_use

    def swap_in(self, table: BlockTable) -> int:
        """Moves the table back to the device; returns how many blocks are copied for that.

        A block that the device still holds under its name is taken from there and not copied. The host pool keeps the
        contents of full blocks under their names until it needs the room.
        """
        before = len(self._pending_copies.blocks_to_swap_in)
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        for block_id in found:
            if block_id is not None:
                self.device_pool.incref(block_id)
        for index, source in enumerate(table.host_block_ids):
            block_id = found[index]
            if block_id is None:
                block_id = self._load_from_host(
                    source, table.block_hashes[index] if index < table.num_cached_blocks else None
                )
            table.block_ids.append(block_id)
        self._pinned_host_blocks += table.host_block_ids
        table.host_block_ids.clear()
        return len(self._pending_copies.blocks_to_swap_in) - before

    # Ending

    def free(self, table: BlockTable) -> None:
        """Gives back every block that the table holds, in either pool."""
        self._release_device(table)
        self._release_host(table)

    def plan_stores(self, max_copies: int) -> None:
        """Has blocks stored on disk that are to be kept there, of which up to ``max_copies`` are copied to the host for
        that. To be called when all else of the step is scheduled.
        """
        if self.disk is not None:
            self.disk.plan_stores(self._pending_copies, max_copies)

    @property
    def has_pending_copies(self) -> bool:
        """Whether anything is to be copied for what was decided since ``take_pending_copies``."""
        return not self._pending_copies.is_empty

    def take_pending_copies(self) -> BlockCopies:
        """What has to be copied for all that was decided since the last call: the step is scheduled."""
        copies, self._pending_copies = self._pending_copies, BlockCopies()
        for block_id in reversed(self._pinned_host_blocks):
            self.host_pool.decref(block_id)
        self._pinned_host_blocks.clear()
        return copies

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the prefix cache since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def stored_blocks(self) -> list[BlockStored]:
        """Everything that can be hit, in both tiers."""
        return self.device_pool.stored_blocks() + (self.host_pool.stored_blocks() if self.host_caching else [])

    def check_integrity(self) -> None:
        """Asserts the integrity of both pools."""
        self.device_pool.check_integrity()
        self.host_pool.check_integrity()
        if self.disk is not None:
            self.disk.pool.check_integrity()

    # Inside

    def _find_cached(self, name: bytes) -> CachedBlock | None:
        block_id = self.device_pool.get_cached_block(name)
        if block_id is not None:
            return CachedBlock(block_id, Tier.DEVICE)
        block_id = self.host_pool.get_cached_block(name) if self.host_caching else None
        return None if block_id is None else CachedBlock(block_id, Tier.HOST)

    def _pin_host_block(self, host_block_id: int) -> None:
        self.host_pool.incref(host_block_id)
        self._pinned_host_blocks.append(host_block_id)

    def _load_from_host(self, host_block_id: int, name: bytes | None) -> int:
        """A device block that will have the contents of a host block, under their name if they have one."""
        block_id = self.device_pool.allocate()
        self._pending_copies.blocks_to_swap_in.append(BlockCopy(host_block_id, block_id))
        if name is not None:
            self.device_pool.cache_block(block_id, name)
        return block_id

    def _offload_evicted(self, block_id: int, name: bytes) -> None:
        """The device pool gives up a named block: what was used twice stays on the host where that has room."""
        is_reused = block_id in self._reused_blocks or name in self._evicted_after_one_use
        self._reused_blocks.discard(block_id)
        found = self.host_pool.get_cached_block(name)
        if found is not None:
            self.host_pool.move_to_back(found)
        elif is_reused and self.host_pool.num_free:
            self._evicted_after_one_use.pop(name, None)
            target = self.host_pool.allocate()
            self.host_pool.cache_block(target, name)
            self.host_pool.decref(target)
            self._pending_copies.blocks_to_swap_out.append(BlockCopy(block_id, target))
            if self.disk is not None:
                self.disk.on_reuse([name])
        else:
            self._evicted_after_one_use[name] = None
            if len(self._evicted_after_one_use) > self._max_evicted_hashes:
                self._evicted_after_one_use.popitem(last=False)

    def _on_host_eviction(self, block_id: int, name: bytes) -> None:
        self._unused_ahead.discard(block_id)
        if self.disk is not None:
            self.disk.on_host_eviction(name)

    def _tail_is_shared(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether the next token would be written into a block that others hold too."""
        index = num_computed_tokens // self.block_size
        table.tail_shared = index < len(table.block_ids) and self.device_pool.is_shared(table.block_ids[index])
        return table.tail_shared

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        """Copy on write: gives the table a block of its own in place of a shared one."""
        shared, own = table.block_ids[index], self.device_pool.allocate()
        self._pending_copies.blocks_to_copy.append(BlockCopy(shared, own))
        table.block_ids[index] = own
        self.device_pool.decref(shared)

    def _is_on_host(self, name: bytes) -> bool:
        return self.host_pool.get_cached_block(name) is not None

    def _host_block(self, table: BlockTable, index: int) -> tuple[int, bool]:
        """A referenced host block for block ``index``, and whether its contents must be copied."""
        name = table.block_hashes[index] if index < table.num_cached_blocks else None
        found = self.host_pool.get_cached_block(name) if name is not None else None
        if found is not None:
            self.host_pool.incref(found)
            if found in self._unused_ahead:
                self._unused_ahead.remove(found)
                self.num_used_ahead += 1
            return found, False
        block_id = self.host_pool.allocate()
        if name is not None:
            self.host_pool.cache_block(block_id, name)
        return block_id, True

    def _device_block(self, table: BlockTable, index: int) -> int | None:
        """The device block that still holds block ``index`` of a swapped table."""
        return self.device_pool.get_cached_block(table.block_hashes[index]) if index < table.num_cached_blocks else None

    def _release_device(self, table: BlockTable) -> None:
        # Tail first: a prefix is worth more than what follows it, and the free order evicts the longest free first.
        for block_id in reversed(table.block_ids):
            self.device_pool.decref(block_id)
        table.block_ids.clear()
        table.num_swapped_ahead = 0

    def _release_host(self, table: BlockTable) -> None:
        for block_id in reversed(table.host_block_ids):
            self.host_pool.decref(block_id)
        table.host_block_ids.clear()
