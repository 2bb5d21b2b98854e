"""The cluster's front proxy, which asks in the name of others: whose certificates it shows, and under which names.

The cluster tells both in a ConfigMap, and may change them at any time. It is asked again and again and not watched: it
changes once in years, and what is too late for a change is an error for whoever scales by it. A watch would be a stream
from each router for that, and discovery's is made of EndpointSlices.
"""

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_proto.tls import TlsError, read_ca

log = logging.getLogger(__name__)

# Who is at the other end of a TLS connection, as the application is told of it.


PEER: Final = "peer"
"""Where it is in a scope's ``state``."""


@dataclass(frozen=True, slots=True)
class TlsPeer:
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


_NO_PEER: Final = TlsPeer({}, b"")


def peer_of(scope: Mapping[str, Any]) -> TlsPeer:
    """Who sent a request."""
    peer = scope.get("state", {}).get(PEER, _NO_PEER)
    return peer if isinstance(peer, TlsPeer) else _NO_PEER


NAMESPACE, CONFIG_MAP = "kube-system", "extension-apiserver-authentication"
AUTHORITIES, NAMES = "requestheader-client-ca-file", "requestheader-allowed-names"
_PERIOD, _FIRST_PERIOD = 60.0, 2.0  # seconds from one look to the next, and while nothing is known
_TIMEOUT = 10.0  # seconds


class UnknownProxyError(Exception):
    """It cannot be found out who the front proxy is. The text is one sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class ProxyIdentity:
    """Certificates of whom the front proxy shows, in PEM format, and its names; without any, every name is its own."""

    authorities: bytes
    names: frozenset[str] = frozenset()


ProxySource = Callable[[], Awaitable[ProxyIdentity]]
"""Finds the identity out. Raises ``UnknownProxyError``."""


class FrontProxy:
    """What is known of it: nothing at first, and what was last found out while ``source`` cannot be asked."""

    def __init__(self, source: ProxySource) -> None:
        self._source = source
        self._identity: ProxyIdentity | None = None
        self._failing = False

    @property
    def is_known(self) -> bool:
        """Whether anybody can be told from the front proxy."""
        return self._identity is not None

    @property
    def authorities(self) -> bytes:
        """Who vouches for it; empty while that is not known."""
        return self._identity.authorities if self._identity is not None else b""

    def allows(self, peer: TlsPeer) -> bool:
        """Whether this is the front proxy, by who vouches for it now, not when it connected."""
        identity = self._identity
        if identity is None or not peer.certificate or peer.authorities != identity.authorities:
            return False
        return not identity.names or bool(identity.names & peer.common_names)

    async def follow(self) -> None:
        """Asks again and again. Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(_PERIOD if self.is_known else _FIRST_PERIOD)

    async def refresh(self) -> None:
        """Asks once; what cannot be found out leaves what is known."""
        try:
            identity = await self._source()
        except UnknownProxyError as error:
            if not self._failing:
                log.warning("the cluster's front proxy cannot be found out: %s", error)
            self._failing = True
            return
        if identity != self._identity:
            log.info(
                "the cluster's front proxy is known: it is called %s", ", ".join(sorted(identity.names)) or "anything"
            )
        self._identity, self._failing = identity, False


def from_file(file: Path, names: Sequence[str]) -> ProxySource:
    """The identity that a file and settings name."""

    async def read() -> ProxyIdentity:
        try:
            return ProxyIdentity(await asyncio.to_thread(read_ca, file), frozenset(names))
        except TlsError as error:
            raise UnknownProxyError(str(error)) from error

    return read


def from_cluster() -> ProxySource:
    """The identity that the cluster in which this runs has for all such servers."""
    from quire_router.clients.kube_client import ClusterError, read_config_map

    async def read() -> ProxyIdentity:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return parse_proxy_identity(await read_config_map(NAMESPACE, CONFIG_MAP))
        except UnknownProxyError:
            raise
        except ClusterError as error:
            raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be read ({error})") from error
        except Exception as error:  # whatever the client's libraries raise: connections, answers, files
            raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be read ({type(error).__name__})") from error

    return read


def parse_proxy_identity(config_map: dict[str, str]) -> ProxyIdentity:
    """What the ConfigMap says. Raises ``UnknownProxyError``."""
    authorities = config_map.get(AUTHORITIES, "").encode()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii"))
        names = json.loads(config_map.get(NAMES) or "[]")
    except (ssl.SSLError, ValueError, RecursionError) as error:
        raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be understood: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnknownProxyError(f"{NAMES} of {NAMESPACE}/{CONFIG_MAP} is no list of names")
    return ProxyIdentity(authorities, frozenset(names))
