"""``PickerServer``: the gRPC server that gateways ask, ``envoy.service.ext_proc.v3.ExternalProcessor``, over TLS, with
the health that the endpoint picker protocol wants.

Each request of HTTP is a stream: an ``Exchange`` says what its messages mean, an ``EndpointPicker`` where it goes. A
stream that ends early leaves the request to the gateway, or, while it waits, gives it up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from quire.envoy.external_processor_pb2 import DESCRIPTOR, ProcessingRequest, ProcessingResponse
from quire.envoy.external_processor_pb2_grpc import ExternalProcessorServicer
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.errors import QuireError, internal
from quire_proto.tls import ServerTls

from quire_router.api.auth import Identity
from quire_router.api.forwarded_requests import api_path
from quire_router.api.request_limits import ReservedBody
from quire_router.api.rest.content_coding import decode_whole
from quire_router.api.rest.http import JSON_HEADERS, HttpError, body_too_slow, to_json
from quire_router.api.rest.model_infos import model_object
from quire_router.api.rest.rest_app import format_of_errors
from quire_router.api.rpc.context import Context, client_may_leave
from quire_router.api.rpc.grpc_server import CallLimits, bind, connection_options, server_options
from quire_router.api.rpc.interceptors import CallLimitInterceptor, MessageTimeoutInterceptor
from quire_router.api.service import ApiService, counting_rejections, new_request_id
from quire_router.picker.exchange import Exchange, HttpRequest, ProtocolError, Reply, read_message
from quire_router.picker.picker import EndpointPicker, GatewayLeftError, Pick

log = logging.getLogger(__name__)

SERVICE = DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS, READINESS = "liveness", "readiness"
"""What the protocol calls its other checks."""

_MESSAGE_ROOM = 1 << 20  # bytes of a message beside a body that comes as a whole
_AUXILIARY_CALLS = 64
_CERTIFICATE_DAYS = 3650


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """``streams`` requests at once over ``connections``. A body may have ``max_body_bytes``, and its next piece takes
    at most ``client_timeout`` seconds; the whole of a request ``request_timeout``.
    """

    streams: int
    max_body_bytes: int
    client_timeout: float
    request_timeout: float
    connections: int = 256


class PickerServer:
    """Listens on ``address`` (port 0: any free one, which ``port`` returns), in plain text without ``credentials``;
    with ``shared`` other processes may listen on it too. Raises ``OSError`` when it cannot listen.
    """

    def __init__(
        self,
        service: ApiService,
        picker: EndpointPicker,
        address: str,
        limits: PickerLimits,
        credentials: grpc.ServerCredentials | None = None,
        *,
        shared: bool = False,
    ) -> None:
        calls = CallLimits(requests=limits.streams, auxiliary=_AUXILIARY_CALLS, connections=limits.connections)
        self._server = grpc.aio.server(
            interceptors=[
                CallLimitInterceptor((HEALTH,), _AUXILIARY_CALLS),
                MessageTimeoutInterceptor(limits.client_timeout),
            ],
            options=[
                *server_options(limits.max_body_bytes + _MESSAGE_ROOM, shared),
                *connection_options(calls, limits.client_timeout),
            ],
            maximum_concurrent_rpcs=calls.calls,
        )
        self._health = health_aio.HealthServicer()
        handler = grpc.stream_stream_rpc_method_handler(
            Processor(service, picker, limits).Process, read_message, ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        add_HealthServicer_to_server(self._health, self._server)
        self.port = bind(self._server, address, "--picker-port", credentials)

    async def start(self) -> None:
        """Starts to accept streams. It is ready from now on, also while no server is: requests wait for one."""
        for name in ("", LIVENESS, READINESS, SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def leave(self) -> None:
        """Has gateways ask other routers; streams are still taken."""
        for name in ("", READINESS, SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Refuses new streams, and waits up to ``grace`` seconds for the others, whose responses pass through them."""
        await self._server.stop(grace)


def picker_credentials(tls: ServerTls | None) -> grpc.ServerCredentials:
    """TLS with these files, or with a certificate that is made for this process: gateways do not verify it, as none
    says by which authority. Raises ``TlsError`` for files that cannot be used.
    """
    if tls is not None:
        return ReloadingServerCredentials(tls).credentials()
    return grpc.ssl_server_credentials([self_signed_certificate()])


def self_signed_certificate() -> tuple[bytes, bytes]:
    """Makes a key and its certificate, as PEM."""
    from cryptography import x509  # takes 10 MiB
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire-router endpoint picker")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_CERTIFICATE_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


class Processor(ExternalProcessorServicer):
    """The service. A stream asks nobody for a key: the request that it is about has one, if any is configured."""

    def __init__(self, service: ApiService, picker: EndpointPicker, limits: PickerLimits) -> None:
        self._service = service
        self._picker = picker
        self._limits = limits

    async def Process(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Handles one request of HTTP."""
        stream = _Stream(context)
        with client_may_leave():
            try:
                async with asyncio.timeout(self._limits.request_timeout):
                    await self._process(stream)
            except GatewayLeftError:
                return
            except TimeoutError:
                message = f"The request has taken more than {self._limits.request_timeout:g} seconds."
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            finally:
                stream.close()

    async def _process(self, stream: "_Stream") -> None:
        """Raises ``ProtocolError``, and ``GatewayLeftError`` where there is nobody to answer."""
        exchange, request_id = Exchange(self._limits.max_body_bytes), new_request_id()
        try:
            with ExitStack() as resources:
                reply = exchange.receive(await self._in_time(stream.read))
                name = f"ext_proc {api_path(exchange.path) or 'other'}"
                headers = dict(exchange.headers)
                resources.enter_context(self._service.request_scope(name, request_id, headers))
                with counting_rejections():
                    caller = self._picker.authenticate(exchange.values)
                path = self._picker.paths.check(exchange.method, exchange.path)
                body = resources.enter_context(self._service.bodies.reserve_incoming(caller.tenant, 0))
                exchange.reserve = body.reserve
                request = await self._receive_request(stream, exchange, reply)
                if request.body is None and not path:
                    await self._forward_bodiless(stream, exchange, request, caller)
                    return
                coding, limit = request.values("content-encoding"), self._limits.max_body_bytes
                if coding and request.body is not None:  # the server gets it as it came
                    request = replace(request, body=await decode_whole(request.body, coding, limit, body.reserve))
                await self._forward(stream, exchange, request, _Forwarding(path, request_id, caller, body))
        except (HttpError, QuireError) as error:
            await self._refuse(stream, exchange, error, request_id)
        except (ProtocolError, GatewayLeftError, grpc.aio.InternalError):
            raise
        except Exception:
            if exchange.is_answered:
                raise
            log.exception("request %s failed", request_id)
            await self._refuse(stream, exchange, internal(), request_id)

    async def _receive_request(self, stream: "_Stream", exchange: Exchange, reply: Reply) -> HttpRequest:
        """Returns the request when it is complete. Raises ``HttpError`` if it does not come in time."""
        while reply.request is None:
            await stream.write(reply.responses)
            reply = exchange.receive(await self._in_time(stream.read))
        return reply.request

    async def _in_time(self, read: Callable[[], Awaitable[ProcessingRequest]]) -> ProcessingRequest:
        seconds = self._limits.client_timeout
        try:
            async with asyncio.timeout(seconds):
                return await read()
        except TimeoutError:
            raise body_too_slow(seconds) from None

    async def _forward_bodiless(
        self, stream: "_Stream", exchange: Exchange, request: HttpRequest, caller: Identity
    ) -> None:
        """Sends a request on that has no body. Raises ``QuireError``."""
        endpoint = await self._picker.pick_any(request, caller)
        if endpoint is None:  # each server would show models of others
            listed = [model_object(card) for card in self._service.models(caller)]
            body = to_json({"object": "list", "data": listed})
            await stream.write([exchange.refuse(200, body, JSON_HEADERS)])
            return
        await stream.write(exchange.send_to([endpoint], removed=self._picker.removed_headers))
        await self._pass_response(stream, exchange, None)

    async def _forward(
        self, stream: "_Stream", exchange: Exchange, request: HttpRequest, forwarding: "_Forwarding"
    ) -> None:
        request_id, body = forwarding.request_id, forwarding.body
        body.hold_until_queued(request_id)
        stream.read_ahead(on_end=lambda: self._picker.abandon(request_id))
        picked = self._picker.pick(
            request, forwarding.path, request_id, forwarding.caller, has_left=lambda: stream.has_ended
        )
        async with picked as pick:
            exchange.response_headers = pick.response_headers
            headers, removed = pick.request_headers, self._picker.removed_headers
            await stream.write(exchange.send_to(pick.endpoints, headers, removed))
            body.release()
            await self._pass_response(stream, exchange, pick)

    async def _pass_response(self, stream: "_Stream", exchange: Exchange, pick: Pick | None) -> None:
        """Watches the response until its end, or until the gateway ends the stream."""
        has_begun = has_ended = False
        while not has_ended:
            try:
                message = await stream.read()
            except GatewayLeftError:
                return
            reply = exchange.receive(message)
            has_ended = reply.ended
            if pick is not None:
                if exchange.status and not has_begun:
                    has_begun = True
                    is_stream, served = exchange.is_event_stream, exchange.served
                    pick.on_response(exchange.status, is_event_stream=is_stream, served=served)
                if reply.output:
                    pick.on_output(reply.output)
                if has_ended:
                    pick.on_end()
            await stream.write(reply.responses)

    async def _refuse(
        self, stream: "_Stream", exchange: Exchange, error: HttpError | QuireError, request_id: str
    ) -> None:
        """Answers the request with the error that the REST API would answer with."""
        response = format_of_errors(api_path(exchange.path)).error_response(error, request_id)
        headers = [*response[2], (b"x-request-id", request_id.encode())]
        await stream.write([exchange.refuse(int(response[0]), response[1], headers)])


@dataclass(frozen=True, slots=True)
class _Forwarding:
    """What is known of a request before it is read."""

    path: str
    request_id: str
    caller: Identity
    body: ReservedBody


class _Stream:
    """One stream of a gateway. ``has_ended`` is whether it will send no more."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._next: asyncio.Future[ProcessingRequest | None] | None = None
        self.has_ended = False

    async def read(self) -> ProcessingRequest:
        """Returns the next message. Raises ``GatewayLeftError`` if there is none."""
        reading, self._next = self._next, None
        message = await (self._read() if reading is None else reading)
        if message is None:
            self.has_ended = True
            raise GatewayLeftError
        return message

    def read_ahead(self, on_end: Callable[[], None]) -> None:
        """Begins to read the next message, and calls ``on_end`` if there is none."""

        def ended(reading: asyncio.Future[ProcessingRequest | None]) -> None:
            if not reading.cancelled() and (reading.exception() or reading.result() is None):
                self.has_ended = True
                on_end()

        self._next = asyncio.ensure_future(self._read())
        self._next.add_done_callback(ended)

    def close(self) -> None:
        """Reads no more."""
        if self._next is not None:
            self._next.cancel()

    async def _read(self) -> ProcessingRequest | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, responses: Sequence[ProcessingResponse]) -> None:
        """Sends messages."""
        for response in responses:
            await self._context.write(response)
