"""Which connection of a full port is evicted for a new one: the longest idle one, of the peer with most idle ones.
So no address keeps others out with connections that it leaves idle.
"""

from collections import Counter
from ipaddress import IPv6Address
from typing import Protocol

from quire_router.admission.lazy_heap import LazyHeap


class Evictable(Protocol):
    """A connection that can be closed while nothing is answered on it."""

    def evict(self) -> None:
        """Closes it."""
        ...


class ConnectionShares:
    """At most ``limit`` connections. When there are as many, a new one evicts the connection that is idle for the
    longest time, of the peer that has most idle ones. A peer that has ``peer_share`` of the limit (0 to 1) evicts its
    own idle connections only.
    """

    def __init__(self, limit: int, peer_share: float = 0.5) -> None:
        self._limit = limit
        self._max_per_peer = max(1, int(limit * peer_share))
        self._peers: dict[Evictable, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[str, dict[Evictable, None]] = {}  # of each peer, the idlest first
        self._most_idle: LazyHeap[str] = LazyHeap()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, connection: Evictable, peer: str) -> bool:
        """Takes a place for a connection of ``peer`` (see ``peer_of``); False when there is none."""
        if not self.evict_if_full(peer):
            return False
        self._peers[connection] = peer
        self._counts[peer] += 1
        return True

    def evict_if_full(self, peer: str, uncounted: int = 0) -> bool:
        """Evicts where it must, so that there is a place for one more connection of ``peer``, with ``beside`` that are
        not counted here yet; False when there is none.
        """
        if len(self._peers) + uncounted < self._limit:
            return True
        if self._counts[peer] < self._max_per_peer and self._most_idle:
            peer = self._most_idle.first()
        victim = next(iter(self._idle.get(peer, ())), None)
        if victim is None:
            return False
        self.remove(victim)
        victim.evict()
        return True

    def mark_idle(self, connection: Evictable) -> None:
        """Nothing is answered on the connection from now on; it may be so already."""
        peer = self._peers.get(connection)
        if peer is None:
            return
        idle = self._idle.setdefault(peer, {})
        idle.pop(connection, None)
        idle[connection] = None
        self._rank(peer)

    def mark_busy(self, connection: Evictable) -> None:
        """The connection cannot be evicted until it is idle again."""
        peer = self._peers.get(connection)
        if peer is not None and self._idle.get(peer, {}).pop(connection, self) is None:
            self._rank(peer)

    def remove(self, connection: Evictable) -> None:
        """The connection has ended, if it had a place."""
        self.mark_busy(connection)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]

    def _rank(self, peer: str) -> None:
        idle = self._idle[peer]
        if not idle:
            del self._idle[peer]
            self._most_idle.discard(peer)
        elif peer not in self._most_idle or self._most_idle.key(peer) != -len(idle):
            self._most_idle.put(peer, -len(idle))


def peer_key(host: str) -> str:
    """What counts as one peer: an IPv4 address, or the network of 64 bits that an IPv6 address is in, of which one
    machine has as many as it likes.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or int(address) >> 64)
