"""The gRPC server: ``quire.v1.Inference``, health that follows the fleet, and reflection."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from quire.v1.inference_pb2_grpc import add_InferenceServicer_to_server

from quire_router.api.frontend import Frontend
from quire_router.api.rpc.authentication import Authentication
from quire_router.api.rpc.decoding import Decoding
from quire_router.api.rpc.inference import SERVICE, Inference

_MAX_METADATA_BYTES = 16 * 1024
_HEALTH_PERIOD = 0.2  # seconds
_SERVICES = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)


class RpcServer:
    """Listens on ``address`` (port 0: any free one; ``port`` tells which), ``shared`` with other processes that say the
    same. Raises ``OSError`` when it cannot.
    """

    def __init__(
        self, frontend: Frontend, address: str, *, max_message_bytes: int, patience: float, shared: bool = False
    ) -> None:
        self._frontend = frontend
        self._server = grpc.aio.server(
            interceptors=[Authentication(frontend.keys), Decoding(SERVICE)],
            options=_options(max_message_bytes, shared),
        )
        self._health = health.aio.HealthServicer()
        add_InferenceServicer_to_server(Inference(frontend, patience), self._server)
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(_SERVICES, self._server)
        self.port = _bind(self._server, address)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to accept calls."""
        await self._tell_health()
        await self._server.start()
        self._following = asyncio.create_task(self._follow_health(), name="grpc health")

    async def stop(self, grace: float) -> None:
        """Refuses new calls, and lets running ones end within ``grace`` seconds."""
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def _follow_health(self) -> None:
        while True:
            await self._tell_health()
            await asyncio.sleep(_HEALTH_PERIOD)

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if self._frontend.serving() else status.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, state)


def _options(max_message_bytes: int, shared: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.so_reuseport", int(shared)),  # without it a port that is in use is an error, not a second server
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on") from error
    if port == 0:
        raise OSError(f"{address} cannot be listened on")
    return port
