"""``RpcServer``: the gRPC server of ``quire.v1.Inference``, of health that follows the engines, and of reflection."""

import asyncio
from dataclasses import dataclass
from functools import cache

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection, reflection_pb2
from quire.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from quire_proto.supervise import SupervisedTask

from quire_router.api.rpc.context import Context
from quire_router.api.rpc.interceptors import (
    AuthInterceptor,
    CallLimitInterceptor,
    DecodeErrorInterceptor,
    MessageTimeoutInterceptor,
)
from quire_router.api.rpc.servicer import KEEPALIVE, SERVICE, InferenceService
from quire_router.api.service import ApiService
from quire_router.core.retry import supervise

MAX_METADATA_BYTES = 16 * 1024
_HEALTH_PERIOD = 0.2  # seconds
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_AUXILIARY_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1)
_SERVICES = (SERVICE, *_AUXILIARY_SERVICES)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """At most ``connections`` at once on one port, and ``auxiliary`` calls of each method of health and reflection,
    next to the ``requests`` that ``ConcurrencyLimit`` accepts and ``short`` ones that are answered or refused at once.
    A connection without calls is closed after ``idle`` seconds. One with calls whose client sends nothing for
    ``silence`` seconds gets a ping, and is closed when that is not answered within a third of that time.
    """

    requests: int = 1024
    auxiliary: int = 64
    short: int = 256
    connections: int = 4096
    idle: float = 300.0
    silence: float = 60.0

    @property
    def calls(self) -> int:
        """The most calls at once, on one connection or on all. The gRPC library refuses more without a reason, and a
        client's own library holds back what is above one connection's limit.
        """
        return self.requests + 5 * self.auxiliary + self.short


class RpcServer:
    """Listens on ``address`` (port 0: any free one, which ``port`` returns); with ``shared`` other processes may listen
    on it too. A client has ``client_timeout`` seconds to send a message, and to read one, and its stream is silent for
    ``keepalive`` seconds at most (0: for ever). Raises ``OSError`` when it cannot listen.
    """

    def __init__(
        self,
        service: ApiService,
        address: str,
        *,
        max_message_bytes: int,
        client_timeout: float,
        keepalive: float = KEEPALIVE,
        shared: bool = False,
        limits: CallLimits | None = None,
    ) -> None:
        self._service = service
        limits = limits or CallLimits()
        # From the outside in: a call without a valid key takes no slot, and one with a slot keeps it while it waits.
        interceptors = [
            AuthInterceptor(service.keys),
            CallLimitInterceptor(_AUXILIARY_SERVICES, limits.auxiliary),
            MessageTimeoutInterceptor(client_timeout),
            DecodeErrorInterceptor(SERVICE),
        ]
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=[*server_options(max_message_bytes, shared), *connection_options(limits, client_timeout)],
            maximum_concurrent_rpcs=limits.calls,
        )
        self._health = Health()
        add_InferenceServicer_to_server(InferenceService(service, client_timeout, keepalive), self._server)
        add_HealthServicer_to_server(self._health, self._server)
        _add_reflection(self._server)
        self.port = bind(self._server, address, "--grpc-port")
        self._health_task: SupervisedTask | None = None

    async def start(self) -> None:
        """Starts to accept calls."""
        await self._publish_health()
        await self._server.start()
        self._health_task = supervise("grpc health", self._watch_health)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, and waits up to ``grace`` seconds for running ones."""
        if self._health_task is not None:
            await self._health_task.stop()
        try:
            await self._health.enter_graceful_shutdown()
        finally:
            await self._server.stop(grace)

    async def _watch_health(self) -> None:
        while True:
            await self._publish_health()
            await asyncio.sleep(_HEALTH_PERIOD)

    async def _publish_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if self._service.serving() else status.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, state)


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's health service, which lacks ``List``."""

    async def List(  # noqa: N802
        self, _request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        """Returns the status of each service that has one."""
        checks = {name: health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE)}
        statuses = {name: await self.Check(check, context) for name, check in checks.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


def _add_reflection(server: grpc.aio.Server) -> None:
    """Reflection under both of its names, ``v1`` and ``v1alpha``. Their messages are the same but for the package, so
    one implementation answers both.
    """
    servicer = reflection.aio.ReflectionServicer(_SERVICES)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, _REFLECTION_V1):
        handlers = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    _describe_reflection_v1()


@cache
def _describe_reflection_v1() -> None:
    """Adds the description of ``grpc.reflection.v1``, of which grpcio-reflection has no module, to the descriptor pool:
    that of ``v1alpha`` under the other name. Once is enough for a process.
    """
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    renamed = text_format.MessageToString(file).replace("v1alpha", "v1")
    descriptor_pool.Default().Add(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))


def server_options(max_message_bytes: int, shared: bool) -> list[tuple[str, int]]:
    """Returns the options for message sizes, and for sharing the port with other processes."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.so_reuseport", int(shared)),  # without it a port that is in use is an error, not a second server
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def connection_options(limits: CallLimits, client_timeout: float) -> list[tuple[str, int]]:
    """Returns the options that bound connections. None ends a connection with calls whose client is alive."""
    return [
        ("grpc.max_concurrent_streams", limits.calls),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        (
            "grpc.server_handshake_timeout_ms",
            _milliseconds(client_timeout),
        ),  # until the client has said that it speaks HTTP/2
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle)),
        ("grpc.http2.max_pings_without_data", 0),  # a request may wait long before it has any
        ("grpc.keepalive_time_ms", _milliseconds(limits.silence)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.silence / 3)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(limits.silence / 3)),  # a minute otherwise, whatever the former is
    ]


def _milliseconds(seconds: float) -> int:
    return min(round(seconds * 1000), 2**31 - 1)  # an option is a signed number of 32 bits


def bind(server: grpc.aio.Server, address: str, flag: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds a server to the address that ``flag`` sets, over TLS with ``credentials``, and returns its port. Raises
    ``OSError``, whose text names the flag; gRPC does not say which of two causes there was.
    """
    refused = f"{flag}: {address} cannot be listened on: it is in use, or not of this machine; choose another port."
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(refused) from error
    if port == 0:
        raise OSError(refused)
    return port
