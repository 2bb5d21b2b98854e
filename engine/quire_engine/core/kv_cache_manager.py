"""The KV memory of an engine: the device pool, the tiers behind it (``kv_transfer``), and every way in which a block
table may change.

Each block that a table holds is released on one path only (``free``), whatever ended the sequence.

Bookkeeping runs ahead of the contents: what it decides while a step is scheduled is collected as copies, which the
executor carries out before it computes, first those to the host, then those within the device, then those from the
host; those to the host that are made ahead of need run beside what it computes. So that this order is right whatever
was decided when, a host block that is to be read is held until the step is scheduled (``take_pending_copies``): nothing
can be written over it meanwhile. On the device nothing needs holding: only sequences that have no chunk in the step yet
are preempted, so no block that the step writes is freed by it. Nor is anything held for a step that is in flight while
the next one is scheduled: it is carried out first, copies and all.

A sequence has a table for each group of layers, which most models have one of. All take their blocks from the same
pools. Of layers with a window, blocks that it has left are given up as the sequence goes on, and a prefix is found
where those that its end still sees are there: vLLM's hybrid KV cache manager, in one class.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from time import time_ns

from quire_proto.hashing import HASH_BYTES

from quire_engine.core.absence import SwapCost
from quire_engine.core.block_pool import (
    NULL_BLOCK,
    UNBOUNDED_TOKENS,
    BlockCopies,
    BlockCopy,
    BlockPool,
    BlockStored,
    KVCacheConfig,
    KVCacheEvent,
    Tier,
)
from quire_engine.core.block_table import SKIPPED, BlockTable, CachedBlock, CachedBlocks, GroupTable, block_name
from quire_engine.core.kv_transfer.connector import AsyncKVConnector
from quire_engine.core.kv_transfer.host_tier import HostTier
from quire_engine.core.kv_transfer.multi_connector import MultiConnector, make_tiers
from quire_engine.core.kv_transfer.transfer import DiskContents


class KVCacheManager:
    """Moves blocks between pools and tables. All counts are in blocks, all lengths in tokens.

    ``tiers`` have what the device pool gave up. There are none without ``host_caching``; then ``host`` is for swapped
    sequences only. ``disk`` is what an executor has opened, None where there is none. ``clock`` is in nanoseconds.
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
        self.capacity = capacity
        self.block_size = capacity.block_size
        self.block_bytes = capacity.block_bytes
        self.num_groups = len(capacity.groups)
        self._suffixes = [bytes((number,)) for number in range(self.num_groups)] if self.num_groups > 1 else [b""]
        self._windows = [(number, group) for number, group in enumerate(capacity.groups) if group.window is not None]
        self.prefix_caching = prefix_caching
        self.host_caching = prefix_caching and host_caching and capacity.host_blocks > 0
        self._events: list[KVCacheEvent] = []
        self._pending_copies = BlockCopies()
        sizes = [UNBOUNDED_TOKENS if group.window is None else group.window for group in capacity.groups]
        self._published_suffix = self._suffixes[sizes.index(max(sizes))]
        emit = self._events.append if self.num_groups == 1 else self._emit_published
        on_evict = self._on_device_eviction if self.host_caching else None
        self.device_pool = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, emit=emit, on_evict=on_evict)
        # Where nothing looks for prefixes in the host pool, its names are no news to a router.
        self.host = HostTier(capacity, emit if self.host_caching else None)
        self.host_pool = self.host.pool
        tiers = make_tiers(capacity, self.device_pool, self.host, disk=disk, clock=clock) if self.host_caching else []
        self.tiers = MultiConnector(tiers)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of a group that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def new_table(self, extra_key: bytes) -> BlockTable:
        """An empty table."""
        return BlockTable(extra_key, tuple([GroupTable(suffix) for suffix in self._suffixes]))

    # Finding and starting

    def get_cached_blocks(self, table: BlockTable, token_ids: Sequence[int]) -> list[CachedBlocks]:
        """Blocks that already hold the longest prefix of ``token_ids``. At least one token is left to compute.

        They are only found, not taken: pass them to ``attach_cached_blocks`` before anything else changes.
        """
        if not self.prefix_caching:
            return []
        hits: list[CachedBlocks] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_block_hashes(token_ids, index + 1, self.block_size)
            found = [
                self._find_cached(block_name(table, number, index)) if group.window is None else SKIPPED
                for number, group in enumerate(self.capacity.groups)
            ]
            if None in found:
                break
            hits.append([hit for hit in found if hit is not None])
        if self._windows:
            self._find_in_windows(table, hits)
        return hits

    def num_free_blocks_after(self, table: BlockTable, hits: Sequence[CachedBlocks], num_tokens: int) -> int:
        """Device blocks that stay free at all times, below 0 if they do not suffice, when the table takes ``hits`` and
        grows to ``num_tokens``.
        """
        on_device = [hit.block_id for hit in chain(*hits) if hit.tier is Tier.DEVICE and hit is not SKIPPED]
        revived = sum(self.device_pool.is_free(block_id) for block_id in on_device)
        held = table.num_held_blocks + len(on_device)
        return self.device_pool.num_free - revived - (self.capacity.max_blocks(num_tokens) - held)

    def attach_cached_blocks(self, table: BlockTable, hits: Sequence[CachedBlocks]) -> int:
        """Starts an empty table with the blocks that ``get_cached_blocks`` found; returns the tokens that they hold."""
        # All hits are taken before anything is allocated, which could be one of them.
        for hit in chain(*hits):
            if hit is not SKIPPED:
                (self.device_pool.incref if hit.tier is Tier.DEVICE else self.host.hold)(hit.block_id)
        num_tokens = len(hits) * self.block_size
        for number, group in enumerate(table.groups):
            for index, hit in enumerate(blocks[number] for blocks in hits):
                is_there = hit.tier is Tier.DEVICE
                group.block_ids.append(
                    hit.block_id if is_there else self._load_from_host(hit.block_id, block_name(table, number, index))
                )
            group.num_skipped = self.capacity.groups[number].first_block(num_tokens, self.block_size)
        table.num_blocks = table.num_cached_blocks = len(hits)
        if hits:
            self.tiers.on_reuse(table)
        return num_tokens

    def count_tiers(self, table: BlockTable, hits: Sequence[CachedBlocks]) -> tuple[int, int]:
        """How many of the blocks that a request begins with were on the host, and how many of these had been loaded
        from a further tier and were not used since.
        """
        on_host = sum(any(hit.tier is Tier.HOST for hit in blocks) for blocks in hits)
        return on_host, self.host.count_loaded(table.block_hashes[: len(hits)])

    def begin_load(
        self,
        tier: AsyncKVConnector,
        table: BlockTable,
        token_ids: Sequence[int],
        rate: float,
        *,
        may_begin: bool = True,
    ) -> tuple[list[bytes], int]:
        """Begins to load from ``tier`` what continues the prefix of ``token_ids`` that is found without it, if that is
        faster than computing it at ``rate`` tokens a second. Returns the hashes of the blocks to wait for, and how many
        there is no room for now, as ``AsyncKVConnector.begin_load``, which has ``may_begin``.
        """
        if not tier.is_on:
            return [], 0
        on_host, missing, num_found = list[int](), list[int](), 0
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_block_hashes(token_ids, index + 1, self.block_size)
            hit = self._find_cached(table.block_hashes[index])
            if hit is None and tier.look_up(table.block_hashes[index]) is None:
                break
            if hit is None:
                missing.append(index)
            elif hit.tier is Tier.HOST:
                on_host.append(hit.block_id)
            num_found = index + 1
        if not missing or not tier.pays(len(missing), (num_found - missing[0]) * self.block_size / rate):
            return [], 0
        # What the host has of the prefix is not given up for the rest of it.
        for block_id in on_host:
            self.host_pool.incref(block_id)
        names = [table.block_hashes[index] for index in missing]
        wanted = tier.begin_load(self._pending_copies, names, may_begin=may_begin)
        for block_id in reversed(on_host):
            self.host_pool.decref(block_id)
        return wanted

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks. Whoever grows first gets a copy of a last block that is not full."""
        for group in table.groups:
            for block_id in group.block_ids[group.num_skipped :]:
                self.device_pool.incref(block_id)
        table.tail_shared = True
        return table.copy()

    # Growing

    def has_room(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether ``num_tokens`` fit into the blocks of the table, none of which can be another's too."""
        return num_tokens <= table.num_blocks * self.block_size and not table.tail_shared

    def num_blocks_needed(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> int:
        """Device blocks that it takes to compute ``[num_computed_tokens, num_tokens)`` into the table."""
        more = -(-num_tokens // self.block_size) - table.num_blocks
        parting = table.tail_shared and self._tail_is_shared(table, num_computed_tokens)
        return (more + parting if more > 0 else parting) * self.num_groups

    def allocate_slots(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> None:
        """Lets tokens ``[num_computed_tokens, num_tokens)`` be computed into the table, whose last block becomes its
        own if others share it. The caller made sure that the blocks are there.
        """
        if table.tail_shared and self._tail_is_shared(table, num_computed_tokens):
            for number in range(self.num_groups):
                self._copy_on_write(table, number, num_computed_tokens // self.block_size)
        while table.num_blocks * self.block_size < num_tokens:
            table.append_blocks([self.device_pool.allocate() for _ in table.groups])

    def free_unused_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Gives back the device blocks behind those that ``num_computed_tokens`` fill: they hold nothing but rejected
        drafts.
        """
        while table.num_blocks > self.num_blocks_for(num_computed_tokens):
            for block_id in table.remove_last_blocks():
                self.device_pool.decref(block_id)

    def on_computed(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Takes in that a step has computed so many tokens of the table in all: later requests find its full blocks,
        and those that no window reaches are given up.
        """
        if self.prefix_caching and num_computed_tokens >= (table.num_cached_blocks + 1) * self.block_size:
            self.cache_full_blocks(table, token_ids, num_computed_tokens)
        if self._windows:
            self.remove_skipped_blocks(table, num_computed_tokens)

    def cache_full_blocks(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the blocks that ``num_computed_tokens`` tokens fill findable by later requests."""
        full = num_computed_tokens // self.block_size
        if not self.prefix_caching or full <= table.num_cached_blocks:
            return
        table.extend_block_hashes(token_ids, full, self.block_size)
        for number, group in enumerate(table.groups):
            for index in range(max(table.num_cached_blocks, group.num_skipped), full):
                self.device_pool.cache_block(group.block_ids[index], block_name(table, number, index))
        table.num_cached_blocks = full

    def remove_skipped_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Gives up the blocks that no window reaches from behind ``num_computed_tokens``. To be called after
        ``cache_full_blocks``, so that others find them until the pool needs the room; and once these tokens have been
        computed, as a step that failed may be run again.
        """
        for number, spec in self._windows:
            group = table.groups[number]
            first = spec.first_block(num_computed_tokens, self.block_size)
            for index in range(group.num_skipped, first):
                self.device_pool.decref(group.block_ids[index])
                table.replace_block(number, index, NULL_BLOCK)
            group.num_skipped = max(group.num_skipped, first)

    # Swapping

    def can_swap_out(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether the host pool has room for all computed blocks; its free blocks with a name count as room."""
        return 0 < self._num_computed_blocks(table, num_computed_tokens) <= self.host_pool.num_free

    def swap_cost(self, table: BlockTable, num_computed_tokens: int) -> SwapCost:
        """What it costs to take the table off the device, either way. Blocks that others hold, and those that the host
        has already, are cached.
        """

        def outlives(number: int, index: int) -> bool:
            in_tier = self.tiers.look_up(block_name(table, number, index)) is not None
            return in_tier or self._is_held_by_others(table, number, index)

        full_groups = [number for number, spec in enumerate(self.capacity.groups) if spec.window is None]
        cached = 0
        while cached < table.num_cached_blocks and all(outlives(number, cached) for number in full_groups):
            cached += 1
        cached = self._longest_prefix(cached, outlives)
        on_host = reloaded = 0
        for number, group in enumerate(table.groups):
            first = self.capacity.groups[number].first_block(cached * self.block_size, self.block_size)
            for index in range(group.num_skipped, table.num_cached_blocks):
                on_host += self.host.look_up(block_name(table, number, index)) is not None
            reloaded += sum(not self._is_held_by_others(table, number, index) for index in range(first, cached))
        return SwapCost(
            bytes_to_move=(2 * self._num_computed_blocks(table, num_computed_tokens) - on_host - reloaded)
            * self.block_bytes,
            uncached_tokens=max(0, num_computed_tokens - cached * self.block_size),
        )

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> int:
        """Moves the table to the host pool; returns how many blocks are copied for that.

        A full block that the host pool holds already is taken from there and not copied.
        """
        before = len(self._pending_copies.blocks_to_swap_out)
        self.remove_skipped_blocks(table, num_computed_tokens)  # a step in flight may still read them: it runs before
        for number, group in enumerate(table.groups):
            for index in range(group.num_skipped, self.num_blocks_for(num_computed_tokens)):
                target, is_new = self.host.take(_name_if_cached(table, number, index))
                group.host_block_ids.append(target)
                if is_new:
                    self._pending_copies.blocks_to_swap_out.append(BlockCopy(group.block_ids[index], target))
        self._release_device(table)
        return len(self._pending_copies.blocks_to_swap_out) - before

    def swap_ahead(self, table: BlockTable, limit: int) -> int:
        """Copies up to ``limit`` full blocks of a table that stays on the device to the host, beside the step that is
        scheduled, so that a later ``swap_out`` finds them there; returns how many.

        To be called when all else of the step is scheduled: what was freed before may be written in it.
        """
        before = len(self._pending_copies.blocks_to_swap_ahead)
        while table.num_swapped_ahead < table.num_cached_blocks and limit and self.host_pool.num_free:
            index = table.num_swapped_ahead
            for number, group in enumerate(table.groups):
                name = block_name(table, number, index)
                is_there = index < group.num_skipped or self.host.look_up(name) is not None
                if is_there or not (limit and self.host_pool.num_free):
                    continue
                self.host.copy_ahead(self._pending_copies, group.block_ids[index], name)
                limit -= 1
            table.num_swapped_ahead += 1
        return len(self._pending_copies.blocks_to_swap_ahead) - before

    def num_blocks_needed_to_swap_in(self, table: BlockTable, num_tokens: int) -> int:
        """Free device blocks that ``swap_in`` and an ``allocate_slots`` to ``num_tokens`` would take."""
        found = chain(*self._blocks_still_on_device(table))
        in_use = sum(block_id is not None and not self.device_pool.is_free(block_id) for block_id in found)
        return self._num_computed_blocks(table, num_tokens) - in_use

    def swap_in(self, table: BlockTable) -> int:
        """Moves the table back to the device; returns how many blocks are copied for that.

        A block that the device still holds under its name is taken from there and not copied. The host pool keeps the
        contents of full blocks under their names until it needs the room.
        """
        before = len(self._pending_copies.blocks_to_swap_in)
        found = self._blocks_still_on_device(table)
        for block_id in chain(*found):
            if block_id is not None:
                self.device_pool.incref(block_id)
        for number, group in enumerate(table.groups):
            group.block_ids += [NULL_BLOCK] * group.num_skipped
            for block_id, source in zip(found[number], group.host_block_ids, strict=True):
                index = len(group.block_ids)
                name = _name_if_cached(table, number, index)
                group.block_ids.append(self._load_from_host(source, name) if block_id is None else block_id)
            self.host.held += group.host_block_ids
            group.host_block_ids.clear()
            table.num_blocks = len(group.block_ids)
        return len(self._pending_copies.blocks_to_swap_in) - before

    # Ending

    def free(self, table: BlockTable) -> None:
        """Gives back every block that the table holds, in either pool."""
        self._release_device(table)
        for group in table.groups:
            for block_id in reversed(group.host_block_ids):
                self.host_pool.decref(block_id)
            group.host_block_ids.clear()
            group.num_skipped = 0

    # Copies and events of a step

    def begin_stores(self, max_copies: int) -> None:
        """Has tiers store what they are to keep. See ``AsyncKVConnector.begin_stores``."""
        self.tiers.begin_stores(self._pending_copies, max_copies)

    @property
    def has_pending_copies(self) -> bool:
        """Whether anything is to be copied for what was decided since ``take_pending_copies``."""
        return not self._pending_copies.is_empty

    def take_pending_copies(self) -> BlockCopies:
        """What has to be copied for all that was decided since the last call: the step is scheduled."""
        copies, self._pending_copies = self._pending_copies, BlockCopies()
        if self.host.held:
            self.host.release_held()
        return copies

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the prefix cache since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def stored_blocks(self) -> list[BlockStored]:
        """Everything that events tell of, on the device and on the host."""
        stored = self.device_pool.stored_blocks() + (self.host_pool.stored_blocks() if self.host_caching else [])
        if self.num_groups == 1:
            return stored
        told = [each for each in stored if each.block_hash.endswith(self._published_suffix)]
        return [BlockStored(each.block_hash[:HASH_BYTES], each.tier) for each in told]

    def check_integrity(self) -> None:
        """Asserts the integrity of all pools."""
        self.device_pool.check_integrity()
        self.host_pool.check_integrity()
        self.tiers.check_integrity()

    # Inside

    def _emit_published(self, event: KVCacheEvent) -> None:
        """Routers hear of one block for each of a prompt's, that of the group that sees most. What they find there is
        the most that a request can begin with.
        """
        if event.block_hash.endswith(self._published_suffix):
            self._events.append(replace(event, block_hash=event.block_hash[:HASH_BYTES]))

    def _find_cached(self, name: bytes) -> CachedBlock | None:
        block_id = self.device_pool.get_cached_block(name)
        if block_id is not None:
            return CachedBlock(block_id, Tier.DEVICE)
        block_id = self.tiers.look_up(name)
        return None if block_id is None else CachedBlock(block_id, Tier.HOST)

    def _find_in_windows(self, table: BlockTable, hits: list[CachedBlocks]) -> None:
        """Cuts ``hits`` to what the groups with windows have too, and adds their blocks."""

        def find(number: int, index: int) -> CachedBlock | None:
            return self._find_cached(block_name(table, number, index))

        num_blocks = self._longest_prefix(len(hits), lambda number, index: find(number, index) is not None)
        del hits[num_blocks:]
        for number, spec in self._windows:
            for index in range(spec.first_block(num_blocks * self.block_size, self.block_size), num_blocks):
                hit = find(number, index)
                assert hit is not None
                hits[index][number] = hit

    def _longest_prefix(self, num_blocks: int, is_there: Callable[[int, int], bool]) -> int:
        """The most blocks, up to ``num_blocks``, behind which windows reach only such blocks as ``is_there`` says of,
        by group and index. From the right, as vLLM looks for it: what lacks a block lacks it behind all that follow.
        """
        while gaps := [
            index
            for number, spec in self._windows
            for index in range(spec.first_block(num_blocks * self.block_size, self.block_size), num_blocks)
            if not is_there(number, index)
        ]:
            num_blocks = min(gaps)
        return num_blocks

    def _load_from_host(self, host_block_id: int, name: bytes | None) -> int:
        """A device block that will have the contents of a host block, under their name if they have one."""
        block_id = self.device_pool.allocate()
        self._pending_copies.blocks_to_swap_in.append(BlockCopy(host_block_id, block_id))
        if name is not None:
            self.device_pool.cache_block(block_id, name)
        return block_id

    def _on_device_eviction(self, block_id: int, name: bytes) -> None:
        self.tiers.on_evict(self._pending_copies, block_id, name)

    def _tail_is_shared(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether the next token would be written into blocks that others hold too. It is so in all groups or none."""
        index = num_computed_tokens // self.block_size
        table.tail_shared = index < table.num_blocks and any(
            self.device_pool.is_shared(group.block_ids[index]) for group in table.groups
        )
        return table.tail_shared

    def _copy_on_write(self, table: BlockTable, number: int, index: int) -> None:
        """Copy on write: gives the table a block of its own in place of a shared one of group ``number``."""
        shared, own = table.groups[number].block_ids[index], self.device_pool.allocate()
        self._pending_copies.blocks_to_copy.append(BlockCopy(shared, own))
        table.replace_block(number, index, own)
        self.device_pool.decref(shared)

    def _num_computed_blocks(self, table: BlockTable, num_computed_tokens: int) -> int:
        """Blocks of all groups that hold what is needed of ``num_computed_tokens``."""
        return sum([self.num_blocks_for(num_computed_tokens) - group.num_skipped for group in table.groups])

    def _is_held_by_others(self, table: BlockTable, number: int, index: int) -> bool:
        """Whether others than the table hold its block ``index``, which it may have given up."""
        group = table.groups[number]
        if index >= group.num_skipped:
            return self.device_pool.is_shared(group.block_ids[index])
        found = self.device_pool.get_cached_block(block_name(table, number, index))
        return found is not None and not self.device_pool.is_free(found)

    def _blocks_still_on_device(self, table: BlockTable) -> list[list[int | None]]:
        """For each group of a swapped table, and each of its host blocks, the device block that still holds it."""
        found: list[list[int | None]] = []
        for number, group in enumerate(table.groups):
            indexes = range(group.num_skipped, group.num_skipped + len(group.host_block_ids))
            names = [_name_if_cached(table, number, index) for index in indexes]
            found.append([None if name is None else self.device_pool.get_cached_block(name) for name in names])
        return found

    def _release_device(self, table: BlockTable) -> None:
        # Tail first: a prefix is worth more than what follows it, and the free order evicts the longest free first.
        for blocks in zip(*[reversed(group.block_ids) for group in table.groups], strict=True):
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    self.device_pool.decref(block_id)
        table.clear()


def _name_if_cached(table: BlockTable, number: int, index: int) -> bytes | None:
    return block_name(table, number, index) if index < table.num_cached_blocks else None
