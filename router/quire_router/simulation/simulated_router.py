"""One router of a simulated fleet: the ledger, the index and the placer of a real one, and updates in place of links.

Its own requests it knows at once; what other routers have in flight, what engines report and what they cache it hears
of later.
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
from quire_router.engines.pool import has_room, has_spare_room
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.placer import Placer
from quire_router.placement.prefix_index import BlockNamespace, PrefixIndex, Tier
from quire_router.placement.query import PlacementDecision, PlacementSettings

# A feed of events that reach each reader some time after they happened. Times are in nanoseconds.


Item = TypeVar("Item")


class DelayedFeed(Generic[Item]):
    """What happened at one place, in the order of time."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Item]] = []

    def publish(self, time: int, item: Item) -> None:
        """Something happened now; time never goes back."""
        self.items.append((time, item))


class FeedReader(Generic[Item]):
    """Hears of each of the news once, ``delay`` after it happened; never, with None."""

    def __init__(self, news: DelayedFeed[Item], delay: int | None) -> None:
        self._items = news.items
        self._delay = delay
        self._next = 0

    def due(self, now: int) -> Iterator[tuple[int, Item]]:
        """What has come by now, and when it did."""
        while self._delay is not None and self._next < len(self._items):
            time, item = self._items[self._next]
            if time + self._delay > now:
                break
            self._next += 1
            yield time + self._delay, item


# How a simulated router tells the others what it has in flight and what it expects engines to have soon: as
# ``fleet.peers`` does, without Redis.


class Publisher:
    """Publishes one router's load when it has changed, at the ``PublishRate`` of ``interval`` nanoseconds; never, with
    None.
    """

    def __init__(
        self,
        router_id: str,
        ledger: LoadLedger,
        expectations: SpeculativeBlocks,
        shares: DelayedFeed[LoadMessage],
        interval: int | None,
    ) -> None:
        self._router_id = router_id
        self._ledger = ledger
        self._expectations = expectations
        self._shares = shares
        self._cadence = None if interval is None else PublishRate(interval)
        self._sequence = 0
        self._changed: int | None = None

    def change(self, now: int) -> None:
        """The share changes now. What was to be told before must have been: see ``flush``."""
        if self._changed is None:
            self._changed = now
        self.flush(now)

    def flush(self, now: int) -> None:
        """It is ``now``: tells what was to be told by then, as nothing has changed since."""
        if self._cadence is None or self._changed is None:
            return
        time = round(self._cadence.next_at(self._changed))
        if time > now:
            return
        self._sequence += 1
        message = LoadMessage(self._router_id, self._sequence, self._ledger.local_load(), self._expectations.pop_all())
        self._ledger.unseen.on_published(self._sequence)
        self._shares.publish(time, message)
        self._cadence.on_published(time, len(message.load.engines), len(self._ledger))
        self._changed = None


_FOR_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Delays:
    """Nanoseconds: between two times that a router tells what it has in flight (``share_interval``; with None it never
    does), and until a router hears of that (``share``), of what engines report (``load``) and cache (``event``).
    """

    share_interval: int | None
    share: int
    load: int
    event: int


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks that an engine has in a tier from now on, or no more."""

    stored: bool
    tier: Tier
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class EngineHandshake:
    """What an engine says when a router connects: what it is, and its load, at rest."""

    description: engine_pb2.DescribeResponse
    load: engine_pb2.Load


@dataclass(frozen=True, slots=True)
class EngineFeeds:
    """What one engine tells all routers, after each step."""

    loads: DelayedFeed[engine_pb2.Load]
    changes: DelayedFeed[list[CacheChange]]


class SimulatedRouter:
    """``number`` is its place among the routers, ``engine`` what every engine says at first, and ``shares`` where the
    routers tell each other what they have in flight. ``room_seconds`` is the ledger's. Times are in nanoseconds and
    never go back.
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
        self._ledger = LoadLedger(table, room_seconds=room_seconds, clock=self._seconds)
        self._accounts = [self._ledger.add(str(index)) for index in range(len(engines))]
        for account in self._accounts:
            account.describe(engine.description)
            account.report(engine.load)
        self._rows = np.array([account.row for account in self._accounts], dtype=np.intp)
        self._index = PrefixIndex()
        self._placer = Placer(table, self._index, placement, lambda _: namespace, self._seconds)
        self._expectations = SpeculativeBlocks(table, self._index, self._seconds)
        self._placer.on_speculative_blocks = self._expectations.add
        self._peers = FeedReader(shares, delays.share)
        self._loads = [FeedReader(engine.loads, delays.load) for engine in engines]
        self._changes = [FeedReader(engine.changes, delays.event) for engine in engines]
        self.publisher = Publisher(str(number), self._ledger, self._expectations, shares, delays.share_interval)
        self._ledger.on_change = lambda: self.publisher.change(self._now)

    @property
    def has_room(self) -> bool:
        """As ``EnginePool.has_capacity``."""
        return has_room(self._accounts)

    @property
    def has_spare_room(self) -> bool:
        """As ``EnginePool.has_spare_capacity``."""
        return has_spare_room(self._accounts)

    @property
    def in_flight(self) -> int:
        """Its own requests that it counts as running somewhere."""
        return sum(account.local[0] for account in self._accounts)

    def place(self, generation: GenerationRequest) -> PlacementDecision:
        """Where the request goes, by what is known."""
        decision = self._placer.place(generation, self._rows)
        assert decision is not None, "engines are always ready"
        self._placer.record_dispatch(decision, generation)
        return decision

    def begin(self, decision: PlacementDecision, generation: GenerationRequest) -> LedgerEntry:
        """Counts the request for as long as it is in flight."""
        pending = len(generation.prompt_token_ids) - decision.cached_tokens
        return self._ledger.begin(decision.engine_id, pending_tokens=pending)

    def advance(self, now: int) -> None:
        """It is ``now``: hears of all that has come, in its order. All publishers must have been flushed."""
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
            self._expectations.apply_remote(message.speculative)

    def _apply_cache_changes(self, row: int, batch: list[CacheChange]) -> None:
        for change in batch:
            (self._index.store if change.stored else self._index.remove)(row, change.tier, change.names)

    @property
    def seconds(self) -> float:
        """What time it is here."""
        return self._seconds()

    def _seconds(self) -> float:
        return self._now / NANOSECONDS
