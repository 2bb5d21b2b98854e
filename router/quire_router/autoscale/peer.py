"""Who is at the other end of a TLS connection, as the application is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PEER: Final = "peer"
"""Where it is in a scope's ``state``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """``certificate`` is what the peer showed, as the ``ssl`` module tells it, and was checked against ``authorities``
    when the connection was made; empty where it showed none.
    """

    certificate: Mapping[str, Any]
    authorities: bytes

    @property
    def common_names(self) -> frozenset[str]:
        """The names of its subject."""
        parts = (part for group in self.certificate.get("subject", ()) for part in group)
        return frozenset(value for name, value in parts if name == "commonName")


_NOBODY: Final = Peer({}, b"")


def peer_of(scope: Mapping[str, Any]) -> Peer:
    """Who sent a request."""
    peer = scope.get("state", {}).get(PEER, _NOBODY)
    return peer if isinstance(peer, Peer) else _NOBODY
