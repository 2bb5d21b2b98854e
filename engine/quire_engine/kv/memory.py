"""The KV memory of an engine: the device pool, the host pool, and every way in which a block table may change.

Each block that a table holds is released on one path only (``release``), whatever ended the sequence.

Bookkeeping runs ahead of the contents: what it decides during a plan is collected as copies, which the executor carries
out before it computes, first those to the host, then those within the device, then those from the host. So that this
order is right whatever was decided when, a host block that is to be read is held until the plan is complete
(``take_copies``): nothing can be written over it meanwhile. On the device nothing needs holding: only sequences that
the plan has not reached yet give way, so no block that the plan writes is freed by it. Nor is anything held for a step
that is under way while the next one is planned: it is carried out first, copies and all.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.copy import BlockCopies, BlockCopy
from quire_engine.kv.events import BlockStored, KVCacheEvent, Tier
from quire_engine.kv.pool import BlockPool
from quire_engine.kv.table import BlockTable


class CachedBlock(NamedTuple):
    """A block that holds what is needed, and the pool that it is in."""

    block_id: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class SwapCost:
    """What a table costs: the bytes that swapping it out and in again moves, or the tokens that no cache holds and that
    would be computed again instead.
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
    """

    def __init__(self, capacity: KVCacheConfig, *, prefix_caching: bool = True, host_caching: bool = True) -> None:
        self.block_size = capacity.block_size
        self.block_bytes = capacity.block_bytes
        self.prefix_caching = prefix_caching
        self.host_caching = prefix_caching and host_caching and capacity.host_blocks > 0
        self._events: list[KVCacheEvent] = []
        self._copies = BlockCopies()
        self._held: list[int] = []
        # Device blocks with a second use, and names that were given up after one, the longest ago first.
        self._reused: set[int] = set()
        self._given_up: OrderedDict[bytes, None] = OrderedDict()
        self._most_given_up = capacity.device_blocks + capacity.host_blocks
        emit = self._events.append
        on_evict = self._keep_on_host if self.host_caching else None
        self.device = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, emit=emit, on_evict=on_evict)
        # Where nothing looks for prefixes in the host pool, its names are no news to a router.
        self.host = BlockPool(capacity.host_blocks, Tier.HOST, emit=emit if self.host_caching else None)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    # Finding and starting

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[CachedBlock]:
        """Blocks that already hold the longest prefix of ``token_ids``. At least one token is left to compute.

        They are only found, not taken: pass them to ``admit`` before anything else changes.
        """
        if not self.prefix_caching:
            return []
        hits: list[CachedBlock] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_names(token_ids, index + 1, self.block_size)
            hit = self._find(table.names[index])
            if hit is None:
                break
            hits.append(hit)
        return hits

    def free_after(self, hits: Sequence[CachedBlock], num_tokens: int) -> int:
        """Device blocks that stay free, below 0 if they do not suffice, when ``hits`` are taken and grown to
        ``num_tokens``.
        """
        on_device = [hit.block_id for hit in hits if hit.tier is Tier.DEVICE]
        revived = sum(self.device.is_free(block_id) for block_id in on_device)
        return self.device.num_free - revived - (self.blocks_for(num_tokens) - len(on_device))

    def admit(self, table: BlockTable, hits: Sequence[CachedBlock]) -> int:
        """Starts an empty table with the blocks that ``match`` found; returns the tokens that they hold."""
        # All hits are taken before anything is allocated, which could be one of them.
        for hit in hits:
            (self.device.acquire if hit.tier is Tier.DEVICE else self._hold)(hit.block_id)
        for index, hit in enumerate(hits):
            is_there = hit.tier is Tier.DEVICE
            table.block_ids.append(hit.block_id if is_there else self._load(hit.block_id, table.names[index]))
        if self.host_caching:
            self._reused.update(table.block_ids)
        table.named = len(hits)
        return len(hits) * self.block_size

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks. Whoever grows first gets a copy of a last block that is not full."""
        for block_id in table.block_ids:
            self.device.acquire(block_id)
        table.parted = True
        return table.copy()

    # Growing

    def missing(self, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        """Device blocks that it takes to compute ``[num_computed, num_tokens)`` into the table."""
        more = -(-num_tokens // self.block_size) - len(table.block_ids)
        parting = table.parted and self._ends_shared(table, num_computed)
        return more + parting if more > 0 else parting

    def grow(self, table: BlockTable, num_computed: int, num_tokens: int) -> None:
        """Lets tokens ``[num_computed, num_tokens)`` be computed into the table, whose last block becomes its own if
        others share it. The caller made sure that the blocks are there.
        """
        if table.parted and self._ends_shared(table, num_computed):
            self._part(table, num_computed // self.block_size)
        while len(table.block_ids) * self.block_size < num_tokens:
            table.block_ids.append(self.device.allocate())

    def name_full_blocks(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Makes the blocks that ``num_computed`` tokens fill findable by later requests."""
        full = num_computed // self.block_size
        if not self.prefix_caching or full <= table.named:
            return
        table.extend_names(token_ids, full, self.block_size)
        for index in range(table.named, full):
            self.device.name(table.block_ids[index], table.names[index])
        table.named = full

    # Swapping

    def can_swap_out(self, num_computed: int) -> bool:
        """Whether the host pool has room for all computed blocks; its free blocks with a name count as room."""
        return 0 < self.blocks_for(num_computed) <= self.host.num_free

    def swap_cost(self, table: BlockTable, num_computed: int) -> SwapCost:
        """What it costs to take the table off the device, either way. Blocks that others hold, and those that the host
        has already, are cached.
        """
        blocks = self.blocks_for(num_computed)
        on_host = sum(self.host.find(name) is not None for name in table.names[: table.named])
        cached = 0
        while cached < table.named and self._is_kept(table, cached):
            cached += 1
        return SwapCost(
            bytes_to_move=(2 * blocks - on_host) * self.block_bytes,
            uncached_tokens=max(0, num_computed - cached * self.block_size),
        )

    def swap_out(self, table: BlockTable, num_computed: int) -> int:
        """Moves the table to the host pool; returns how many blocks are copied for that.

        A full block that the host pool holds already is taken from there and not copied.
        """
        before = len(self._copies.out)
        for index, source in enumerate(table.block_ids[: self.blocks_for(num_computed)]):
            target, is_new = self._host_block(table, index)
            table.host_block_ids.append(target)
            if is_new:
                self._copies.out.append(BlockCopy(source, target))
        self._release_device(table)
        return len(self._copies.out) - before

    def missing_on_device(self, table: BlockTable, num_tokens: int) -> int:
        """Free device blocks that ``swap_in`` and a ``grow`` to ``num_tokens`` would take."""
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        in_use = sum(block_id is not None and not self.device.is_free(block_id) for block_id in found)
        return self.blocks_for(num_tokens) - in_use

    def swap_in(self, table: BlockTable) -> int:
        """Moves the table back to the device; returns how many blocks are copied for that.

        A block that the device still holds under its name is taken from there and not copied. The host pool keeps the
        contents of full blocks under their names until it needs the room.
        """
        before = len(self._copies.into)
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        for block_id in found:
            if block_id is not None:
                self.device.acquire(block_id)
        for index, source in enumerate(table.host_block_ids):
            block_id = found[index]
            if block_id is None:
                block_id = self._load(source, table.names[index] if index < table.named else None)
            table.block_ids.append(block_id)
        self._held += table.host_block_ids
        table.host_block_ids.clear()
        return len(self._copies.into) - before

    # Ending

    def release(self, table: BlockTable) -> None:
        """Gives back every block that the table holds, in either pool."""
        self._release_device(table)
        self._release_host(table)

    @property
    def has_copies(self) -> bool:
        """Whether anything is to be copied for what was decided since ``take_copies``."""
        return bool(self._copies.out or self._copies.within or self._copies.into)

    def take_copies(self) -> BlockCopies:
        """What has to be copied for all that was decided since the last call: the plan is complete."""
        copies, self._copies = self._copies, BlockCopies()
        for block_id in reversed(self._held):
            self.host.release(block_id)
        self._held.clear()
        return copies

    def drain_events(self) -> list[KVCacheEvent]:
        """What changed in the prefix cache since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def stored(self) -> list[BlockStored]:
        """Everything that can be hit, in both tiers."""
        return self.device.stored() + (self.host.stored() if self.host_caching else [])

    def check(self) -> None:
        """Asserts the integrity of both pools."""
        self.device.check()
        self.host.check()

    # Inside

    def _find(self, name: bytes) -> CachedBlock | None:
        block_id = self.device.find(name)
        if block_id is not None:
            return CachedBlock(block_id, Tier.DEVICE)
        block_id = self.host.find(name) if self.host_caching else None
        return None if block_id is None else CachedBlock(block_id, Tier.HOST)

    def _hold(self, host_block_id: int) -> None:
        self.host.acquire(host_block_id)
        self._held.append(host_block_id)

    def _load(self, host_block_id: int, name: bytes | None) -> int:
        """A device block that will have the contents of a host block, under their name if they have one."""
        block_id = self.device.allocate()
        self._copies.into.append(BlockCopy(host_block_id, block_id))
        if name is not None:
            self.device.name(block_id, name)
        return block_id

    def _keep_on_host(self, block_id: int, name: bytes) -> None:
        """The device pool gives up a named block: what was used twice stays on the host where that has room."""
        is_reused = block_id in self._reused or name in self._given_up
        self._reused.discard(block_id)
        found = self.host.find(name)
        if found is not None:
            self.host.touch(found)
        elif is_reused and self.host.num_free:
            self._given_up.pop(name, None)
            target = self.host.allocate()
            self.host.name(target, name)
            self.host.release(target)
            self._copies.out.append(BlockCopy(block_id, target))
        else:
            self._given_up[name] = None
            if len(self._given_up) > self._most_given_up:
                self._given_up.popitem(last=False)

    def _ends_shared(self, table: BlockTable, num_computed: int) -> bool:
        """Whether the next token would be written into a block that others hold too."""
        index = num_computed // self.block_size
        table.parted = index < len(table.block_ids) and self.device.is_shared(table.block_ids[index])
        return table.parted

    def _part(self, table: BlockTable, index: int) -> None:
        """Copy on write: gives the table a block of its own in place of a shared one."""
        shared, own = table.block_ids[index], self.device.allocate()
        self._copies.within.append(BlockCopy(shared, own))
        table.block_ids[index] = own
        self.device.release(shared)

    def _is_kept(self, table: BlockTable, index: int) -> bool:
        """Whether a full block of the table will still be found when the table has given it up."""
        return self.device.is_shared(table.block_ids[index]) or self.host.find(table.names[index]) is not None

    def _host_block(self, table: BlockTable, index: int) -> tuple[int, bool]:
        """A referenced host block for block ``index``, and whether its contents must be copied."""
        name = table.names[index] if index < table.named else None
        found = self.host.find(name) if name is not None else None
        if found is not None:
            self.host.acquire(found)
            return found, False
        block_id = self.host.allocate()
        if name is not None:
            self.host.name(block_id, name)
        return block_id, True

    def _device_block(self, table: BlockTable, index: int) -> int | None:
        """The device block that still holds block ``index`` of a swapped table."""
        return self.device.find(table.names[index]) if index < table.named else None

    def _release_device(self, table: BlockTable) -> None:
        # Tail first: a prefix is worth more than what follows it, and the free order evicts the longest free first.
        for block_id in reversed(table.block_ids):
            self.device.release(block_id)
        table.block_ids.clear()

    def _release_host(self, table: BlockTable) -> None:
        for block_id in reversed(table.host_block_ids):
            self.host.release(block_id)
        table.host_block_ids.clear()
