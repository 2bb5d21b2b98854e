"""The third tier of the prefix cache: KV blocks on disk, found by their hashes, also after a restart.

What goes there is what was used twice, as with the host's tier: it is written soon after its second use, and not when
the host gives it up, so that what is hot is there when the engine dies. What comes back is first loaded into the host
pool, while its request waits and others run; then it is found there as every block of the host's. So nothing else of
the engine knows the disk: the prefix cache finds more, or it does not, and then the tokens are computed.

All transfers are between blocks of the host pool and of the disk, and take several steps. Both sides are held
meanwhile, so that nothing is written over them, and get their names only when the result is known. The disk is bounded:
it is a ``BlockPool``, which gives up what was not used for longest. SGLang's HiCache and LMCache have such a tier, and
vLLM's ``WAITING_FOR_REMOTE_KVS`` is a request that waits so.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from time import time_ns

from quire_engine.core.block_pool import BlockCopies, BlockCopy, BlockPool, DiskTransfer, Tier

log = logging.getLogger(__name__)

MAX_STORES = 32
"""Blocks that are written at once: each holds a block of the host pool."""
STALL_SECONDS = 10.0
"""When no transfer has ended for so long although some are under way, the disk is turned off, and nothing waits for it
any more.
"""
_DRIFT = 1 / 16  # weight of a block in the mean of the seconds that one takes
_FORGETTING = 1 / 32  # of what was measured, at each decision against loading: slow loads may have been bad luck


class TransferOutcome(IntEnum):
    """What came of a transfer; of several ranks the largest counts. ``DAMAGED``: what was loaded is not what was
    stored. ``FAILED``: the disk cannot be used.
    """

    DONE = 0
    DAMAGED = 1
    FAILED = 2


class DiskFailure(StrEnum):
    """Why blocks were not had, or are not had any more, as metrics name it."""

    DAMAGED = "damaged"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer. ``seconds`` is how much longer the disk is busy for one more block: how long this one took
    by the number of those that are transferred at once. ``reason`` says why it failed.
    """

    transfer_id: int
    outcome: TransferOutcome = TransferOutcome.DONE
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """A disk as an executor has opened it: its blocks, and hashes with the blocks that they were found in, the oldest
    first. ``block_seconds`` is how long a block takes to load, as was measured, and ``block_bytes`` are those of all
    its parts.
    """

    num_blocks: int
    stored: Sequence[tuple[int, bytes]] = ()
    block_seconds: float = 0.0
    block_bytes: int = 0

    @classmethod
    def in_common(cls, parts: Sequence["DiskContents"]) -> "DiskContents":
        """What all of several ranks have, each of which has its part of every block in a file of its own."""
        own, *others = parts
        elsewhere = [set(part.stored) for part in others]
        stored = [each for each in own.stored if all(each in part for part in elsewhere)]
        seconds, num_bytes = max(part.block_seconds for part in parts), sum(part.block_bytes for part in parts)
        return cls(own.num_blocks, stored, seconds, num_bytes)


@dataclass(slots=True)
class _InFlight:
    transfer: DiskTransfer
    is_load: bool
    started: int


class DiskTier:
    """Plans the transfers and takes their results. Counts are in blocks.

    ``clock`` is in nanoseconds. ``failures`` counts blocks that were not had, by reason. ``num_stored`` and
    ``num_loaded`` are since the start. ``block_bytes`` are those of a block on all ranks together.
    """

    def __init__(
        self,
        contents: DiskContents,
        device_pool: BlockPool,
        host_pool: BlockPool,
        *,
        clock: Callable[[], int] = time_ns,
    ) -> None:
        # No request can begin with a block before it is in the host pool, so these blocks are no tier of a router's.
        self.pool = BlockPool(contents.num_blocks, Tier.HOST)
        for disk_block, block_hash in contents.stored:
            self.pool.restore(disk_block, block_hash)
        self.block_bytes = contents.block_bytes
        self.is_on = contents.num_blocks > 0
        self.num_stored = 0
        self.num_loaded = 0
        self.failures: Counter[DiskFailure] = Counter()
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._clock = clock
        self._first_block_seconds = self._block_seconds = contents.block_seconds
        self._max_stores = max(1, min(MAX_STORES, host_pool.num_blocks // 4))
        self._max_loads = max(1, host_pool.num_blocks // 2)
        self._max_queued = device_pool.num_blocks + host_pool.num_blocks
        self._num_transfers = 0
        self._last_result = 0
        self._in_flight: OrderedDict[int, _InFlight] = OrderedDict()
        self._to_store: OrderedDict[bytes, None] = OrderedDict()
        self._storing: set[bytes] = set()
        self._loading: set[bytes] = set()
        self._unused: set[bytes] = set()
        self._ended_loads: list[bytes] = []
        self._is_stalled = False

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to store, or a result to come: the engine is not idle until then."""
        return bool(self._to_store or (self._in_flight and not self._is_stalled))

    @property
    def has_transfers(self) -> bool:
        """Whether results are to come."""
        return bool(self._in_flight)

    @property
    def held_host_blocks(self) -> list[int]:
        """The host blocks of the transfers that are under way, each as often as it is held."""
        return [each.transfer.host_block for each in self._in_flight.values()]

    # Storing

    def on_reuse(self, block_hashes: Sequence[bytes]) -> None:
        """A prefix of these blocks was used again. What the disk has of it is kept longer, the first blocks for
        longest; the rest is to be stored, the first blocks first.
        """
        if not self.is_on:
            return
        missing: list[bytes] = []
        for block_hash in reversed(block_hashes):
            disk_block = self.pool.get_cached_block(block_hash)
            if disk_block is not None:
                self.pool.move_to_back(disk_block)
            elif block_hash not in self._storing:
                missing.append(block_hash)
        self._to_store.update(dict.fromkeys(reversed(missing)))
        while len(self._to_store) > self._max_queued:  # the disk is slower than new prefixes are used again
            self._to_store.popitem(last=False)

    def plan_stores(self, copies: BlockCopies, max_copies: int) -> None:
        """Adds to ``copies`` what can be stored now. Of what only the device has, up to ``max_copies`` blocks are
        copied to the host beside the step, which must be scheduled but for them; the host keeps these as its own.

        A block that neither has any more, or that there is no host block for, is left until it is used again.
        """
        while self._to_store and len(self._storing) < self._max_stores and self.pool.num_free:
            block_hash, _ = self._to_store.popitem(last=False)
            host_block = self._host_pool.get_cached_block(block_hash)
            if host_block is not None:
                self._host_pool.incref(host_block)
            else:
                source = self._device_pool.get_cached_block(block_hash)
                if source is None or not self._host_pool.num_free:
                    continue
                if max_copies <= 0:
                    self._to_store[block_hash] = None
                    self._to_store.move_to_end(block_hash, last=False)
                    break
                max_copies -= 1
                host_block = self._host_pool.allocate()
                self._host_pool.cache_block(host_block, block_hash)
                copies.blocks_to_swap_ahead.append(BlockCopy(source, host_block))
            self._storing.add(block_hash)
            copies.blocks_to_store.append(self._begin(host_block, self.pool.allocate(), block_hash, is_load=False))
        if not self.pool.num_free:
            self._to_store.clear()

    # Loading

    def has(self, block_hash: bytes) -> bool:
        """Whether the block can be loaded, or is being loaded."""
        return self.is_on and (block_hash in self._loading or self.pool.get_cached_block(block_hash) is not None)

    def pays(self, num_blocks: int, recompute_seconds: float) -> bool:
        """Whether to load so many blocks behind those that are being loaded rather than to compute their tokens."""
        if (len(self._loading) + num_blocks) * self._block_seconds <= recompute_seconds:
            return True
        self._block_seconds += _FORGETTING * (self._first_block_seconds - self._block_seconds)
        return False

    def has_room_for(self, num_blocks: int) -> bool:
        """Whether so many blocks may be loaded beside those that are: one half of the host pool may be loaded into at
        once. What is loaded alone may be more, and is cut to the room that there is.
        """
        return not self._loading or len(self._loading) + num_blocks <= self._max_loads

    def load(
        self, copies: BlockCopies, block_hashes: Sequence[bytes], *, may_begin: bool = True
    ) -> tuple[list[bytes], int]:
        """Begins to load blocks that the host pool does not have, but for those that are being loaded. Returns the
        blocks to wait for, the first of them if the host pool has no room for all, and 0; or none, and the number of
        blocks that ``has_room_for`` denies room now, or all where none ``may_begin``: then it is to be tried again.
        """
        new = [block_hash for block_hash in block_hashes if block_hash not in self._loading]
        if new and not (may_begin and self.has_room_for(len(new))):
            return [], len(new)
        room = min(self._max_loads - len(self._loading), self._host_pool.num_free)
        for block_hash in new[:room]:
            disk_block = self.pool.get_cached_block(block_hash)
            assert disk_block is not None, "a block is to be loaded that is not on disk"
            self.pool.incref(disk_block)
            self._loading.add(block_hash)
            copies.blocks_to_load.append(self._begin(self._host_pool.allocate(), disk_block, block_hash, is_load=True))
        late = set(new[max(0, room) :])
        return [block_hash for block_hash in block_hashes if block_hash not in late], 0

    def is_loading(self, block_hashes: list[bytes]) -> bool:
        """Whether any of the blocks is on its way. Those at the end that are not are struck from the list."""
        while block_hashes and (not self.is_on or block_hashes[-1] not in self._loading):
            block_hashes.pop()
        return bool(block_hashes)

    def take_ended_loads(self) -> list[bytes]:
        """The blocks that were being loaded until after the last call, whatever came of them."""
        ended, self._ended_loads = self._ended_loads, []
        return ended

    def count_loaded(self, block_hashes: Iterable[bytes]) -> int:
        """How many of these blocks, which a request begins with, have come from the disk and were not used since."""
        used = self._unused.intersection(block_hashes)
        self._unused -= used
        return len(used)

    def on_host_eviction(self, block_hash: bytes) -> None:
        """The host pool has given the block up."""
        self._unused.discard(block_hash)

    # Results

    def finish(self, results: Iterable[TransferResult]) -> None:
        """Takes results. Stored blocks can be found on the disk from now on, and loaded ones on the host. After a
        failure nothing is found on the disk any more.
        """
        for result in results:
            self._last_result = self._clock()
            ended = self._in_flight.pop(result.transfer_id)
            transfer = ended.transfer
            if ended.is_load:
                self._finish_load(transfer, result)
            else:
                self._storing.discard(transfer.block_hash)
                if result.outcome is TransferOutcome.DONE and self.is_on:
                    self.pool.cache_block(transfer.disk_block, transfer.block_hash)
                    self.num_stored += 1
            self._host_pool.decref(transfer.host_block)
            self.pool.decref(transfer.disk_block)
            if result.outcome is TransferOutcome.FAILED:
                self.failures[DiskFailure.FAILED] += 1
                self._turn_off(result.reason)

    def check_stalled(self) -> None:
        """Turns the disk off when transfers do not end. Their blocks stay held: they may be written at any time."""
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None:
            self._is_stalled = False
        elif not self._is_stalled and self._clock() - max(oldest.started, self._last_result) > STALL_SECONDS * 1e9:
            self._is_stalled = True
            self.failures[DiskFailure.STALLED] += 1
            self._turn_off(f"no transfer has ended for {STALL_SECONDS:g} seconds")

    def _finish_load(self, transfer: DiskTransfer, result: TransferResult) -> None:
        self._loading.discard(transfer.block_hash)
        self._ended_loads.append(transfer.block_hash)
        if result.outcome is TransferOutcome.DONE:
            self._block_seconds += _DRIFT * (result.seconds - self._block_seconds)
            self._host_pool.cache_block(transfer.host_block, transfer.block_hash)
            self._unused.add(transfer.block_hash)
            self.num_loaded += 1
        elif result.outcome is TransferOutcome.DAMAGED:
            self.failures[DiskFailure.DAMAGED] += 1
            self.pool.forget(transfer.disk_block)

    def _begin(self, host_block: int, disk_block: int, block_hash: bytes, *, is_load: bool) -> DiskTransfer:
        """A transfer between blocks that are held for it until its result."""
        self._num_transfers += 1
        transfer = DiskTransfer(self._num_transfers, host_block, disk_block, block_hash)
        self._in_flight[transfer.transfer_id] = _InFlight(transfer, is_load, self._clock())
        return transfer

    def _turn_off(self, reason: str) -> None:
        if self.is_on:
            log.warning("KV blocks are not kept on disk any more, because %s; restart the engine to try again", reason)
        self.is_on = False
        self._to_store.clear()
        for block in self.pool.stored_blocks():
            disk_block = self.pool.get_cached_block(block.block_hash)
            assert disk_block is not None
            self.pool.forget(disk_block)
