"""The servers for autoscalers, on the ports that the settings name, and the TLS server of one of them.

``ReloadingSslContext`` follows certificate files and authorities that change while it runs: a new connection gets the
current ones. ``TlsServer`` serves an ASGI application with it, and puts the client's certificate into the scope (see
``proxy_auth.PEER``).
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from quire_proto.certificates import ReloadingCertificates
from quire_proto.supervise import SupervisedTask
from quire_proto.tls import CertKeyFiles, ServerTls, TlsError
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from quire_router.api.request_limits import peer_key
from quire_router.api.rest.http_server import ConnectionLimits, LimitedConfig, LimitedHttpProtocol, http_config, listen
from quire_router.autoscale.external_metrics import ExternalMetrics
from quire_router.autoscale.keda import KedaServer, Scaler
from quire_router.autoscale.local_load import Load
from quire_router.autoscale.proxy_auth import PEER, FrontProxy, TlsPeer, from_cluster, from_file
from quire_router.clients.kube_client import KubeAccess, own_namespace
from quire_router.config import Settings, labels_of
from quire_router.core.retry import supervise

log = logging.getLogger(__name__)

_LIMITS = ConnectionLimits(connections=256, head=10.0)
_SHUTDOWN_TIMEOUT = 1.0  # seconds for responses to be sent
_ACCEPT_PAUSE = 0.1  # seconds after a connection could not be accepted


async def start_scaling_servers(settings: Settings, load: Load, stack: AsyncExitStack) -> None:
    """Serves ``load`` on the ports that the settings name; ``stack`` closes them. Raises ``OSError`` if a port is not
    available, and ``ValueError`` for invalid files.
    """
    if settings.scaling_port is not None:
        _start_external_metrics(settings, load, stack)
    if settings.keda_port is not None:
        await _start_keda(settings, load, stack)


def _start_external_metrics(settings: Settings, load: Load, stack: AsyncExitStack) -> None:
    assert settings.scaling_port is not None
    assert settings.scaling_identity is not None
    proxy = FrontProxy(
        from_cluster()
        if settings.scaling_client_ca is None
        else from_file(settings.scaling_client_ca, settings.scaling_client_name)
    )
    certificates = ReloadingSslContext(settings.scaling_identity, lambda: proxy.authorities)
    namespace = settings.scaling_namespace or namespace_of_pod(KubeAccess())
    app = ExternalMetrics(load, labels_of(settings.models), namespace, proxy)
    server = TlsServer(
        app,
        listen(settings.host, settings.scaling_port, "--scaling-port"),
        certificates,
        replace(_LIMITS, peer_share=settings.max_peer_share),
    )
    server.start()
    stack.push_async_callback(server.stop)
    stack.push_async_callback(supervise("front proxy", proxy.follow).stop)
    log.info("autoscaling: external metrics on %s:%d", settings.host, server.port)


def namespace_of_pod(pod: KubeAccess) -> str:
    """The namespace whose metrics are served unless a setting names one. Raises ``ValueError`` outside of a pod."""
    try:
        return own_namespace(pod)
    except OSError as error:
        raise ValueError("--scaling-port needs --scaling-namespace: this does not run in a pod") from error


async def _start_keda(settings: Settings, load: Load, stack: AsyncExitStack) -> None:
    assert settings.keda_port is not None
    tls, scaler = settings.keda_tls, Scaler(load, labels_of(settings.models))
    server = KedaServer(scaler, settings.host, settings.keda_port, tls, peer_share=settings.max_peer_share)
    await server.start()
    stack.push_async_callback(server.stop)
    log.info("autoscaling: KEDA on %s:%d%s", settings.host, server.port, "" if tls is None else " over TLS")


class ReloadingSslContext:
    """The SSL context of an HTTPS server with the certificate in ``files`` (see ``ReloadingCertificates``);
    ``authorities`` returns the PEM certificates that may sign client certificates. Those are optional, but verified if
    sent. Raises ``TlsError`` if the files are invalid.
    """

    def __init__(self, files: CertKeyFiles, authorities: Callable[[], bytes]) -> None:
        self._files = files
        self._authorities = authorities
        self._certificates = ReloadingCertificates(ServerTls(files))
        inputs = (self._certificates.current.identity, b"")
        self._made = inputs, self._make_context(b"")  # one value, so that threads see what belongs together

    def current(self) -> tuple[ssl.SSLContext, bytes]:
        """The context for a new connection, and the authorities in it. Reads files; any thread may call it. Raises
        ``TlsError``.
        """
        self._certificates.refresh()
        inputs = (self._certificates.current.identity, self._authorities())
        made_of, context = self._made
        if made_of != inputs:
            context = self._make_context(inputs[1])
            self._made = inputs, context
        return context, inputs[1]

    def _make_context(self, authorities: bytes) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_TICKET  # a resumed session would not be verified again
        context.options |= ssl.OP_NO_RENEGOTIATION  # with which one client can cause endless key exchanges
        context.num_tickets = 0
        try:
            context.load_cert_chain(self._files.certificate, self._files.key)
            if authorities:
                context.load_verify_locations(cadata=authorities.decode("ascii"))
                context.verify_mode = ssl.CERT_OPTIONAL
        except OSError as error:
            raise TlsError(f"{self._files.certificate} cannot be used just now") from error
        return context


class TlsServer:
    """Serves ``app`` on ``listener`` from ``start`` to ``stop``. A TLS handshake may take ``handshake`` seconds, and
    the TLS shutdown as many. A connection counts towards ``limits`` from its beginning.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        certificates: ReloadingSslContext,
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
        self._handshaking: dict[asyncio.Task[None], str] = {}
        self._accepting: SupervisedTask | None = None
        self.port: int = listener.getsockname()[1]

    def start(self) -> None:
        """Begins to accept connections."""
        self._accepting = supervise("connections of autoscalers", self._accept)

    async def stop(self) -> None:
        """Finishes responses that have started, within a bounded time, and closes every connection."""
        if self._accepting is not None:
            await self._accepting.stop()
        for task in self._handshaking:
            task.cancel()
        if self._handshaking:
            await asyncio.wait(self._handshaking)
        self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_SHUTDOWN_TIMEOUT)
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # the client is gone, or too many files are open
                log.debug("cannot accept a connection: %s", type(error).__name__)
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            peer = peer_key(address[0])
            if not self._has_capacity(peer):
                connection.close()
                continue
            task = loop.create_task(self._shake_hands(connection), name="TLS handshake")
            self._handshaking[task] = peer
            task.add_done_callback(self._handshaking.pop)

    def _has_capacity(self, peer: str) -> bool:
        """Whether a peer may begin a handshake; each may have its share of them at once."""
        own = sum(each == peer for each in self._handshaking.values())
        is_within_share = own < max(1, self._limits.connections * self._limits.peer_share)
        return is_within_share and self._config.shares.evict_if_full(peer, uncounted=len(self._handshaking))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            context, authorities = await asyncio.to_thread(self._certificates.current)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _PeerHttpProtocol(self._config, self._state, authorities),
                connection,
                ssl=context,
                ssl_handshake_timeout=self._handshake,
                ssl_shutdown_timeout=self._handshake,
            )
        except (OSError, TimeoutError, TlsError) as error:
            log.debug("a TLS handshake failed: %s", type(error).__name__)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise


class _PeerHttpProtocol(LimitedHttpProtocol):
    """Puts the client's certificate and the ``authorities`` that it was verified against into each request's scope."""

    def __init__(self, config: LimitedConfig, state: ServerState, authorities: bytes) -> None:
        super().__init__(config, state, {})
        self._authorities = authorities

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reads the client's certificate."""
        self.app_state = {PEER: TlsPeer(_certificate(transport), self._authorities)}
        super().connection_made(transport)


def _certificate(transport: asyncio.Transport) -> Mapping[str, Any]:
    """The client's verified certificate; empty if it sent none."""
    connection: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return (connection.getpeercert() if connection is not None else None) or {}
