"""KEDA's external scaler over gRPC: the load of each model, and a stream that reports at once when a model has work.

In front of the gRPC server is a ``Relay`` with a port of its own, because the gRPC library accepts connections up to a
limit and cannot choose which of them to drop for a new one.
"""

import asyncio
import math
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import grpc
from quire.keda.externalscaler_pb2 import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)
from quire.keda.externalscaler_pb2_grpc import ExternalScalerServicer, add_ExternalScalerServicer_to_server
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.errors import QuireError, invalid
from quire_proto.tls import ServerTls

from quire_router.api.request_limits import ConnectionShares, peer_key
from quire_router.api.rest.http_server import listen
from quire_router.api.rpc.context import Context, status_code
from quire_router.api.rpc.grpc_server import CallLimits, bind, connection_options, server_options
from quire_router.autoscale.local_load import METRIC, Load
from quire_router.core.errors import model_not_scaled, router_busy, unknown_metric
from quire_router.core.retry import wait_at_most

MODEL, TARGET, ACTIVATION = "model", "target", "activation"
DEFAULT_TARGET = 16.0
"""Requests per replica, as in KEDA's examples; how many an engine runs well at once depends on the engine."""
_MAX_NUMBER = 1e9  # that a trigger's metadata may have
_PERIOD = 0.25  # seconds between two checks of the load by a stream
_CHUNK = 64 * 1024  # bytes that the relay copies at a time
_MAX_STREAMS = 256
_CONNECTIONS = 256
# The library closes a connection a little later than the relay, which counts them.
_LIMITS = CallLimits(requests=_MAX_STREAMS, auxiliary=0, connections=4 * _CONNECTIONS)
_MAX_MESSAGE = 64 * 1024
_HANDSHAKE_TIMEOUT = 10.0  # seconds for a client to begin
_STOP_GRACE = 0.5  # seconds for calls to end


@dataclass(frozen=True, slots=True)
class Trigger:
    """The metadata of a KEDA trigger: the ``model``, the ``target`` load of one replica, and the ``activation`` load
    above which the model is active.
    """

    model: str
    target: float
    activation: float


class Scaler(ExternalScalerServicer):
    """The gRPC service: the ``load`` of the models in ``labels``, which triggers may name by name or by label."""

    def __init__(self, load: Load, labels: Mapping[str, str]) -> None:
        self._load = load
        self._models = {label: model for model, label in labels.items()} | {model: model for model in labels}
        self._streams = 0
        self._closing = asyncio.Event()

    def end_streams(self) -> None:
        """Ends streams without an error: KEDA then reconnects 2 s later, and ever later after streams that broke."""
        self._closing.set()

    async def IsActive(self, request: ScaledObjectRef, context: Context) -> IsActiveResponse:  # noqa: N802
        """See ``externalscaler.proto``."""
        async with _abort_on_error(context):
            return IsActiveResponse(result=await self._is_active(self._trigger(request)))

    async def StreamIsActive(self, request: ScaledObjectRef, context: Context) -> AsyncIterator[IsActiveResponse]:  # noqa: N802
        """See ``externalscaler.proto``."""
        async with _abort_on_error(context):
            trigger = self._trigger(request)
            with self._stream_slot():
                async for active in self._changes(trigger):
                    yield IsActiveResponse(result=active)

    async def GetMetricSpec(self, request: ScaledObjectRef, context: Context) -> GetMetricSpecResponse:  # noqa: N802
        """See ``externalscaler.proto``."""
        async with _abort_on_error(context):
            target = self._trigger(request).target
            spec = MetricSpec(metricName=METRIC, targetSize=math.ceil(target), targetSizeFloat=target)
            return GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: GetMetricsRequest, context: Context) -> GetMetricsResponse:  # noqa: N802
        """See ``externalscaler.proto``."""
        async with _abort_on_error(context):
            trigger = self._trigger(request.scaledObjectRef)
            if request.metricName != METRIC:
                raise unknown_metric(request.metricName)
            load = (await self._load.read())[trigger.model]
            value = MetricValue(metricName=METRIC, metricValue=load, metricValueFloat=load)
            return GetMetricsResponse(metricValues=[value])

    async def _is_active(self, trigger: Trigger) -> bool:
        return (await self._load.read())[trigger.model] > trigger.activation

    async def _changes(self, trigger: Trigger) -> AsyncIterator[bool]:
        """Whether the model is active, once that is known, and whenever it has changed."""
        last: bool | None = None
        while not self._closing.is_set():
            with suppress(QuireError):  # an unknown load is not reported: the last value stays
                active = await self._is_active(trigger)
                if active is not last:
                    yield active
                last = active
            await wait_at_most(self._closing, _PERIOD)

    @contextmanager
    def _stream_slot(self) -> Iterator[None]:
        if self._streams >= _MAX_STREAMS:
            raise router_busy(f"{_MAX_STREAMS} streams are open")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def _trigger(self, request: ScaledObjectRef) -> Trigger:
        """Raises ``QuireError``."""
        metadata = request.scalerMetadata
        name = metadata.get(MODEL, "")
        if not name:
            raise invalid(MODEL, f"The trigger's metadata need {MODEL!r}, the name of a model.")
        model = self._models.get(name)
        if model is None:
            raise model_not_scaled(name[:128])
        target = _number(metadata, TARGET, DEFAULT_TARGET)
        if target == 0:
            raise invalid(TARGET, f"{TARGET!r} of the trigger's metadata must be greater than 0.")
        return Trigger(model, target, _number(metadata, ACTIVATION, 0.0))


class KedaServer:
    """Serves KEDA on ``host`` and ``port`` (0: any free one, see ``port``), in plain text without ``tls``. Raises
    ``OSError`` if the port is not available, and ``TlsError`` if the files of ``tls`` are invalid. No address can take
    all of its 256 connections (see ``ConnectionShares``): they are relayed to the gRPC library on this machine.
    """

    def __init__(
        self, scaler: Scaler, host: str, port: int, tls: ServerTls | None = None, *, peer_share: float = 0.5
    ) -> None:
        self._scaler = scaler
        limits = [*server_options(_MAX_MESSAGE, shared=False), *connection_options(_LIMITS, _HANDSHAKE_TIMEOUT)]
        self._server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=_LIMITS.calls)
        add_ExternalScalerServicer_to_server(scaler, self._server)
        credentials = None if tls is None else ReloadingServerCredentials(tls).credentials()
        inner = bind(self._server, "127.0.0.1:0", "--keda-port", credentials)
        self._relay = Relay(listen(host, port, "--keda-port"), inner, ConnectionShares(_CONNECTIONS, peer_share))
        self.port = self._relay.port

    async def start(self) -> None:
        """Begins to accept calls."""
        await self._server.start()
        await self._relay.start()

    async def stop(self) -> None:
        """Ends every call, within a bounded time."""
        self._scaler.end_streams()
        await self._server.stop(_STOP_GRACE)
        await self._relay.stop()


@asynccontextmanager
async def _abort_on_error(context: Context) -> AsyncIterator[None]:
    """Aborts the call with the ``QuireError`` that is raised within."""
    try:
        yield
    except QuireError as error:
        await context.abort(status_code(error), error.message)


def _number(metadata: Mapping[str, str], name: str, default: float) -> float:
    """A number of the metadata, at least 0. Raises ``QuireError``."""
    text = metadata.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_NUMBER:
        raise invalid(name, f"{name!r} of the trigger's metadata must be a number from 0 to {_MAX_NUMBER:g}.")
    return number


class Relay:
    """Copies bytes between connections on ``listener`` and ``port`` of this machine. ``shares`` chooses which
    connection is closed for a new one: any may be, first the one whose client has sent nothing for the longest time.
    """

    def __init__(self, listener: socket.socket, port: int, shares: ConnectionShares) -> None:
        self._listener = listener
        self._target = port
        self._shares = shares
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None
        self.port: int = listener.getsockname()[1]

    async def start(self) -> None:
        """Begins to accept connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=_CHUNK)

    async def stop(self) -> None:
        """Closes every connection."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for client in list(self._clients):
            client.evict()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        client = _Client(writer)
        address = writer.get_extra_info("peername")
        if not self._shares.add(client, peer_key(address[0] if address else "")):
            return client.evict()
        self._clients.add(client)
        self._shares.mark_idle(client)
        try:
            with suppress(OSError):
                await self._relay(client, reader, writer)
        finally:
            self._clients.discard(client)
            self._shares.remove(client)
            client.evict()

    async def _relay(self, client: "_Client", reader: StreamReader, writer: StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target, limit=_CHUNK)
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._copy(reader, requests, client))
                directions.create_task(self._copy(answers, writer))
        finally:
            requests.transport.abort()

    async def _copy(self, source: StreamReader, sink: StreamWriter, client: "_Client | None" = None) -> None:
        """Copies until ``source`` ends, and closes ``sink``. Data from a ``client`` counts as its activity."""
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                if client is not None:
                    self._shares.mark_idle(client)
                sink.write(data)
                await sink.drain()
        sink.close()


class _Client:
    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    def evict(self) -> None:
        """Closes the connection."""
        self._writer.transport.abort()
