"""One router of a simulation: the load ledger, the index and the placer of a real one, with delayed feeds in place of
connections.

It counts its own requests at once; what other routers have in flight, what engines report and what they cache reaches
it later. Times are in nanoseconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
from quire.v1 import engine_pb2
from quire_engine.simulation.simulator import NANOSECONDS

from quire_router.core.generation import GenerationRequest
from quire_router.core.retry import PublishRate
from quire_router.engines.load import LedgerEntry, LoadLedger
from quire_router.engines.load_messages import LoadMessage, SpeculativeBlocks
from quire_router.engines.pool import any_has_capacity, has_best_effort_capacity, has_spare_capacity
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.placer import PlacementDecision, Placer
from quire_router.placement.policies import PlacementSettings
from quire_router.placement.prefix_index import BlockNamespace, PrefixIndex, Tier

Item = TypeVar("Item")

_FOR_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Delays:
    """Nanoseconds between two messages of a router about its load (``share_interval``; None: it sends none), and until
    a router has such a message (``share``), an engine's load (``load``) and its cache events (``event``).
    """

    share_interval: int | None
    share: int
    load: int
    event: int


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks that an engine stored in a tier or removed from it."""

    stored: bool
    tier: Tier
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class EngineHandshake:
    """What an engine sends when a router connects: its description, and its load when idle."""

    description: engine_pb2.DescribeResponse
    load: engine_pb2.Load


class DelayedFeed(Generic[Item]):
    """Items that one source published, in the order of time."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Item]] = []

    def publish(self, time: int, item: Item) -> None:
        """Adds an item; time never goes back."""
        self.items.append((time, item))


@dataclass(frozen=True, slots=True)
class EngineFeeds:
    """What one engine sends to all routers after each step."""

    loads: DelayedFeed[engine_pb2.Load]
    changes: DelayedFeed[list[CacheChange]]


class SimulatedRouter:
    """``number`` is its index among the routers, ``engine`` what every engine sends at first, and ``shares`` has the
    load messages of all routers. ``room_seconds`` is the ledger's. Times never go back.
    """

    def __init__(
        self,
        number: int,
        placement: PlacementSettings,
        engine: EngineHandshake,
        engines: Sequence[EngineFeeds],
        *,
        shares: DelayedFeed[LoadMessage],
        delays: Delays,
        room_seconds: float,
    ) -> None:
        self.number = number
        self._now = 0
        table = EngineTable()
        namespace = BlockNamespace(engine.description.model_revision, engine.description.block_size)
        self._ledger = LoadLedger(table, capacity_seconds=room_seconds, clock=self._seconds)
        self._accounts = [self._ledger.add(str(index)) for index in range(len(engines))]
        for account in self._accounts:
            account.describe(engine.description)
            account.report(engine.load)
        self._rows = np.array([account.row for account in self._accounts], dtype=np.intp)
        self._index = PrefixIndex()
        self._placer = Placer(table, self._index, placement, lambda _: namespace, self._seconds)
        self._speculative = SpeculativeBlocks(table, self._index, self._seconds)
        self._placer.on_speculative_blocks = self._speculative.add
        self._peers = FeedReader(shares, delays.share)
        self._loads = [FeedReader(engine.loads, delays.load) for engine in engines]
        self._changes = [FeedReader(engine.changes, delays.event) for engine in engines]
        self.publisher = Publisher(str(number), self._ledger, self._speculative, shares, delays.share_interval)
        self._ledger.on_change = lambda: self.publisher.mark_changed(self._now)

    @property
    def has_capacity(self) -> bool:
        """As ``EnginePool.has_capacity``."""
        return any_has_capacity(self._accounts)

    @property
    def has_spare_capacity(self) -> bool:
        """As ``EnginePool.has_spare_capacity``."""
        return has_spare_capacity(self._accounts)

    @property
    def has_best_effort_capacity(self) -> bool:
        """As ``EnginePool.has_best_effort_capacity``."""
        return has_best_effort_capacity(self._accounts)

    @property
    def in_flight(self) -> int:
        """Number of its own requests that it counts as in flight."""
        return sum(account.local[0] + account.best_effort for account in self._accounts)

    def place(self, generation: GenerationRequest) -> PlacementDecision:
        """Places the request by what has arrived, and records the dispatch."""
        rows = self._rows
        if generation.best_effort:
            rows = np.array([load.row for load in self._accounts if load.has_best_effort_capacity], dtype=np.intp)
        decision = self._placer.place(generation, rows if len(rows) else self._rows)
        assert decision is not None, "engines are always ready"
        self._placer.record_dispatch(decision, generation)
        return decision

    def begin(self, decision: PlacementDecision, generation: GenerationRequest) -> LedgerEntry:
        """Counts the request as in flight until the entry's end."""
        pending = len(generation.prompt_token_ids) - decision.cached_tokens
        return self._ledger.begin(decision.engine_id, pending_tokens=pending, best_effort=generation.best_effort)

    def advance(self, now: int) -> None:
        """Applies all that has arrived by ``now``, in order. All publishers must have been flushed."""
        updates: list[tuple[int, Callable[[], object]]] = []
        for time, message in self._peers.due(now):
            updates.append((time, partial(self._apply_share, message)))
        for account, loads, changes in zip(self._accounts, self._loads, self._changes, strict=True):
            updates += [(time, partial(account.report, load)) for time, load in loads.due(now)]
            for _, batch in changes.due(now):
                self._apply_cache_changes(account.row, batch)
        updates.sort(key=itemgetter(0))
        for self._now, apply in updates:
            apply()
        self._now = now

    def _apply_share(self, message: LoadMessage) -> None:
        if message.router_id == str(self.number):
            self._ledger.unseen.on_received(message.sequence)
        elif self._ledger.on_message(message, _FOR_EVER):
            self._speculative.apply_remote(message.speculative)

    def _apply_cache_changes(self, row: int, batch: list[CacheChange]) -> None:
        for change in batch:
            (self._index.store if change.stored else self._index.remove)(row, change.tier, change.hashes)

    @property
    def seconds(self) -> float:
        """The router's time in seconds."""
        return self._seconds()

    def _seconds(self) -> float:
        return self._now / NANOSECONDS


class Publisher:
    """Publishes one router's load and the blocks that engines will have soon, as ``LoadSharing`` does, without Redis:
    when something has changed, at the ``PublishRate`` of ``interval`` nanoseconds; never, with None.
    """

    def __init__(
        self,
        router_id: str,
        ledger: LoadLedger,
        speculative: SpeculativeBlocks,
        shares: DelayedFeed[LoadMessage],
        interval: int | None,
    ) -> None:
        self._router_id = router_id
        self._ledger = ledger
        self._speculative = speculative
        self._shares = shares
        self._publish_rate = None if interval is None else PublishRate(interval)
        self._sequence = 0
        self._changed: int | None = None

    def mark_changed(self, now: int) -> None:
        """Schedules a message, as the load changes now. What was due before must have been published by ``flush``."""
        if self._changed is None:
            self._changed = now
        self.flush(now)

    def flush(self, now: int) -> None:
        """Publishes the message that is due by ``now``, as nothing has changed since."""
        if self._publish_rate is None or self._changed is None:
            return
        time = round(self._publish_rate.next_at(self._changed))
        if time > now:
            return
        self._sequence += 1
        message = LoadMessage(self._router_id, self._sequence, self._ledger.local_load(), self._speculative.pop_all())
        self._ledger.unseen.on_published(self._sequence)
        self._shares.publish(time, message)
        self._publish_rate.on_published(time, len(message.load.engines), len(self._ledger))
        self._changed = None


class FeedReader(Generic[Item]):
    """Reads each item once, ``delay`` after it was published; never, with None."""

    def __init__(self, feed: DelayedFeed[Item], delay: int | None) -> None:
        self._items = feed.items
        self._delay = delay
        self._next = 0

    def due(self, now: int) -> Iterator[tuple[int, Item]]:
        """Yields what has arrived by now, with the time at which it did."""
        while self._delay is not None and self._next < len(self._items):
            time, item = self._items[self._next]
            if time + self._delay > now:
                break
            self._next += 1
            yield time + self._delay, item
