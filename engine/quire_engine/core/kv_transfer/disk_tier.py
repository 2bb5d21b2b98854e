"""KV blocks on disk: a tier that finds blocks by their hashes, also after a restart.

It stores a block soon after the second use, and not when the host gives the block up. So the blocks that are used most
are on disk when the engine dies.

A transfer is between a block of the host pool and a block of the disk. It holds both until its result is known, so that
nothing overwrites them, and only then do they get their names. The disk is bounded: a ``BlockPool`` gives up the least
recently used block. SGLang's HiCache and LMCache have such a tier. vLLM's ``WAITING_FOR_REMOTE_KVS`` is the status of a
request that waits for one.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import time_ns

from quire_engine.core.block_pool import BlockCopies, BlockCopy, BlockPool, Tier, Transfer
from quire_engine.core.block_table import BlockTable
from quire_engine.core.kv_transfer.connector import TransferFailure, TransferStats
from quire_engine.core.kv_transfer.host_tier import HostTier
from quire_engine.core.kv_transfer.transfer import DISK, DiskContents, TransferOutcome, TransferResult

log = logging.getLogger(__name__)

MAX_STORES = 32
"""Blocks written at once. Each holds a block of the host pool."""
STALL_SECONDS = 10.0
"""If transfers are under way and none has ended for this long, the disk is turned off."""
_DRIFT = 1 / 16  # weight of a block in the mean seconds per block
_FORGETTING = 1 / 32  # fraction by which each decision against loading forgets measurements: slow loads may be bad luck


class _LoadTime:
    """The measured ``seconds`` to load a block, ``first`` as measured at the start."""

    def __init__(self, first: float) -> None:
        self.first = self.seconds = first

    def observe(self, seconds: float) -> None:
        """Counts one more load."""
        self.seconds += _DRIFT * (seconds - self.seconds)

    def forget(self) -> None:
        """Moves the time towards the one at the start."""
        self.seconds += _FORGETTING * (self.first - self.seconds)


@dataclass(slots=True)
class _InFlight:
    transfer: Transfer
    started: int


class _TransfersInFlight:
    """The transfers whose results are to come, the oldest first, and the names of the blocks that they store and load.
    They are stalled if none has ended for ``STALL_SECONDS``. ``clock`` is in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.storing: set[bytes] = set()
        self.loading: set[bytes] = set()
        self.is_stalled = False
        self._transfers: OrderedDict[int, _InFlight] = OrderedDict()
        self._clock = clock
        self._last_result = 0

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def host_blocks(self) -> list[int]:
        """The host block of each transfer."""
        return [each.transfer.host_block for each in self._transfers.values()]

    def begin(self, transfer: Transfer) -> None:
        """Adds a transfer."""
        self._transfers[transfer.transfer_id] = _InFlight(transfer, self._clock())
        (self.loading if transfer.is_load else self.storing).add(transfer.block_hash)

    def end(self, transfer_id: int) -> Transfer | None:
        """Removes the transfer whose result has come. Returns None if it is none of these."""
        ended = self._transfers.pop(transfer_id, None)
        if ended is None:
            return None
        self._last_result = self._clock()
        (self.loading if ended.transfer.is_load else self.storing).discard(ended.transfer.block_hash)
        return ended.transfer

    def begin_stall(self) -> bool:
        """Returns True once if the transfers are stalled."""
        oldest = next(iter(self._transfers.values()), None)
        if oldest is None:
            self.is_stalled = False
        elif not self.is_stalled and self._clock() - max(oldest.started, self._last_result) > STALL_SECONDS * 1e9:
            self.is_stalled = True
            return True
        return False


class DiskTier:
    """An ``AsyncKVConnector`` of the disk that an executor has opened. ``clock`` is in nanoseconds."""

    is_async = True
    name = DISK

    def __init__(
        self,
        contents: DiskContents,
        device_pool: BlockPool,
        host: HostTier,
        *,
        clock: Callable[[], int] = time_ns,
    ) -> None:
        # Routers do not hear of this pool: no request can begin with a block before it is in the host pool.
        self.pool = BlockPool(contents.num_blocks, Tier.HOST)
        for disk_block, block_hash in contents.stored:
            self.pool.restore(disk_block, block_hash)
        self.stats = TransferStats(contents.block_bytes)
        self.is_on = contents.num_blocks > 0
        self._device_pool = device_pool
        self._host = host
        self._load_time = _LoadTime(contents.block_seconds)
        self._max_stores = max(1, min(MAX_STORES, host.pool.num_blocks // 4))
        self._max_loads = max(1, host.pool.num_blocks // 2)
        self._max_queued = device_pool.num_blocks + host.pool.num_blocks
        self._in_flight = _TransfersInFlight(clock)
        self._to_store: OrderedDict[bytes, None] = OrderedDict()
        self._ended_loads: list[bytes] = []

    @property
    def num_blocks(self) -> int:
        """See ``AsyncKVConnector.num_blocks``."""
        return self.pool.num_blocks if self.is_on else 0

    @property
    def num_free(self) -> int:
        """See ``AsyncKVConnector.num_free``."""
        return self.pool.num_free if self.is_on else 0

    def look_up(self, name: bytes) -> int | None:
        """Returns the block of the disk, which may be being loaded."""
        return self.pool.get_cached_block(name)

    # Storing

    def on_reuse(self, table: BlockTable) -> None:
        """See ``KVConnector.on_reuse``."""
        self._keep(table.block_hashes[: table.num_blocks])

    def on_evict(self, copies: BlockCopies, block_id: int, name: bytes) -> bool:
        """Queues a block that the tiers before have taken. See ``KVConnector.on_evict``."""
        del copies, block_id
        self._keep([name])
        return True

    def _keep(self, block_hashes: Sequence[bytes]) -> None:
        """Keeps the blocks of a prefix that the disk has, and queues the others to be stored. The first blocks are
        given up last, and stored first.
        """
        if not self.is_on:
            return
        missing: list[bytes] = []
        for block_hash in reversed(block_hashes):
            disk_block = self.pool.get_cached_block(block_hash)
            if disk_block is not None:
                self.pool.move_to_back(disk_block)
            elif block_hash not in self._in_flight.storing:
                missing.append(block_hash)
        self._to_store.update(dict.fromkeys(reversed(missing)))
        while len(self._to_store) > self._max_queued:  # the disk is slower than the reuse of new prefixes
            self._to_store.popitem(last=False)

    def begin_stores(self, copies: BlockCopies, max_copies: int) -> int:
        """Begins to store queued blocks. If only the device has a block, the step copies it to the host, which keeps
        it. A block that both have given up, or that gets no host block, is dropped until it is used again. See
        ``AsyncKVConnector.begin_stores``.
        """
        num_copies = 0
        while self._to_store and len(self._in_flight.storing) < self._max_stores and self.pool.num_free:
            block_hash, _ = self._to_store.popitem(last=False)
            host_block = self._host.pool.get_cached_block(block_hash)
            if host_block is not None:
                self._host.pool.incref(host_block)
            else:
                source = self._device_pool.get_cached_block(block_hash)
                if source is None or not self._host.pool.num_free:
                    continue
                if num_copies >= max_copies:
                    self._to_store[block_hash] = None
                    self._to_store.move_to_end(block_hash, last=False)
                    break
                num_copies += 1
                host_block = self._host.pool.allocate()
                self._host.pool.cache_block(host_block, block_hash)
                copies.blocks_to_swap_ahead.append(BlockCopy(source, host_block))
            copies.transfers.append(self._begin(host_block, self.pool.allocate(), block_hash, is_load=False))
        if not self.pool.num_free:
            self._to_store.clear()
        return num_copies

    # Loading

    def pays(self, num_blocks: int, recompute_seconds: float) -> bool:
        """See ``AsyncKVConnector.pays``. Each False moves the measured time towards the one at the start."""
        if (len(self._in_flight.loading) + num_blocks) * self._load_time.seconds <= recompute_seconds:
            return True
        self._load_time.forget()
        return False

    def has_room_for(self, num_blocks: int) -> bool:
        """See ``AsyncKVConnector.has_room_for``. Loads use at most half of the host pool. If nothing else is loaded,
        there is room for any number: ``begin_load`` cuts it.
        """
        loading = len(self._in_flight.loading)
        return not loading or loading + num_blocks <= self._max_loads

    def begin_load(
        self, copies: BlockCopies, names: Sequence[bytes], *, may_begin: bool = True
    ) -> tuple[list[bytes], int]:
        """See ``AsyncKVConnector.begin_load``."""
        loading = self._in_flight.loading
        new = [name for name in names if name not in loading]
        if new and not (may_begin and self.has_room_for(len(new))):
            return [], len(new)
        room = min(self._max_loads - len(loading), self._host.pool.num_free)
        for name in new[:room]:
            disk_block = self.pool.get_cached_block(name)
            assert disk_block is not None, "a block is to be loaded that is not on disk"
            self.pool.incref(disk_block)
            copies.transfers.append(self._begin(self._host.pool.allocate(), disk_block, name, is_load=True))
        late = set(new[max(0, room) :])
        return [name for name in names if name not in late], 0

    # Waiting

    @property
    def is_busy(self) -> bool:
        """See ``AsyncKVConnector.is_busy``. The engine does not wait for transfers that are stalled."""
        return bool(self._to_store or (self._in_flight and not self._in_flight.is_stalled))

    @property
    def has_transfers(self) -> bool:
        """See ``AsyncKVConnector.has_transfers``."""
        return bool(self._in_flight)

    @property
    def held_host_blocks(self) -> list[int]:
        """See ``AsyncKVConnector.held_host_blocks``."""
        return self._in_flight.host_blocks

    def is_loading(self, names: list[bytes]) -> bool:
        """See ``AsyncKVConnector.is_loading``."""
        while names and (not self.is_on or names[-1] not in self._in_flight.loading):
            names.pop()
        return bool(names)

    def take_ended_loads(self) -> list[bytes]:
        """See ``AsyncKVConnector.take_ended_loads``."""
        ended, self._ended_loads = self._ended_loads, []
        return ended

    # Finishing

    def finish(self, results: Iterable[TransferResult]) -> None:
        """See ``AsyncKVConnector.finish``. From now on stored blocks are found on the disk, and loaded ones on the
        host.
        """
        for result in results:
            transfer = self._in_flight.end(result.transfer_id)
            if transfer is None:
                continue
            if transfer.is_load:
                self._finish_load(transfer, result)
            elif result.outcome is TransferOutcome.DONE and self.is_on:
                self.pool.cache_block(transfer.tier_block, transfer.block_hash)
                self.stats.num_stored += 1
            self._host.pool.decref(transfer.host_block)
            self.pool.decref(transfer.tier_block)
            if result.outcome is TransferOutcome.FAILED:
                self.fail(TransferFailure.FAILED, result.reason)
        if self._in_flight.begin_stall():
            self.fail(TransferFailure.STALLED, f"no transfer has ended for {STALL_SECONDS:g} seconds")

    def fail(self, failure: TransferFailure, reason: str) -> None:
        """See ``AsyncKVConnector.fail``. Transfers that are under way keep their blocks, which may still be written."""
        self.stats.failures[failure] += 1
        if self.is_on:
            log.warning("KV blocks are not kept on disk any more, because %s; restart the engine to try again", reason)
        self.is_on = False
        self._to_store.clear()
        for block in self.pool.stored_blocks():
            disk_block = self.pool.get_cached_block(block.block_hash)
            assert disk_block is not None
            self.pool.forget(disk_block)

    def check_integrity(self) -> None:
        """See ``AsyncKVConnector.check_integrity``."""
        self.pool.check_integrity()

    def _finish_load(self, transfer: Transfer, result: TransferResult) -> None:
        self._ended_loads.append(transfer.block_hash)
        if result.outcome is TransferOutcome.DONE:
            self._load_time.observe(result.seconds)
            self._host.cache_loaded(transfer.host_block, transfer.block_hash)
            self.stats.num_loaded += 1
        elif result.outcome is TransferOutcome.DAMAGED:
            self.stats.failures[TransferFailure.DAMAGED] += 1
            self.pool.forget(transfer.tier_block)

    def _begin(self, host_block: int, disk_block: int, block_hash: bytes, *, is_load: bool) -> Transfer:
        """Returns a transfer, which holds its blocks until its result."""
        transfer = Transfer(next(self._host.transfer_ids), self.name, is_load, host_block, disk_block, block_hash)
        self._in_flight.begin(transfer)
        return transfer
