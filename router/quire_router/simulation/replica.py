"""One router of a simulated fleet: the ledger, the index and the placer of a real one, and updates in place of links.

Its own requests it knows at once; what other routers have in flight, what engines report and what they cache it hears
of later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np
from quire.v1 import engine_pb2
from quire_engine.simulation.clock import NANOSECONDS

from quire_router.fleet.expectations import SpeculativeBlocks
from quire_router.fleet.ledger import LedgerEntry, LoadLedger
from quire_router.fleet.room import has_room, has_spare_room
from quire_router.fleet.share import LoadMessage
from quire_router.generation import GenerationRequest
from quire_router.placement.index import PrefixIndex
from quire_router.placement.namespace import BlockNamespace
from quire_router.placement.placer import Placer
from quire_router.placement.query import PlacementDecision
from quire_router.placement.settings import PlacementSettings
from quire_router.placement.table import EngineTable
from quire_router.placement.tier import Tier
from quire_router.simulation.news import DelayedFeed, FeedReader
from quire_router.simulation.sharing import Publisher

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
