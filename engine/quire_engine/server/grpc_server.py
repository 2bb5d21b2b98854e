"""``GrpcServer``: the gRPC port of an engine."""

import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quire.v1 import engine_pb2, engine_pb2_grpc
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.cli import join_host_port
from quire_proto.engine_token import EngineTokens

from quire_engine.config import EngineConfig
from quire_engine.server.connection_mux import ConnectionMux
from quire_engine.server.grpc_options import server_options
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.token_interceptor import TokenInterceptor

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name


class GrpcServer:
    """Serves the engine's service, health and reflection on one port. Uses TLS if ``config.tls`` is set, and requires a
    token if ``config.engine_token_file`` is set. ``is_ready`` is what the health checks say.

    Raises ``TlsError`` if the files of ``config.tls`` cannot be used, and ``TokenError`` if the token file cannot.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.is_ready = False
        self._config = config
        self._certificates = None if config.tls is None else ReloadingServerCredentials(config.tls)
        token_file = config.engine_token_file
        self._interceptors = () if token_file is None else (TokenInterceptor(EngineTokens(token_file)),)
        self._mux: ConnectionMux | None = None
        self._health = health.aio.HealthServicer()

    async def start(self, servicer: EngineServicer, name: str) -> None:
        """Opens the port. ``name`` is that of the model, for the log. Raises ``OSError``."""
        self._server = grpc.aio.server(interceptors=self._interceptors, options=server_options())
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        port = await self._listen()
        if self._mux is not None:
            log.warning("plain text is accepted as well as TLS (--tls-optional): turn it off when all routers use TLS")
        over = "" if self._certificates is None else " over TLS"
        log.info("serving %s on %s%s", name, join_host_port(self._config.host, port), over)

    async def set_ready(self, ready: bool) -> None:
        """Says whether new requests are accepted."""
        self.is_ready = ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace: float | None) -> None:
        """Closes the port, and all connections after ``grace`` seconds."""
        await self._server.stop(grace)
        if self._mux is not None:
            self._mux.close()

    async def _listen(self) -> int:
        """Starts the gRPC port and returns it. Raises ``OSError`` if that fails."""
        host, port = self._config.host, self._config.port
        if self._certificates is None or not self._config.tls_optional:
            port = _add_port(self._server, join_host_port(host, port), self._certificates)
            await self._server.start()
            return port
        self._mux = ConnectionMux()
        _add_port(self._server, self._mux.tls_address, self._certificates)
        _add_port(self._server, self._mux.plain_address, None)
        await self._server.start()
        return await self._mux.listen(host, port)


def _add_port(server: grpc.aio.Server, address: str, certificates: ReloadingServerCredentials | None) -> int:
    """Binds an address and returns its port. Raises ``OSError`` if that fails."""
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: it is in use, or not of this machine") from error
