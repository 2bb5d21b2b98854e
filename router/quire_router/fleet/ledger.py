"""The in-flight work of all routers on all engines, added up in the columns of the table. Does no I/O.

Each router counts what it has in flight itself, and hears of the others' shares. A share replaces the one before, so a
message that was lost costs nothing but time, and a router that is silent for its lease is forgotten with all it had.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from quire_router.fleet.account import ZERO_COUNTS, EngineLoad
from quire_router.fleet.share import Counts, LoadMessage, RouterLoad
from quire_router.fleet.unseen import UnseenLoadEstimate
from quire_router.placement.table import EngineTable

MAX_PEERS = 256
ROOM_SECONDS = 0.25
"""A step or two: an engine must not run dry, and what waits in it waits in the order in which it came, whoever sent
it. In the fleet simulator it costs nothing against 2 s, and others' waits during a flood a third.
"""


@dataclass(slots=True)
class _RemoteRouter:
    """What another router said last, and for how many ticks it is believed."""

    message: LoadMessage
    ticks: int


class LedgerEntry:
    """What one dispatched request counts for, from ``LoadLedger.begin`` until ``end``. Each may be called twice."""

    __slots__ = ("_account", "_counts", "_sequences")

    def __init__(self, account: EngineLoad, *, pending_tokens: int, sequences: int) -> None:
        self._account = account
        self._sequences = sequences
        self._counts = ZERO_COUNTS
        self._set((1, max(0, pending_tokens), 0))

    def on_first_output(self) -> None:
        """Its first output was heard: its prompt is computed, and its sequences decode."""
        if self._counts != ZERO_COUNTS:
            self._set((1, 0, self._sequences))

    def end(self) -> None:
        """It counts for nothing any more."""
        if self._counts != ZERO_COUNTS:
            self._set(ZERO_COUNTS)

    def _set(self, counts: Counts) -> None:
        before, self._counts = self._counts, counts
        self._account.change_local(before, counts)


class LoadLedger:
    """The load of one router's engines. ``on_change`` is called when this router's own load has changed, ``on_room``
    when an engine came to have capacity (see ``EngineLoad``). ``clock`` is monotonic, in seconds. The publisher of this
    router's load reports to ``unseen`` when it published a message and when it received its own.
    """

    def __init__(
        self,
        table: EngineTable,
        *,
        room_seconds: float = ROOM_SECONDS,
        on_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._table = table
        self._room_seconds = room_seconds
        self._on_room = on_room
        self._clock = clock
        self._engines: dict[str, EngineLoad] = {}
        self._peers: dict[str, _RemoteRouter] = {}
        self.unseen = UnseenLoadEstimate(clock)

    def __len__(self) -> int:
        """How many other routers are known."""
        return len(self._peers)

    # Engines

    def add(self, engine_id: str) -> EngineLoad:
        """Opens a new engine's account, with what the others have in flight there already."""
        account = self._engines[engine_id] = EngineLoad(
            self._table,
            self._table.add(engine_id),
            room_seconds=self._room_seconds,
            on_own=self._on_local_change,
            on_room=self._on_room,
            clock=self._clock,
        )
        for share in self._remote_loads():
            account.change_remote(ZERO_COUNTS, share.engines.get(engine_id, ZERO_COUNTS))
        return account

    def remove(self, engine_id: str) -> None:
        """Closes the account of an engine that this router has nothing in flight on."""
        account = self._engines.pop(engine_id)
        assert account.local == ZERO_COUNTS, "a request of this router is in flight there"
        account.closed = True
        self._table.remove(engine_id)

    # What this router has

    def begin(self, engine_id: str, *, pending_tokens: int, sequences: int = 1) -> LedgerEntry:
        """A request was dispatched: ``pending_tokens`` of its prompt are not cached there. Raises ``KeyError``."""
        return LedgerEntry(self._engines[engine_id], pending_tokens=pending_tokens, sequences=sequences)

    def local_load(self) -> RouterLoad:
        """What the other routers need to hear."""
        return RouterLoad(
            {engine_id: account.local for engine_id, account in self._engines.items() if account.local[0]}
        )

    # What the others have

    def on_message(self, message: LoadMessage, ticks: int) -> bool:
        """Another router told its share, which is good for so many ticks; one that came before is not taken again.
        False when too many routers are known.
        """
        peer = self._peers.get(message.router_id)
        if peer is None and len(self._peers) >= MAX_PEERS:
            return False
        if peer is not None and message.sequence <= peer.message.sequence:
            return True
        self._peers[message.router_id] = _RemoteRouter(message, ticks)
        self._replace_load(peer.message.load if peer else RouterLoad(), message.load)
        if peer is not None:
            self.unseen.on_remote_dispatch(_dispatched(peer.message.load, message.load))
        self._table.unseen_tokens = self.unseen.tokens()
        return True

    def tick(self) -> None:
        """Time passes: forgets the routers that were silent for too long."""
        for router_id, peer in list(self._peers.items()):
            peer.ticks -= 1
            if peer.ticks <= 0:
                del self._peers[router_id]
                self._replace_load(peer.message.load, RouterLoad())
        self._table.unseen_tokens = self.unseen.tokens()

    # Inside

    def _on_local_change(self) -> None:
        self.unseen.on_local_change()
        self.on_change()

    def _remote_loads(self) -> Iterator[RouterLoad]:
        return (peer.message.load for peer in self._peers.values())

    def _replace_load(self, before: RouterLoad, after: RouterLoad) -> None:
        """Moves the accounts that differ. Engines that are not known here keep in the share until they are."""
        for engine_id, counts in after.engines.items():
            self._change_remote(engine_id, before.engines.get(engine_id, ZERO_COUNTS), counts)
        for engine_id, counts in before.engines.items():
            if engine_id not in after.engines:
                self._change_remote(engine_id, counts, ZERO_COUNTS)

    def _change_remote(self, engine_id: str, before: Counts, after: Counts) -> None:
        if before != after and (account := self._engines.get(engine_id)) is not None:
            account.change_remote(before, after)


def _dispatched(before: RouterLoad, after: RouterLoad) -> int:
    """Prompt tokens that came to engines from one share to the next."""
    more = (
        pending - before.engines.get(engine_id, ZERO_COUNTS)[1] for engine_id, (_, pending, _) in after.engines.items()
    )
    return sum(tokens for tokens in more if tokens > 0)
