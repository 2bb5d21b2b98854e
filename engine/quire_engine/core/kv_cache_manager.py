"""The KV memory of an engine: the device pool, the tiers behind it (``kv_transfer``), and every operation on a block
table.

When a sequence ends, for any reason, one function releases all blocks of its table (``free``).

Bookkeeping runs ahead of the contents. Scheduling a step collects copies, which the executor runs before it computes:
first to the host, then within the device, then from the host. Copies that swap ahead run while the step computes. A
host block to be read is held until the step is scheduled (``take_pending_copies``), so that no copy to the host
overwrites it, regardless of which was decided first. Device blocks need no hold: only sequences without a chunk in the
step are preempted, so the step frees no block that it writes. A step in flight needs no hold either: it runs first,
with its copies.

A sequence has a block table per group of layers; most models have one group. All tables use the same pools. In groups
with a window, blocks that no window reaches any more are released as the sequence grows. A prefix is found in them if
the blocks that its end still attends to are found. This is vLLM's hybrid KV cache manager, in one class.

Recurrent layers have pools of their own (``state_pool``). A prefix is found in them if it ends at a checkpoint.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from time import time_ns

from quire_engine.core.absence import SwapCost
from quire_engine.core.block_pool import (
    NULL_BLOCK,
    BlockCopies,
    BlockCopy,
    BlockPool,
    BlockStored,
    KVCacheConfig,
    KVCacheEvent,
    Tier,
)
from quire_engine.core.block_table import (
    SKIPPED,
    BlockTable,
    CachedBlock,
    CachedBlocks,
    GroupTable,
    StateTable,
    block_name,
)
from quire_engine.core.kv_events import KVEventPublisher
from quire_engine.core.kv_transfer.connector import AsyncKVConnector
from quire_engine.core.kv_transfer.host_tier import HostTier
from quire_engine.core.kv_transfer.multi_connector import MultiConnector, make_tiers
from quire_engine.core.kv_transfer.transfer import DiskContents
from quire_engine.core.state_pool import StatePool


class KVCacheManager:
    """Moves blocks between pools and tables. Counts are in blocks, lengths in tokens.

    ``tiers`` keep blocks that the device pool evicts. Without ``host_caching`` there are none, and ``host`` only serves
    swapped sequences. ``disk`` is the disk that an executor has opened, or None. ``states`` are the states of layers
    that keep some, or None. ``clock`` is in nanoseconds.
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
        self.num_groups = len(capacity.groups)
        self.num_tables = capacity.num_tables
        self._windows = [(number, group) for number, group in enumerate(capacity.groups) if group.window is not None]
        self.prefix_caching = prefix_caching
        host_caching = prefix_caching and host_caching and capacity.host_blocks > 0
        self._publisher = KVEventPublisher(capacity.groups, _suffixes(self.num_groups))
        self._pending_copies = BlockCopies()
        emit, on_evict = self._publisher.emit, self._on_device_eviction if host_caching else None
        self.device_pool = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, emit=emit, on_evict=on_evict)
        # If no prefix is looked up in the host pool, routers need no events about it.
        self.host = HostTier(capacity.host_blocks, capacity.device_blocks, emit if host_caching else None)
        tiers = make_tiers(capacity, self.device_pool, self.host, disk=disk, clock=clock) if host_caching else []
        self.tiers = MultiConnector(tiers)
        self.states: StatePool | None = None
        if capacity.states is not None:
            self.states = StatePool(
                capacity.states, capacity.block_size, prefix_caching=prefix_caching, host_caching=host_caching
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.capacity.block_bytes

    @property
    def host_pool(self) -> BlockPool:
        """The KV blocks on the host."""
        return self.host.pool

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks of one group that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def new_table(self, extra_key: bytes) -> BlockTable:
        """Returns an empty table."""
        states = None if self.states is None else StateTable()
        return BlockTable(extra_key, tuple([GroupTable(suffix) for suffix in _suffixes(self.num_groups)]), states)

    # Finding and starting

    def get_cached_blocks(self, table: BlockTable, token_ids: Sequence[int]) -> list[CachedBlocks]:
        """Returns the blocks that hold the longest cached prefix of ``token_ids``. At least one token is left to
        compute.

        The blocks are not referenced yet: pass them to ``attach_cached_blocks`` before anything else changes.
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
        if self._windows or self.states is not None:
            self._find_in_windows(table, hits)
        return hits

    def num_free_blocks_after(self, table: BlockTable, hits: Sequence[CachedBlocks], num_tokens: int) -> int:
        """Returns the fewest device blocks that stay free when the table takes ``hits`` and grows to ``num_tokens``.
        Below 0 if there are too few blocks.
        """
        on_device = [hit.block_id for hit in chain(*hits) if hit.tier is Tier.DEVICE and hit is not SKIPPED]
        revived = sum(self.device_pool.is_free(block_id) for block_id in on_device)
        held = table.num_held_blocks + len(on_device)
        return self.device_pool.num_free - revived - (self.capacity.max_blocks(num_tokens) - held)

    def attach_cached_blocks(self, table: BlockTable, hits: Sequence[CachedBlocks]) -> int:
        """Starts an empty table with the blocks that ``get_cached_blocks`` found. Returns the number of tokens that
        they hold.
        """
        # References all hits before allocating, because an allocation could evict one of them.
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
        if self.states is not None:
            self.states.attach(table, num_tokens)
        return num_tokens

    def count_tiers(self, table: BlockTable, hits: Sequence[CachedBlocks]) -> tuple[int, int]:
        """Returns how many of a request's cached blocks were on the host, and how many blocks had been loaded from a
        further tier and not used since.
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
        """Begins to load from ``tier`` the blocks that continue the prefix of ``token_ids`` found without it, if that
        is faster than computing them at ``rate`` tokens per second. Returns the hashes of the blocks to wait for, and
        how many blocks lack room now. See ``AsyncKVConnector.begin_load``, also for ``may_begin``.
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
        # Keeps the host's blocks of the prefix from being evicted for the rest of it.
        for block_id in on_host:
            self.host_pool.incref(block_id)
        names = [table.block_hashes[index] for index in missing]
        wanted = tier.begin_load(self._pending_copies, names, may_begin=may_begin)
        for block_id in reversed(on_host):
            self.host_pool.decref(block_id)
        return wanted

    def fork(self, table: BlockTable) -> BlockTable:
        """Returns a second table of the same blocks. The table that grows first gets a copy of a last block that is not
        full.
        """
        for group in table.groups:
            for block_id in group.block_ids[group.num_skipped :]:
                self.device_pool.incref(block_id)
        if self.states is not None:
            self.states.fork(table)
        table.tail_shared = True
        return table.copy()

    # Growing

    def has_room(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether ``num_tokens`` fit into the table's blocks, and its last block cannot be shared."""
        return num_tokens <= table.num_blocks * self.block_size and not table.tail_shared

    def num_blocks_needed(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> int:
        """Returns the device blocks needed to compute tokens ``[num_computed_tokens, num_tokens)`` into the table."""
        more = -(-num_tokens // self.block_size) - table.num_blocks
        parting = table.tail_shared and self._tail_is_shared(table, num_computed_tokens)
        return (more + parting if more > 0 else parting) * self.num_groups

    def allocate_slots(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> None:
        """Allocates blocks for tokens ``[num_computed_tokens, num_tokens)``. Copies a shared last block first (copy on
        write). The caller makes sure that enough blocks are free.
        """
        if table.tail_shared and self._tail_is_shared(table, num_computed_tokens):
            for number in range(self.num_groups):
                self._copy_on_write(table, number, num_computed_tokens // self.block_size)
        while table.num_blocks * self.block_size < num_tokens:
            table.append_blocks([self.device_pool.allocate() for _ in table.groups])
        if self.states is not None:
            self.states.allocate(table, num_computed_tokens, num_tokens)

    def unchanged_until(self, table: BlockTable) -> int:
        """Returns the number of computed tokens with which the table changes next: a block is full, or a window
        releases one. 0 if the next token may need a copy of the last block.
        """
        if table.tail_shared:
            return 0
        num_blocks = min(table.num_blocks, table.num_cached_blocks + 1) if self.prefix_caching else table.num_blocks
        until = num_blocks * self.block_size
        for number, spec in self._windows:
            until = min(until, spec.releases_at(table.groups[number].num_skipped, self.block_size))
        return until

    def free_unused_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees the device blocks after those that ``num_computed_tokens`` fill. They hold only rejected drafts."""
        while table.num_blocks > self.num_blocks_for(num_computed_tokens):
            for block_id in table.remove_last_blocks():
                self.device_pool.decref(block_id)

    def on_computed(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Notes that steps have computed ``num_computed_tokens`` of the table in all. Makes its full blocks findable
        for later requests, and releases blocks that no window reaches.
        """
        if self.prefix_caching and num_computed_tokens >= (table.num_cached_blocks + 1) * self.block_size:
            self.cache_full_blocks(table, token_ids, num_computed_tokens)
        if self._windows:
            self.remove_skipped_blocks(table, num_computed_tokens)
        if self.states is not None:
            self.states.on_computed(table, num_computed_tokens)

    def cache_full_blocks(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the blocks that are full with ``num_computed_tokens`` findable for later requests."""
        full = num_computed_tokens // self.block_size
        if not self.prefix_caching or full <= table.num_cached_blocks:
            return
        table.extend_block_hashes(token_ids, full, self.block_size)
        for number, group in enumerate(table.groups):
            for index in range(max(table.num_cached_blocks, group.num_skipped), full):
                self.device_pool.cache_block(group.block_ids[index], block_name(table, number, index))
        table.num_cached_blocks = full

    def remove_skipped_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Releases the blocks that no window reaches from tokens after ``num_computed_tokens``. Call it after
        ``cache_full_blocks``, so that later requests find the blocks until they are evicted. Call it only after these
        tokens were computed, because a failed step may be run again.
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
        """Whether the host has room for all computed blocks. Its free blocks with a name count as room."""
        has_room = 0 < self._num_computed_blocks(table, num_computed_tokens) <= self.host_pool.num_free
        return has_room and (self.states is None or self.states.can_swap_out)

    def swap_cost(self, table: BlockTable, num_computed_tokens: int) -> SwapCost:
        """Returns the cost of taking the table off the device, by swap and by recomputing. Blocks that other tables
        hold or that the host already has count as cached.
        """

        def outlives(number: int, index: int) -> bool:
            in_tier = self.tiers.look_up(block_name(table, number, index)) is not None
            return in_tier or self._is_held_by_others(table, number, index)

        full_groups = [number for number, spec in enumerate(self.capacity.groups) if spec.window is None]
        cached = 0
        while cached < table.num_cached_blocks and all(outlives(number, cached) for number in full_groups):
            cached += 1
        cached = self._longest_prefix(table, cached, outlives)
        state_bytes = 0 if self.states is None else self.states.block_bytes
        on_host = reloaded = 0
        for number, group in enumerate(table.groups):
            first = self.capacity.groups[number].first_block(cached * self.block_size, self.block_size)
            for index in range(group.num_skipped, table.num_cached_blocks):
                on_host += self.host.look_up(block_name(table, number, index)) is not None
            reloaded += sum(not self._is_held_by_others(table, number, index) for index in range(first, cached))
        return SwapCost(
            bytes_to_move=(2 * self._num_computed_blocks(table, num_computed_tokens) - on_host - reloaded)
            * self.block_bytes
            + 2 * state_bytes,
            uncached_tokens=max(0, num_computed_tokens - cached * self.block_size),
        )

    def swap_out(self, table: BlockTable, num_computed_tokens: int) -> int:
        """Moves the table to the host pool. Returns how many blocks are copied for that.

        A full block that the host pool already holds is taken from there and not copied.
        """
        before = len(self._pending_copies.blocks_to_swap_out)
        self.remove_skipped_blocks(table, num_computed_tokens)  # a step in flight that reads them runs before
        for number, group in enumerate(table.groups):
            for index in range(group.num_skipped, self.num_blocks_for(num_computed_tokens)):
                target, is_new = self.host.take(_name_if_cached(table, number, index))
                group.host_block_ids.append(target)
                if is_new:
                    self._pending_copies.blocks_to_swap_out.append(BlockCopy(group.block_ids[index], target))
        if self.states is not None:
            self.states.swap_out(table, num_computed_tokens)
        self._release_device(table)
        return len(self._pending_copies.blocks_to_swap_out) - before

    def swap_ahead(self, table: BlockTable, limit: int) -> int:
        """Copies up to ``limit`` full blocks of a table to the host while the step computes, so that a later
        ``swap_out`` finds them there. The table stays on the device. Returns how many blocks are copied.

        Call it after everything else of the step was scheduled, because the step may write blocks that were freed
        earlier.
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
        """Returns the free device blocks that ``swap_in`` and an ``allocate_slots`` to ``num_tokens`` would take."""
        found = chain(*self._blocks_still_on_device(table))
        in_use = sum(block_id is not None and not self.device_pool.is_free(block_id) for block_id in found)
        return self._num_computed_blocks(table, num_tokens) - in_use

    def swap_in(self, table: BlockTable) -> int:
        """Moves the table back to the device. Returns how many blocks are copied for that.

        A block that the device still holds under its name is taken from there and not copied. The host pool keeps full
        blocks under their names until they are evicted.
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
        if self.states is not None:
            self.states.swap_in(table)
        return len(self._pending_copies.blocks_to_swap_in) - before

    # Ending

    def free(self, table: BlockTable) -> None:
        """Releases every block that the table holds, in either pool."""
        self._release_device(table)
        for group in table.groups:
            for block_id in reversed(group.host_block_ids):
                self.host_pool.decref(block_id)
            group.host_block_ids.clear()
            group.num_skipped = 0
        if self.states is not None:
            self.states.free(table)

    def evict_all(self) -> None:
        """Evicts all blocks from the device; none may be in use. Those that are worth it go to the host. O(blocks)."""
        self.device_pool.evict_all()
        if self.states is not None:
            self.states.device_pool.evict_all()

    # Copies and events of a step

    def begin_stores(self, max_copies: int) -> None:
        """Starts stores of the tiers. See ``AsyncKVConnector.begin_stores``."""
        self.tiers.begin_stores(self._pending_copies, max_copies)

    @property
    def has_pending_copies(self) -> bool:
        """Whether copies were collected since ``take_pending_copies``."""
        return not self._pending_copies.is_empty or (self.states is not None and self.states.has_copies)

    def take_pending_copies(self) -> BlockCopies:
        """Returns the copies for everything decided since the last call, after the step was scheduled."""
        copies, self._pending_copies = self._pending_copies, BlockCopies()
        if self.host.held:
            self.host.release_held()
        if self.states is not None:
            copies.states = self.states.take_copies()
        return copies

    def take_events(self) -> list[KVCacheEvent]:
        """Returns the changes of the prefix cache since the last call, in order."""
        events = self._publisher.events.copy()
        self._publisher.events.clear()
        return events

    def stored_blocks(self) -> list[BlockStored]:
        """Returns all blocks that events have reported as stored, on the device and on the host."""
        on_host = self.host_pool.stored_blocks() if self.tiers.tiers else []
        return self._publisher.published(self.device_pool.stored_blocks() + on_host)

    def check_integrity(self) -> None:
        """Asserts the integrity of all pools."""
        self.device_pool.check_integrity()
        self.host_pool.check_integrity()
        self.tiers.check_integrity()
        if self.states is not None:
            self.states.check_integrity()

    # Internals

    def _find_cached(self, name: bytes) -> CachedBlock | None:
        block_id = self.device_pool.get_cached_block(name)
        if block_id is not None:
            return CachedBlock(block_id, Tier.DEVICE)
        block_id = self.tiers.look_up(name)
        return None if block_id is None else CachedBlock(block_id, Tier.HOST)

    def _find_in_windows(self, table: BlockTable, hits: list[CachedBlocks]) -> None:
        """Cuts ``hits`` to the prefix that groups with windows and states have too, and adds the blocks of windows."""

        def find(number: int, index: int) -> CachedBlock | None:
            return self._find_cached(block_name(table, number, index))

        num_blocks = self._longest_prefix(table, len(hits), lambda number, index: find(number, index) is not None)
        del hits[num_blocks:]
        for number, spec in self._windows:
            for index in range(spec.first_block(num_blocks * self.block_size, self.block_size), num_blocks):
                hit = find(number, index)
                assert hit is not None
                hits[index][number] = hit

    def _longest_prefix(self, table: BlockTable, num_blocks: int, is_there: Callable[[int, int], bool]) -> int:
        """Returns the longest prefix, up to ``num_blocks`` blocks, that ends at a checkpoint of the states and whose
        windows reach only blocks for which ``is_there(group, index)`` is True. Searches from the right, like vLLM: a
        missing block rules out every prefix whose window reaches it.
        """
        while True:
            if self.states is not None:
                num_blocks = self.states.longest_prefix(table, num_blocks * self.block_size) // self.block_size
            gaps = [
                index
                for number, spec in self._windows
                for index in range(spec.first_block(num_blocks * self.block_size, self.block_size), num_blocks)
                if not is_there(number, index)
            ]
            if not gaps:
                return num_blocks
            num_blocks = min(gaps)

    def _load_from_host(self, host_block_id: int, name: bytes | None) -> int:
        """Allocates a device block and copies a host block to it, under its name if it has one. Returns its id."""
        block_id = self.device_pool.allocate()
        self._pending_copies.blocks_to_swap_in.append(BlockCopy(host_block_id, block_id))
        if name is not None:
            self.device_pool.cache_block(block_id, name)
        return block_id

    def _on_device_eviction(self, block_id: int, name: bytes) -> None:
        self.tiers.on_evict(self._pending_copies, block_id, name)

    def _tail_is_shared(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether the next token would be written into blocks that other tables hold too. This is the same in all
        groups.
        """
        index = num_computed_tokens // self.block_size
        table.tail_shared = index < table.num_blocks and any(
            self.device_pool.is_shared(group.block_ids[index]) for group in table.groups
        )
        return table.tail_shared

    def _copy_on_write(self, table: BlockTable, number: int, index: int) -> None:
        """Replaces a shared block of group ``number`` with a copy of it."""
        shared, own = table.groups[number].block_ids[index], self.device_pool.allocate()
        self._pending_copies.blocks_to_copy.append(BlockCopy(shared, own))
        table.replace_block(number, index, own)
        self.device_pool.decref(shared)

    def _num_computed_blocks(self, table: BlockTable, num_computed_tokens: int) -> int:
        """Returns how many blocks of all groups hold ``num_computed_tokens``, without null blocks."""
        return sum([self.num_blocks_for(num_computed_tokens) - group.num_skipped for group in table.groups])

    def _is_held_by_others(self, table: BlockTable, number: int, index: int) -> bool:
        """Whether other tables hold the table's block ``index``, which the table may have released."""
        group = table.groups[number]
        if index >= group.num_skipped:
            return self.device_pool.is_shared(group.block_ids[index])
        found = self.device_pool.get_cached_block(block_name(table, number, index))
        return found is not None and not self.device_pool.is_free(found)

    def _blocks_still_on_device(self, table: BlockTable) -> list[list[int | None]]:
        """Returns, for each group of a swapped table and each of its host blocks, the device block that still holds it
        or None.
        """
        found: list[list[int | None]] = []
        for number, group in enumerate(table.groups):
            indexes = range(group.num_skipped, group.num_skipped + len(group.host_block_ids))
            names = [_name_if_cached(table, number, index) for index in indexes]
            found.append([None if name is None else self.device_pool.get_cached_block(name) for name in names])
        return found

    def _release_device(self, table: BlockTable) -> None:
        # Tail first: a prefix is worth more than what follows it, and the block that was freed first is evicted first.
        for blocks in zip(*[reversed(group.block_ids) for group in table.groups], strict=True):
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    self.device_pool.decref(block_id)
        table.clear()


def _suffixes(num_groups: int) -> list[bytes]:
    """Returns what the names of the blocks of each group end with."""
    return [bytes((number,)) for number in range(num_groups)] if num_groups > 1 else [b""]


def _name_if_cached(table: BlockTable, number: int, index: int) -> bytes | None:
    return block_name(table, number, index) if index < table.num_cached_blocks else None
