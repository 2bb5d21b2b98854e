"""Authentication of the cluster's front proxy, which sends requests in the name of others: who signs its client
certificate, and the names in it.

The cluster publishes both in a ConfigMap, and may change them at any time. It is polled and not watched: it changes
once in years, and a change that is seen late costs an autoscaler an error. A watch would be a stream from each router.
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

NAMESPACE, CONFIG_MAP = "kube-system", "extension-apiserver-authentication"
AUTHORITIES, NAMES = "requestheader-client-ca-file", "requestheader-allowed-names"
_PERIOD, _FIRST_PERIOD = 60.0, 2.0  # seconds between two polls, and until the first success
_TIMEOUT = 10.0  # seconds
PEER: Final = "peer"
"""The key of a request's ``TlsPeer`` in the ``state`` of its ASGI scope."""


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """The client of a TLS connection. ``certificate`` is its certificate in the form of ``SSLSocket.getpeercert``,
    verified against ``authorities`` (PEM) when the connection was made; empty if it sent none.
    """

    certificate: Mapping[str, Any]
    authorities: bytes

    @property
    def common_names(self) -> frozenset[str]:
        """The common names of the certificate's subject."""
        attributes = (attribute for group in self.certificate.get("subject", ()) for attribute in group)
        return frozenset(value for name, value in attributes if name == "commonName")


_NO_PEER: Final = TlsPeer({}, b"")


def peer_of(scope: Mapping[str, Any]) -> TlsPeer:
    """The client that sent a request."""
    peer = scope.get("state", {}).get(PEER, _NO_PEER)
    return peer if isinstance(peer, TlsPeer) else _NO_PEER


class UnknownProxyError(Exception):
    """The front proxy's identity cannot be read. The text is one sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class ProxyIdentity:
    """The authorities that sign the front proxy's certificate, in PEM format, and its names; empty: any name."""

    authorities: bytes
    names: frozenset[str] = frozenset()


ProxySource = Callable[[], Awaitable[ProxyIdentity]]
"""Reads the identity. Raises ``UnknownProxyError``."""


class FrontProxy:
    """The identity that ``source`` last returned; none at first."""

    def __init__(self, source: ProxySource) -> None:
        self._source = source
        self._identity: ProxyIdentity | None = None
        self._failing = False

    @property
    def is_known(self) -> bool:
        """Whether the identity was read."""
        return self._identity is not None

    @property
    def authorities(self) -> bytes:
        """The authorities that sign its certificate; empty while unknown."""
        return self._identity.authorities if self._identity is not None else b""

    def allows(self, peer: TlsPeer) -> bool:
        """Whether the peer is the front proxy, by the identity now, not when it connected."""
        identity = self._identity
        if identity is None or not peer.certificate or peer.authorities != identity.authorities:
            return False
        return not identity.names or bool(identity.names & peer.common_names)

    async def follow(self) -> None:
        """Polls the source. Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(_PERIOD if self.is_known else _FIRST_PERIOD)

    async def refresh(self) -> None:
        """Reads once; a failure leaves the identity as it is."""
        try:
            identity = await self._source()
        except UnknownProxyError as error:
            if not self._failing:
                log.warning("cannot find the cluster's front proxy: %s", error)
            self._failing = True
            return
        if identity != self._identity:
            log.info("found the cluster's front proxy: %s", ", ".join(sorted(identity.names)) or "anything")
        self._identity, self._failing = identity, False


def from_file(file: Path, names: Sequence[str]) -> ProxySource:
    """The identity from a file of authorities and names from settings."""

    async def read() -> ProxyIdentity:
        try:
            return ProxyIdentity(await asyncio.to_thread(read_ca, file), frozenset(names))
        except TlsError as error:
            raise UnknownProxyError(str(error)) from error

    return read


def from_cluster() -> ProxySource:
    """The identity that this cluster publishes for all extension API servers. Raises ``ValueError`` without the library
    for it.
    """
    from quire_router.clients.kube_client import ClusterError, read_config_map, require_library

    require_library("--scaling-port without --scaling-client-ca")

    async def read() -> ProxyIdentity:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return parse_proxy_identity(await read_config_map(NAMESPACE, CONFIG_MAP))
        except UnknownProxyError:
            raise
        except ClusterError as error:
            raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be read ({error})") from error
        except Exception as error:  # anything that the client's libraries raise: connections, responses, files
            raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be read ({type(error).__name__})") from error

    return read


def parse_proxy_identity(config_map: dict[str, str]) -> ProxyIdentity:
    """The identity in the ConfigMap. Raises ``UnknownProxyError``."""
    authorities = config_map.get(AUTHORITIES, "").encode()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii"))
        names = json.loads(config_map.get(NAMES) or "[]")
    except (ssl.SSLError, ValueError, RecursionError) as error:
        raise UnknownProxyError(f"{NAMESPACE}/{CONFIG_MAP} cannot be understood: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnknownProxyError(f"{NAMES} of {NAMESPACE}/{CONFIG_MAP} is not a list of names")
    return ProxyIdentity(authorities, frozenset(names))
