"""A gateway as Envoy is one, for tests of the endpoint picker: ``ExtProcStream`` speaks ext_proc for one request, as
Envoy does in either body mode, and ``Gateway`` is a proxy that asks the picker and then sends the request to the
endpoint itself. And ``ForwardedEngine``, a server that takes what clients send.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import ClientSession, web
from quire.envoy.base_pb2 import HeaderMap, HeaderValue, Metadata
from quire.envoy.external_processor_pb2 import (
    HeaderMutation,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from quire.envoy.external_processor_pb2_grpc import ExternalProcessorStub
from quire.envoy.processing_mode_pb2 import ProcessingMode
from quire_router.picker.exchange import DESTINATION, DESTINATION_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE

from tests.support.http_engines import Event, VllmEngine, demo_tokenizer

DUPLEX, BUFFERED, STREAMED, NONE = (
    ProcessingMode.FULL_DUPLEX_STREAMED,
    ProcessingMode.BUFFERED,
    ProcessingMode.STREAMED,
    ProcessingMode.NONE,
)
Mode = ProcessingMode.BodySendMode.ValueType
CHAT = "/v1/chat/completions"


def header_map(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> HeaderMap:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])


def subset_metadata(subset: Sequence[str] | str | None) -> Metadata | None:
    """What Envoy says of the endpoints that may be picked, as a list or as one text."""
    if subset is None:
        return None
    metadata = Metadata()
    value = subset if isinstance(subset, str) else list(subset)
    metadata.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: value})
    return metadata


def request_headers(
    path: str = CHAT, *, end: bool = False, subset: Sequence[str] | str | None = None, **headers: str
) -> ProcessingRequest:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {":method": "GET" if end else "POST", ":path": path, ":scheme": "http", ":authority": "llm.test", **names}
    return ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(given), end_of_stream=end),
        metadata_context=subset_metadata(subset),
    )


def request_body(data: bytes, *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=end))


def response_headers(
    status: int = 200, content_type: str = "application/json", *, end: bool = False, served: str = ""
) -> ProcessingRequest:
    metadata = Metadata()
    if served:
        metadata.filter_metadata[DESTINATION_NAMESPACE].update({SERVED: served})
    headers = header_map({":status": str(status), "content-type": content_type})
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=headers, end_of_stream=end), metadata_context=metadata
    )


def response_body(data: bytes, *, end: bool = False) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=end))


def trailers() -> HttpTrailers:
    return HttpTrailers(trailers=header_map({"x-checksum": "1"}))


def mutated(mutation: HeaderMutation) -> dict[str, str]:
    """The headers that a mutation sets."""
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def destination(response: ProcessingResponse) -> list[str]:
    """The endpoints of an answer, which says the same in its header and in its metadata."""
    kind = response.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), response
    common = getattr(response, str(kind)).response
    assert common.clear_route_cache
    metadata = response.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value.fields[DESTINATION].string_value
    assert mutated(common.header_mutation)[DESTINATION] == metadata
    return metadata.split(",")


class ExtProcStream:
    """One request of a gateway at the picker behind ``channel``."""

    def __init__(self, channel: grpc.aio.Channel, mode: Mode = DUPLEX, response_mode: Mode | None = None) -> None:
        self._call = ExternalProcessorStub(channel).Process()  # type: ignore[call-arg]
        self._config: ProtocolConfiguration | None = ProtocolConfiguration(
            request_body_mode=mode, response_body_mode=mode if response_mode is None else response_mode
        )

    async def send(self, message: ProcessingRequest) -> None:
        if self._config is not None:
            message.protocol_config.CopyFrom(self._config)
            self._config = None
        await self._call.write(message)

    async def read(self) -> ProcessingResponse:
        """The next answer; fails if there is none."""
        message = await self._call.read()
        assert message is not grpc.aio.EOF, "the picker has ended the stream"
        assert isinstance(message, ProcessingResponse)
        return message

    async def read_body(self) -> bytes:
        """All pieces of the request's body, as they go on to the server."""
        body = b""
        while True:
            piece = (await self.read()).request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= 64 * 1024
            body += piece.body
            if piece.end_of_stream:
                return body

    async def ask(self, message: ProcessingRequest) -> ProcessingResponse:
        await self.send(message)
        return await self.read()

    async def ended(self) -> grpc.StatusCode:
        """How the picker has ended the stream."""
        try:
            assert await self._call.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code()
        code: grpc.StatusCode = await self._call.code()
        return code

    async def half_close(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@dataclass
class Answer:
    """What a gateway's client gets. ``endpoint`` is empty where the picker answered by itself."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""

    def json(self) -> Any:
        return json.loads(self.body)


class Gateway:
    """A proxy as Envoy with its ext_proc filter: shows requests and responses to the picker in pieces of ``piece``
    bytes.
    """

    def __init__(self, channel: grpc.aio.Channel, mode: Mode = DUPLEX, *, piece: int = 16_384) -> None:
        self.channel = channel
        self.mode = mode
        self.piece = piece

    async def post(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = CHAT,
        *,
        subset: Sequence[str] | str | None = None,
        **headers: str,
    ) -> Answer:
        """Sends a request the way of a gateway."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        stream = ExtProcStream(self.channel, self.mode)
        head = {"content_type": "application/json", "x_gateway_destination_endpoint": "203.0.113.1:1", **headers}
        await stream.send(request_headers(path, subset=subset, **head))
        if self.mode == BUFFERED:
            answer = await stream.read()
            if answer.HasField("immediate_response"):
                return immediate(answer.immediate_response)
            assert answer == ProcessingResponse(request_headers=answer.request_headers)
            answer = await stream.ask(request_body(data))
        else:
            starts = range(0, len(data), self.piece)
            for start in starts:
                await stream.send(request_body(data[start : start + self.piece], end=start == starts[-1]))
            answer = await stream.read()
        if answer.HasField("immediate_response"):
            assert await stream.ended() is grpc.StatusCode.OK
            return immediate(answer.immediate_response)
        endpoints = destination(answer)
        if self.mode != BUFFERED:
            assert await stream.read_body() == data, "the body has changed on its way"
        kind = str(answer.WhichOneof("response"))
        mutation = getattr(answer, kind).response.header_mutation
        given = {name.replace("_", "-"): value for name, value in head.items()}
        kept = {name: value for name, value in given.items() if name not in mutation.remove_headers}
        return await self._proxy(stream, endpoints, path, data, {**kept, **mutated(mutation)})

    async def _proxy(
        self, stream: ExtProcStream, endpoints: Sequence[str], path: str, data: bytes, headers: Mapping[str, str]
    ) -> Answer:
        endpoint = endpoints[0]
        url = f"http://{endpoint}{path}"
        async with ClientSession() as http, http.post(url, data=data, headers=headers) as response:
            content_type = response.headers["content-type"]
            answer = await stream.ask(response_headers(response.status, content_type, served=endpoint))
            added = mutated(answer.response_headers.response.header_mutation)
            body = b""
            async for piece in response.content.iter_any():
                body += await self._pass(stream, piece, end=False)
            body += await self._pass(stream, b"", end=True)
            given = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, body, {**given, **added}, endpoint)

    async def _pass(self, stream: ExtProcStream, piece: bytes, *, end: bool) -> bytes:
        answer = await stream.ask(response_body(piece, end=end))
        if self.mode == BUFFERED:
            assert not answer.response_body.response.HasField("body_mutation")
            return piece
        streamed = answer.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (piece, end)
        return bytes(streamed.body)


def immediate(response: ImmediateResponse) -> Answer:
    """The answer that the picker has written."""
    return Answer(response.status.code, response.body, mutated(response.headers))


@asynccontextmanager
async def channel_to(
    port: int, certificate: bytes | None = None, options: Sequence[tuple[str, int | str]] = ()
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection to a picker, in plain text, or to one whose certificate is known; one of its own where ``options``
    are.
    """
    address = f"127.0.0.1:{port}"
    if certificate is None:
        connection = grpc.aio.insecure_channel(address, options)
    else:
        options = [*options, ("grpc.ssl_target_name_override", "quire-router endpoint picker")]
        connection = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options)
    async with connection:
        yield connection


class ForwardedEngine(VllmEngine):
    """As vLLM, to whose own API clients come: ``/v1/chat/completions``, in a stream or as one answer. ``bodies`` are
    the bytes that came. Until it is ``released`` an answer stops after ``hold_after`` tokens.
    """

    path = CHAT

    def __init__(self, model: str = "m", *, seconds_per_token: float = 0.0) -> None:
        super().__init__(model, seconds_per_token=seconds_per_token)
        self.bodies: list[bytes] = []

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """How ``--engine`` names it."""
        return f"vllm+{self.url}"

    def tokens_of(self, body: Event) -> list[int]:
        return demo_tokenizer().encode_plain(json.dumps(body["messages"]))

    def max_tokens_of(self, body: Event) -> int:
        return int(body.get("max_tokens", 4))

    def refuse(self, body: Event) -> Event | None:
        return None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        body = json.loads(self.bodies[-1])
        if body.get("stream") or self.refusal is not None:
            return await super()._generate(request)
        self.requests.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.changed.set()
        if self.hold_after is not None:
            await self.released.wait()
        count = self.max_tokens_of(body)
        usage = {"prompt_tokens": 11, "completion_tokens": count, "total_tokens": 11 + count}
        message = {"role": "assistant", "content": " word" * count}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    def event(self, body: Event, written: list[int], reason: str | None, matched: int | None) -> Event:
        choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": reason}
        return {"object": "chat.completion.chunk", "choices": [choice]}
