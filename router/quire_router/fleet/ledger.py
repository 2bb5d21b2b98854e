"""The in-flight work of all routers on all engines, added up in the columns of the table. Does no I/O.

Each router counts what it has in flight itself, and hears of the others' shares. A share replaces the one before, so a
message that was lost costs nothing but time, and a router that is silent for its lease is forgotten with all it had.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from quire_router.fleet.account import NOTHING, Account
from quire_router.fleet.share import Counts, Message, Share
from quire_router.fleet.unseen import Unseen
from quire_router.placement.table import EngineTable

MAX_PEERS = 256
ROOM_SECONDS = 0.25
"""A step or two: an engine must not run dry, and what waits in it waits in the order in which it came, whoever sent
it. In the fleet simulator it costs nothing against 2 s, and others' waits during a flood a third.
"""


@dataclass(slots=True)
class _Peer:
    """What another router said last, and for how many ticks it is believed."""

    message: Message
    ticks: int


class LedgerEntry:
    """What one dispatched request counts for, from ``Ledger.begin`` until ``end``. Each may be called twice."""

    __slots__ = ("_account", "_counts", "_sequences")

    def __init__(self, account: Account, *, pending_tokens: int, sequences: int) -> None:
        self._account = account
        self._sequences = sequences
        self._counts = NOTHING
        self._become((1, max(0, pending_tokens), 0))

    def hear(self) -> None:
        """Its first output was heard: its prompt is computed, and its sequences decode."""
        if self._counts != NOTHING:
            self._become((1, 0, self._sequences))

    def end(self) -> None:
        """It counts for nothing any more."""
        if self._counts != NOTHING:
            self._become(NOTHING)

    def _become(self, counts: Counts) -> None:
        before, self._counts = self._counts, counts
        self._account.change_own(before, counts)


class Ledger:
    """Of one router. ``on_change`` is called when its own share has changed, ``on_room`` when an engine came to have
    room (see ``Account``). ``clock`` is monotonic, in seconds. Whoever tells its share, and hears it as the others do,
    says so to ``unseen``.
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
        self._accounts: dict[str, Account] = {}
        self._peers: dict[str, _Peer] = {}
        self.unseen = Unseen(clock)

    def __len__(self) -> int:
        """How many other routers are known."""
        return len(self._peers)

    # Engines

    def add(self, engine_id: str) -> Account:
        """Opens a new engine's account, with what the others have in flight there already."""
        account = self._accounts[engine_id] = Account(
            self._table,
            self._table.add(engine_id),
            room_seconds=self._room_seconds,
            on_own=self._changed,
            on_room=self._on_room,
            clock=self._clock,
        )
        for share in self._shares():
            account.change_peers(NOTHING, share.engines.get(engine_id, NOTHING))
        return account

    def remove(self, engine_id: str) -> None:
        """Closes the account of an engine that this router has nothing in flight on."""
        account = self._accounts.pop(engine_id)
        assert account.own == NOTHING, "a request of this router is in flight there"
        account.closed = True
        self._table.remove(engine_id)

    # What this router has

    def begin(self, engine_id: str, *, pending_tokens: int, sequences: int = 1) -> LedgerEntry:
        """A request was dispatched: ``pending_tokens`` of its prompt are not cached there. Raises ``KeyError``."""
        return LedgerEntry(self._accounts[engine_id], pending_tokens=pending_tokens, sequences=sequences)

    def share(self) -> Share:
        """What the other routers need to hear."""
        return Share({engine_id: account.own for engine_id, account in self._accounts.items() if account.own[0]})

    # What the others have

    def hear(self, message: Message, ticks: int) -> bool:
        """Another router told its share, which is good for so many ticks; one that came before is not taken again.
        False when too many routers are known.
        """
        peer = self._peers.get(message.router_id)
        if peer is None and len(self._peers) >= MAX_PEERS:
            return False
        if peer is not None and message.sequence <= peer.message.sequence:
            return True
        self._peers[message.router_id] = _Peer(message, ticks)
        self._replace(peer.message.share if peer else Share(), message.share)
        if peer is not None:
            self.unseen.dispatched(_dispatched(peer.message.share, message.share))
        self._table.unseen_tokens = self.unseen.tokens()
        return True

    def tick(self) -> None:
        """Time passes: forgets the routers that were silent for too long."""
        for router_id, peer in list(self._peers.items()):
            peer.ticks -= 1
            if peer.ticks <= 0:
                del self._peers[router_id]
                self._replace(peer.message.share, Share())
        self._table.unseen_tokens = self.unseen.tokens()

    # Inside

    def _changed(self) -> None:
        self.unseen.changed()
        self.on_change()

    def _shares(self) -> Iterator[Share]:
        return (peer.message.share for peer in self._peers.values())

    def _replace(self, before: Share, after: Share) -> None:
        """Moves the accounts that differ. Engines that are not known here keep in the share until they are."""
        for engine_id, counts in after.engines.items():
            self._move(engine_id, before.engines.get(engine_id, NOTHING), counts)
        for engine_id, counts in before.engines.items():
            if engine_id not in after.engines:
                self._move(engine_id, counts, NOTHING)

    def _move(self, engine_id: str, before: Counts, after: Counts) -> None:
        if before != after and (account := self._accounts.get(engine_id)) is not None:
            account.change_peers(before, after)


def _dispatched(before: Share, after: Share) -> int:
    """Prompt tokens that came to engines from one share to the next."""
    more = (pending - before.engines.get(engine_id, NOTHING)[1] for engine_id, (_, pending, _) in after.engines.items())
    return sum(tokens for tokens in more if tokens > 0)
