"""An ASGI application over TLS, whose certificates may change at any time, told who asks (see ``peer``)."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from quire_proto.tls import TlsError
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from quire_router.api.connection_shares import peer_key
from quire_router.api.rest.protocol import ConnectionLimits, LimitedConfig, LimitedHttpProtocol
from quire_router.api.rest.server import http_config
from quire_router.autoscale.certificates import Certificates
from quire_router.autoscale.peer import PEER, Peer
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger(__name__)
_LAST_WORDS = 1.0  # seconds for answers to leave
_PAUSE = 0.1  # seconds after a connection could not be taken


class TlsServer:
    """Serves ``app`` on ``listener`` from ``start`` to ``stop``. A connection may take ``handshake`` seconds until it
    is one of TLS, and as many to end as such, and counts among those that ``limits`` allow from its beginning.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        certificates: Certificates,
        limits: ConnectionLimits,
        *,
        handshake: float = 5.0,
    ) -> None:
        self._config = http_config(app, limits)
        self._config.load()
        self._listener = listener
        self._certificates = certificates
        self._limits = limits
        self._handshake = handshake
        self._state = ServerState()
        self._greeting: dict[asyncio.Task[None], str] = {}
        self._accepting: SupervisedTask | None = None
        self.port: int = listener.getsockname()[1]

    def start(self) -> None:
        """Begins to accept connections."""
        self._accepting = supervise("connections of autoscalers", self._accept)

    async def stop(self) -> None:
        """Lets answers that have begun leave, within a bounded time, and closes every connection."""
        if self._accepting is not None:
            await self._accepting.stop()
        for task in self._greeting:
            task.cancel()
        if self._greeting:
            await asyncio.wait(self._greeting)
        self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_LAST_WORDS)
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # it left again, or too many files are open
                log.debug("a connection cannot be taken: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE)
                continue
            peer = peer_key(address[0])
            if not self._has_place(peer):
                connection.close()
                continue
            task = loop.create_task(self._greet(connection), name="TLS handshake")
            self._greeting[task] = peer
            task.add_done_callback(self._greeting.pop)

    def _has_place(self, peer: str) -> bool:
        """Whether a peer may begin a handshake, of which it may have its share at once."""
        own = sum(each == peer for each in self._greeting.values())
        is_within_share = own < max(1, self._limits.connections * self._limits.peer_share)
        return is_within_share and self._config.shares.evict_if_full(peer, uncounted=len(self._greeting))

    async def _greet(self, connection: socket.socket) -> None:
        try:
            context, authorities = self._certificates.current()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Asking(self._config, self._state, authorities),
                connection,
                ssl=context,
                ssl_handshake_timeout=self._handshake,
                ssl_shutdown_timeout=self._handshake,
            )
        except (OSError, TimeoutError, TlsError) as error:
            log.debug("a connection did not become one of TLS: %s", type(error).__name__)
            connection.close()


class _Asking(LimitedHttpProtocol):
    """Tells the application who sent each request, by the ``authorities`` that counted when the connection was made."""

    def __init__(self, config: LimitedConfig, state: ServerState, authorities: bytes) -> None:
        super().__init__(config, state, {})
        self._authorities = authorities

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Looks at what the client showed."""
        self.app_state = {PEER: Peer(_certificate(transport), self._authorities)}
        super().connection_made(transport)


def _certificate(transport: asyncio.Transport) -> Mapping[str, Any]:
    """What the peer showed and was checked; empty where it showed nothing."""
    connection: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return (connection.getpeercert() if connection is not None else None) or {}
