"""The host pool: the first tier. Further tiers load into it, and swapped sequences move to it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count

from quire_engine.core.block_pool import BlockCopies, BlockCopy, BlockPool, KVCacheEvent, PoolCopies, Tier
from quire_engine.core.block_table import BlockTable


class HostTier:
    """A ``KVConnector`` whose blocks are in the host ``pool``.

    It keeps a block that the device's pool gives up if the block was used twice. It forgets a block that only one
    request used, but remembers the name, and keeps the block when it was computed again. Most blocks are never used
    again: to keep them all would cost a copy per new block, and the step waits for copies. (SGLang's HiCache calls this
    ``write_through_selective``; the remembered names are the ghost entries of ARC and 2Q.)

    Swapping does not ask tiers. A swapped sequence moves to this pool with all of its blocks, named or not, and shares
    named ones with the prefix cache: ``take`` and ``copy_ahead`` serve it. ``num_used_ahead`` counts the blocks that
    ``take`` found because ``copy_ahead`` had copied them.

    ``held`` are blocks with a reference that ends when the step is scheduled (``release_held``). ``transfer_ids``
    numbers the transfers of all tiers.
    """

    is_async = False

    def __init__(self, num_blocks: int, num_device_blocks: int, emit: Callable[[KVCacheEvent], None] | None) -> None:
        self.pool = BlockPool(num_blocks, Tier.HOST, emit=emit, on_evict=self._on_own_eviction)
        self.held: list[int] = []
        self.num_used_ahead = 0
        self.transfer_ids = count(1)
        # Device blocks with a second use, and names that were given up after one, the longest ago first.
        self._reused_blocks: set[int] = set()
        self._evicted_after_one_use: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted_names = num_device_blocks + num_blocks
        # Blocks that were copied ahead, and names that were loaded, until they are used.
        self._unused_ahead: set[int] = set()
        self._unused_loaded: set[bytes] = set()

    # The tier

    def look_up(self, name: bytes) -> int | None:
        """See ``KVConnector.look_up``."""
        return self.pool.get_cached_block(name)

    def on_reuse(self, table: BlockTable) -> None:
        """See ``KVConnector.on_reuse``."""
        for group in table.groups:
            self.note_reuse(group.block_ids[group.num_skipped :])

    def note_reuse(self, block_ids: Iterable[int]) -> None:
        """Notes the second use of device blocks."""
        self._reused_blocks.update(block_ids)

    def on_evict(self, copies: PoolCopies, block_id: int, name: bytes) -> bool:
        """Takes a block that was used twice, if there is room. See ``KVConnector.on_evict``."""
        is_reused = block_id in self._reused_blocks or name in self._evicted_after_one_use
        self._reused_blocks.discard(block_id)
        found = self.pool.get_cached_block(name)
        if found is not None:
            self.pool.move_to_back(found)
        elif is_reused and self.pool.num_free:
            self._evicted_after_one_use.pop(name, None)
            target = self.pool.allocate()
            self.pool.cache_block(target, name)
            self.pool.decref(target)
            copies.blocks_to_swap_out.append(BlockCopy(block_id, target))
            return True
        else:
            self._evicted_after_one_use[name] = None
            if len(self._evicted_after_one_use) > self._max_evicted_names:
                self._evicted_after_one_use.popitem(last=False)
        return False

    # For tiers that load into the pool

    def cache_loaded(self, block_id: int, name: bytes) -> None:
        """Makes a loaded block findable."""
        self.pool.cache_block(block_id, name)
        self._unused_loaded.add(name)

    def count_loaded(self, names: Iterable[bytes]) -> int:
        """Returns how many of these blocks were loaded and not used since. From now on they are used."""
        used = self._unused_loaded.intersection(names) if self._unused_loaded else ()
        self._unused_loaded.difference_update(used)
        return len(used)

    # For reads and swaps of the step that is being scheduled

    def hold(self, block_id: int) -> None:
        """Keeps a block from being written until the step is scheduled."""
        self.pool.incref(block_id)
        self.held.append(block_id)

    def release_held(self) -> None:
        """Ends the references of ``held``, when the step is scheduled."""
        for block_id in reversed(self.held):
            self.pool.decref(block_id)
        self.held.clear()

    def take(self, name: bytes | None) -> tuple[int, bool]:
        """Returns a block with a reference for a sequence that is swapped out, and whether its contents must be copied
        there. They have a name if the block is full.
        """
        found = None if name is None else self.pool.get_cached_block(name)
        if found is not None:
            self.pool.incref(found)
            if found in self._unused_ahead:
                self._unused_ahead.remove(found)
                self.num_used_ahead += 1
            return found, False
        block_id = self.pool.allocate()
        if name is not None:
            self.pool.cache_block(block_id, name)
        return block_id, True

    def copy_ahead(self, copies: BlockCopies, block_id: int, name: bytes) -> None:
        """Copies a device block while the step computes, for ``take`` to find. The copy has no reference once the step
        is scheduled, so the pool may give it up as any other named block.
        """
        target = self.pool.allocate()
        self.pool.cache_block(target, name)
        self.held.append(target)
        self._unused_ahead.add(target)
        copies.blocks_to_swap_ahead.append(BlockCopy(block_id, target))

    def _on_own_eviction(self, block_id: int, name: bytes) -> None:
        self._unused_ahead.discard(block_id)
        self._unused_loaded.discard(name)
