"""``CacheEvents``: applies the KV events of all engines to the prefix index."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.v1 import engine_pb2

from quire_router.core import metrics
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import IndexCounts, PrefixIndex, Tier

log = logging.getLogger(__name__)
SLICE = 2_000
MAX_WAITING = 65_536
_METRICS_SECONDS = 1.0
_TIERS = {engine_pb2.KV_TIER_DEVICE: Tier.DEVICE, engine_pb2.KV_TIER_HOST: Tier.HOST}


@dataclass(frozen=True, slots=True)
class _Change:
    """Blocks that were stored in or removed from one tier: at most ``SLICE`` of a message's, from ``start`` on."""

    stored: bool
    tier: Tier
    message: engine_pb2.KvStored | engine_pb2.KvRemoved
    start: int

    @property
    def hashes(self) -> Sequence[bytes]:
        """Sliced when they are applied: slicing a hundred thousand at once would take as long as storing some."""
        return self.message.block_hashes[self.start : self.start + SLICE]


class CacheEvents:
    """An ``EngineKvListener``, for ``EnginePool(..., on_kv_event=CacheEvents(index, table))``. Must be called on the
    event loop.

    A snapshot replaces all that is known of an engine; an empty one means that nothing is known any more, because the
    connection was given up or the engine left. The engine must still be in the table then. Blocks beyond the sizes in
    the snapshot's load are dropped.

    A snapshot of a large cache is applied in slices, one in each iteration of the event loop, and later events of the
    engine wait behind it. Does not sweep the index (see ``background_jobs.BackgroundJobs``).
    """

    def __init__(self, index: PrefixIndex, table: EngineTable) -> None:
        self._index = index
        self._table = table
        self._waiting: dict[str, deque[_Change]] = {}
        self._feeder: asyncio.Handle | None = None
        self._exported = IndexCounts()
        self._metrics_timer: asyncio.TimerHandle | None = None

    def __call__(self, engine_id: str, change: engine_pb2.Snapshot | engine_pb2.KvEvent, /) -> None:
        """Applies one event of an engine, or queues it behind the ones before."""
        self._metrics_timer = self._metrics_timer or asyncio.get_running_loop().call_later(
            _METRICS_SECONDS, self._export_metrics
        )
        if isinstance(change, engine_pb2.Snapshot):
            self._start_over(engine_id, change)
        else:
            self._take(engine_id, _changes(change))

    def blocks(self, engine_id: str) -> Iterator[tuple[Tier, bytes]] | None:
        """Returns all that an engine has cached, by tier; None while earlier events of it are waiting."""
        if engine_id in self._waiting:
            return None
        row = self._table.row_of(engine_id)
        return iter(()) if row < 0 else self._index.blocks(row)

    def _start_over(self, engine_id: str, snapshot: engine_pb2.Snapshot) -> None:
        self._waiting.pop(engine_id, None)
        row = self._table.row_of(engine_id)
        if row < 0:
            return
        self._index.clear(row)
        blocks = snapshot.load.blocks_total + snapshot.load.host_blocks_total
        if blocks:
            self._index.set_max_blocks(row, blocks)
        changes = [piece for stored in snapshot.cached for piece in _pieces(True, stored)]
        if len(changes) > 1:
            self._wait(engine_id, deque(changes))
        else:
            self._take(engine_id, changes)

    def _take(self, engine_id: str, changes: Sequence[_Change]) -> None:
        """Applies changes at once, unless earlier ones of the engine are waiting."""
        waiting = self._waiting.get(engine_id)
        if waiting is None:
            self._apply(engine_id, changes)
            return
        waiting += changes
        if len(waiting) > MAX_WAITING:  # it takes longer now, but no memory
            self._apply(engine_id, self._waiting.pop(engine_id))

    def _wait(self, engine_id: str, changes: deque[_Change]) -> None:
        self._waiting[engine_id] = changes
        self._feeder = self._feeder or asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """Applies one slice, of the engines in turn."""
        self._feeder = None
        if not self._waiting:
            return
        engine_id = next(iter(self._waiting))
        changes = self._waiting.pop(engine_id)
        try:
            self._apply(engine_id, [changes.popleft()])
            if changes:
                self._waiting[engine_id] = changes
        except Exception:  # the others are fed all the same
            log.exception("cannot process the cache events of engine %s; its cache counts as empty", engine_id)
            if (row := self._table.row_of(engine_id)) >= 0:
                self._index.clear(row)
        if self._waiting:
            self._feeder = asyncio.get_running_loop().call_soon(self._feed)

    def _apply(self, engine_id: str, changes: Sequence[_Change]) -> None:
        row = self._table.row_of(engine_id)
        if row < 0:
            return
        for change in changes:
            (self._index.store if change.stored else self._index.remove)(row, change.tier, change.hashes)

    def _export_metrics(self) -> None:
        self._metrics_timer = None
        now, exported = self._index.counts, self._exported
        metrics.INDEX_BLOCKS.set(now.blocks)
        metrics.INDEX_DROPPED.labels("full").inc(now.dropped - exported.dropped)
        metrics.INDEX_DROPPED.labels("damaged").inc(now.damaged - exported.damaged)
        self._exported = IndexCounts(now.blocks, now.dropped, now.damaged)


def _changes(event: engine_pb2.KvEvent) -> list[_Change]:
    stored = event.HasField("stored")
    return list(_pieces(stored, event.stored if stored else event.removed))


def _pieces(stored: bool, blocks: engine_pb2.KvStored | engine_pb2.KvRemoved) -> Iterator[_Change]:
    """The blocks of one event in slices; none for a tier that is not known here."""
    tier = _TIERS.get(blocks.tier)
    if tier is not None:
        for start in range(0, len(blocks.block_hashes), SLICE):
            yield _Change(stored, tier, blocks, start)
