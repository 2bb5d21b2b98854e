"""The KV memory of an engine: the device pool, the host pool, and every way in which a block table may change.

Each block that a table holds is released on one path only (``release``), whatever ended the sequence.
"""

from collections.abc import Sequence

from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.copy import BlockCopy
from quire_engine.kv.events import KvEvent, Tier
from quire_engine.kv.pool import BlockPool
from quire_engine.kv.table import BlockTable


class KvMemory:
    """Moves blocks between pools and tables. All counts are in blocks, all lengths in tokens."""

    def __init__(self, capacity: KvCapacity, *, prefix_caching: bool = True) -> None:
        self.block_size = capacity.block_size
        self.prefix_caching = prefix_caching
        self._events: list[KvEvent] = []
        self.device = BlockPool(capacity.device_blocks, Tier.DEVICE, reserved=1, emit=self._events.append)
        # Nothing looks for prefixes in the host pool yet, so its names are no news to a router.
        self.host = BlockPool(capacity.host_blocks, Tier.HOST)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Device blocks that already hold the longest prefix of ``token_ids``. At least one token is left to compute.

        They are only found, not taken: pass them to ``admit`` before anything else changes.
        """
        if not self.prefix_caching:
            return []
        hits: list[int] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            table.extend_names(token_ids, index + 1, self.block_size)
            block_id = self.device.find(table.names[index])
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def free_after(self, hits: Sequence[int], num_tokens: int) -> int:
        """Device blocks that stay free, below 0 if they do not suffice, when ``hits`` are taken and grown to
        ``num_tokens``.
        """
        revived = sum(self.device.is_free(block_id) for block_id in hits)
        return self.device.num_free - revived - (self.blocks_for(num_tokens) - len(hits))

    def admit(self, table: BlockTable, hits: Sequence[int]) -> int:
        """Starts an empty table with the blocks that ``match`` found; returns the tokens that they hold."""
        for block_id in hits:
            self.device.acquire(block_id)
        table.block_ids.extend(hits)
        table.named = len(hits)
        return len(hits) * self.block_size

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that the device table lacks for ``num_tokens``."""
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids))

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Lets the device table hold ``num_tokens``. The caller made sure that the blocks are there."""
        for _ in range(self.missing(table, num_tokens)):
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

    def can_swap_out(self, num_computed: int) -> bool:
        """Whether the host pool has room for all computed blocks; its free blocks with a name count as room."""
        return 0 < self.blocks_for(num_computed) <= self.host.num_free

    def swap_out(self, table: BlockTable, num_computed: int) -> list[BlockCopy]:
        """Moves the table to the host pool; returns the copies to make before any device block is written again.

        A full block that the host pool still holds from an earlier swap is taken from there and not copied.
        """
        copies: list[BlockCopy] = []
        for index, source in enumerate(table.block_ids[: self.blocks_for(num_computed)]):
            target, is_new = self._host_block(table, index)
            table.host_block_ids.append(target)
            if is_new:
                copies.append(BlockCopy(source, target))
        self._release_device(table)
        return copies

    def missing_on_device(self, table: BlockTable, num_tokens: int) -> int:
        """Free device blocks that ``swap_in`` and a ``grow`` to ``num_tokens`` would take."""
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        in_use = sum(block_id is not None and not self.device.is_free(block_id) for block_id in found)
        return self.blocks_for(num_tokens) - in_use

    def swap_in(self, table: BlockTable) -> list[BlockCopy]:
        """Moves the table back to the device; returns the copies to make before its blocks are read.

        A block that the device still holds under its name is taken from there and not copied. The host pool keeps the
        contents of full blocks under their names until it needs the room.
        """
        found = [self._device_block(table, index) for index in range(len(table.host_block_ids))]
        for block_id in found:
            if block_id is not None:
                self.device.acquire(block_id)
        copies: list[BlockCopy] = []
        for index, source in enumerate(table.host_block_ids):
            block_id = found[index]
            if block_id is None:
                block_id = self.device.allocate()
                copies.append(BlockCopy(source, block_id))
                if index < table.named:
                    self.device.name(block_id, table.names[index])
            table.block_ids.append(block_id)
        self._release_host(table)
        return copies

    def release(self, table: BlockTable) -> None:
        """Gives back every block that the table holds, in either pool."""
        self._release_device(table)
        self._release_host(table)

    def drain_events(self) -> list[KvEvent]:
        """What changed in the prefix cache since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def check(self) -> None:
        """Asserts the integrity of both pools."""
        self.device.check()
        self.host.check()

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
