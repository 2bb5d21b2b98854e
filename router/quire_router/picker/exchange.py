"""``Exchange``: one request of HTTP as a gateway shows it to an external processor, and the answers that it gets. The
gateway sends headers, body and trailers, and later those of the response; the endpoint that was picked goes into the
answer to the headers, or to the body. Does no I/O.

The messages are Envoy's (``envoy.service.ext_proc.v3``), and what endpoints, subsets and metadata look like in them is
the endpoint picker protocol of the Gateway API Inference Extension (its proposal 004, version 1.0.0).

Bodies come in one of two modes. FULL_DUPLEX_STREAMED, which gateways use by default: pieces come as they arrive, and go
back when it is known where to; headers are answered after the body has come. BUFFERED: the body comes as a whole once
the headers were answered, and is not sent back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from quire.envoy.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from quire.envoy.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from quire.envoy.http_status_pb2 import HttpStatus, StatusCode
from quire.envoy.processing_mode_pb2 import ProcessingMode

from quire_router.api.rest.http import body_too_large, head_too_large, too_many_headers

DESTINATION: Final = "x-gateway-destination-endpoint"
"""The header, and the key of the metadata, that says where the request goes: ``IP:PORT``, or several by commas."""
DESTINATION_NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"
"""The key of the metadata, in the same namespace, in which a gateway says which of them served the request."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
"""Where a gateway says which endpoints may be picked."""

MAX_CHUNK_BYTES = 62_000
"""Bytes of a body that are sent back at once: Envoy recommends at most 64 KiB."""
MAX_HEAD_BYTES = 64 * 1024  # bytes of headers; Envoy takes 60 KiB of a client's
MAX_HEADERS = 512
MAX_SUBSET = 10_000  # endpoints
MAX_MESSAGE_BYTES = 256 * 1024  # of a message beside the body in it
_MAX_FIELDS = 16  # of a message: more than it has
_LENGTH_DELIMITED = 2  # the wire type of texts and messages
_BODY_TAGS = tuple(
    ProcessingRequest.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED
    for name in ("request_body", "response_body")
)

Headers = Sequence[tuple[str, str]]


class ProtocolError(ValueError):
    """The gateway sent what does not belong here. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that has arrived as a whole, with all of its headers in small letters, pseudo-headers included.
    ``body`` is None if it has none. ``subset`` are the endpoints that may be picked, ``IP:PORT`` or ``IP`` for each
    port; None for all.
    """

    headers: Headers
    body: bytes | None = None
    subset: frozenset[str] | None = None

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    @property
    def path(self) -> str:
        """The path without a query."""
        return next(iter(self.values(":path")), "").partition("?")[0]


@dataclass(slots=True)
class Reply:
    """What follows from one message of the gateway: the ``responses`` to it; the ``request``, once, where it is
    complete and waits for ``Exchange.send_to`` or ``Exchange.refuse``; and of the response to it the bytes that came,
    and whether these were the last.
    """

    responses: list[ProcessingResponse] = field(default_factory=list)
    request: HttpRequest | None = None
    output: bytes = b""
    ended: bool = False


class Exchange:
    """Each message of the gateway is given to ``receive``. A body may have ``max_body_bytes``; ``reserve`` is called
    with its size before it grows, and may raise.
    """

    def __init__(self, max_body_bytes: int, reserve: Callable[[int], None] = lambda _size: None) -> None:
        self.headers: Headers = ()
        self.status = 0
        """Of the response; 0 until its headers have come."""
        self.is_event_stream = False
        """Whether the response is a stream of server-sent events."""
        self.served = ""
        """The endpoint that served the request, as the gateway says it; empty if it does not."""
        self.response_headers: Headers = ()
        """What is added to the headers of the response."""
        self.reserve = reserve
        self._max_body_bytes = max_body_bytes
        self._mode = self._response_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        self._body = bytearray()
        self._subset: frozenset[str] | None = None
        self._has_body = self._has_trailers = False
        self._is_complete = self._is_answered = False

    @property
    def path(self) -> str:
        """The path of the request; empty before it came."""
        return next(iter(self.values(":path")), "")

    @property
    def method(self) -> str:
        """The method of the request; empty before it came."""
        return next(iter(self.values(":method")), "")

    @property
    def is_answered(self) -> bool:
        """Whether the gateway knows where the request goes, or that it is refused."""
        return self._is_answered

    def values(self, name: str) -> list[str]:
        """Every value of a header of the request."""
        return [value for key, value in self.headers if key == name]

    def receive(self, message: ProcessingRequest) -> Reply:
        """Returns what follows from a message. Raises ``ProtocolError`` for one that may not come now, ``HttpError``
        for a request that is too large, and what ``reserve`` raises.
        """
        if message.observability_mode:
            raise ProtocolError("An endpoint picker cannot only observe: observability_mode must be off.")
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        subset = read_subset(message.metadata_context)
        if subset is not None and not self._is_complete:
            self._subset = subset
        match message.WhichOneof("request"):
            case "request_headers":
                return self._on_headers(message.request_headers)
            case "request_body":
                return self._on_body(message.request_body)
            case "request_trailers":
                return self._on_trailers(message.request_trailers)
            case "response_headers":
                return self._on_response_headers(message.response_headers, message.metadata_context)
            case "response_body":
                return self._on_response_body(message.response_body)
            case "response_trailers":
                trailers = ProcessingResponse(response_trailers=TrailersResponse())
                return Reply([trailers], ended=True)
        raise ProtocolError("The message has no headers, body or trailers.")

    # The request

    def _on_headers(self, message: HttpHeaders) -> Reply:
        if self.headers:
            raise ProtocolError("The headers of a request came twice.")
        self.headers = _read_headers(message.headers)
        if message.end_of_stream:
            return self._completed()
        self._has_body = True
        if self._mode == ProcessingMode.BUFFERED:  # the body comes when the headers are answered
            return Reply([_headers(CommonResponse())])
        if self._mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            names = ProcessingMode.BodySendMode
            name = names.Name(self._mode) if self._mode in names.values() else str(self._mode)  # of a newer Envoy
            raise ProtocolError(f"request_body_mode is {name} and must be FULL_DUPLEX_STREAMED or BUFFERED.")
        return Reply()

    def _on_body(self, message: HttpBody) -> Reply:
        if not self.headers or self._is_complete:
            raise ProtocolError("A body came where none was expected.")
        size = len(self._body) + len(message.body)
        if size > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        self.reserve(size)
        self._body += message.body
        is_whole = message.end_of_stream or self._mode == ProcessingMode.BUFFERED
        return self._completed() if is_whole else Reply()

    def _on_trailers(self, _: HttpTrailers) -> Reply:
        if self._is_answered:  # of a body that came as a whole
            return Reply([ProcessingResponse(request_trailers=TrailersResponse())])
        if not self.headers or self._is_complete:
            raise ProtocolError("Trailers came where none were expected.")
        self._has_trailers = True
        return self._completed()

    def _completed(self) -> Reply:
        self._is_complete = True
        body = bytes(self._body) if self._has_body else None
        return Reply(request=HttpRequest(self.headers, body, self._subset))

    # Its answer

    def send_to(
        self, endpoints: Sequence[str], headers: Mapping[str, str] | None = None, removed: Sequence[str] = ()
    ) -> list[ProcessingResponse]:
        """Returns the answer that sends the request to the first of the ``endpoints``, or to the next ones if that
        fails, with ``headers`` set, and others ``removed``. The body stays as it is.
        """
        self._is_answered = True
        destination, body = ",".join(endpoints), bytes(self._body)
        self._body = bytearray()
        values = {DESTINATION: destination, **(headers or {})}
        buffered = self._has_body and self._mode == ProcessingMode.BUFFERED
        if body and not buffered:
            values["content-length"] = str(len(body))  # Envoy took it away, as it does not know the body's end
        common = CommonResponse(header_mutation=_set_headers(values, removed), clear_route_cache=True)
        first = ProcessingResponse(request_body=BodyResponse(response=common)) if buffered else _headers(common)
        first.dynamic_metadata.CopyFrom(_destination_metadata(destination))
        responses = [first]
        if self._has_body and not buffered:
            if body or not self._has_trailers:
                responses += [
                    ProcessingResponse(request_body=BodyResponse(response=piece))
                    for piece in _pieces(body, ends=not self._has_trailers)
                ]
            if self._has_trailers:
                responses.append(ProcessingResponse(request_trailers=TrailersResponse()))
        return responses

    def refuse(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> ProcessingResponse:
        """Returns the answer that ends the request with this response, without a server."""
        self._is_answered = True
        values = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        return ProcessingResponse(
            immediate_response=ImmediateResponse(
                status=HttpStatus(code=StatusCode.ValueType(status)),
                headers=_set_headers(values),
                body=body,
                details="quire_endpoint_picker",
            )
        )

    # The response to it

    def _on_response_headers(self, message: HttpHeaders, metadata: Metadata) -> Reply:
        self._check_answered()
        for name, value in _read_headers(message.headers):
            if name in (":status", "status") and value.isascii() and value.isdigit():
                self.status = int(value)
            elif name == "content-type":
                self.is_event_stream = value.partition(";")[0].strip().lower() == "text/event-stream"
        self.served = _text(metadata, DESTINATION_NAMESPACE, SERVED)
        common = CommonResponse()
        if self.response_headers:
            common.header_mutation.CopyFrom(_set_headers(dict(self.response_headers)))
        response = ProcessingResponse(response_headers=HeadersResponse(response=common))
        return Reply([response], ended=message.end_of_stream)

    def _on_response_body(self, message: HttpBody) -> Reply:
        self._check_answered()
        pieces: Iterator[CommonResponse] = iter([CommonResponse()])
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            pieces = _pieces(message.body, ends=message.end_of_stream)
        responses = [ProcessingResponse(response_body=BodyResponse(response=piece)) for piece in pieces]
        return Reply(responses, output=message.body, ended=message.end_of_stream)

    def _check_answered(self) -> None:
        if not self._is_answered:
            raise ProtocolError("A response came before the request was answered.")


def read_message(data: bytes) -> ProcessingRequest:
    """Returns a message of a gateway. Raises ``ProtocolError`` for what is none, and, before it is parsed, for one that
    is large beside a body.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        _check_is_body(memoryview(data))
    try:
        return ProcessingRequest.FromString(data)
    except DecodeError:
        raise ProtocolError("The message is not a ProcessingRequest.") from None


def _check_is_body(data: memoryview) -> None:
    """Raises ``ProtocolError`` unless all but ``MAX_MESSAGE_BYTES`` of a message are one of its bodies. Reads no more
    of it than the tags and lengths of a few fields.
    """
    position, beside = 0, len(data)
    for _ in range(_MAX_FIELDS):
        tag, position = _read_varint(data, position)
        size, position = _read_varint(data, position)
        if tag in _BODY_TAGS:
            beside -= size
        position += size if tag & 7 == _LENGTH_DELIMITED else 0
        if position >= len(data):
            break
    if position != len(data) or beside > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"A message has at most {MAX_MESSAGE_BYTES} bytes besides a body.")


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position behind it."""
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(data):
            break
        byte, position = data[position], position + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, position


def read_subset(metadata: Metadata) -> frozenset[str] | None:
    """The endpoints that a gateway lets pick from; None for all of them. It is a list of texts, or one text, and each
    may be several by commas: filters of Envoy that copy a header write it so. Raises ``ProtocolError`` for too many.
    """
    fields = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if fields is None or SUBSET not in fields.fields:
        return None
    value = fields.fields[SUBSET]
    texts = [value.string_value, *(each.string_value for each in value.list_value.values)]
    if sum(text.count(",") + 1 for text in texts) > MAX_SUBSET:
        raise ProtocolError(f"A subset has at most {MAX_SUBSET} endpoints.")
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def is_in_subset(endpoint: str, subset: frozenset[str]) -> bool:
    """Whether an ``IP:PORT`` is one of a subset, or its IP is."""
    host = endpoint.rpartition(":")[0]
    return endpoint in subset or host in subset or host.strip("[]") in subset


def _text(metadata: Metadata, namespace: str, key: str) -> str:
    fields = metadata.filter_metadata.get(namespace)
    return "" if fields is None or key not in fields.fields else fields.fields[key].string_value


def _read_headers(headers: HeaderMap) -> Headers:
    """Raises ``HttpError`` if there are too many, before any is read."""
    entries = headers.headers
    if len(entries) > MAX_HEADERS:
        raise too_many_headers(MAX_HEADERS)
    if sum(len(each.key) + len(each.raw_value or each.value) + 4 for each in entries) > MAX_HEAD_BYTES:
        raise head_too_large(MAX_HEAD_BYTES)
    return tuple((each.key.lower(), each.raw_value.decode("latin-1") or each.value) for each in entries)


def _headers(common: CommonResponse) -> ProcessingResponse:
    return ProcessingResponse(request_headers=HeadersResponse(response=common))


def _set_headers(values: Mapping[str, str], removed: Sequence[str] = ()) -> HeaderMutation:
    """Headers that replace those of the same name: a client may not say itself where its request goes."""
    replace = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode("latin-1")), append_action=replace)
        for name, value in values.items()
    ]
    return HeaderMutation(set_headers=options, remove_headers=removed)


def _destination_metadata(destination: str) -> Struct:
    metadata = Struct()
    metadata.update({DESTINATION_NAMESPACE: {DESTINATION: destination}})
    return metadata


def _pieces(body: bytes, *, ends: bool) -> Iterator[CommonResponse]:
    """A body in pieces, at least one; the last one ends it if it ``ends``."""
    starts = range(0, max(1, len(body)), MAX_CHUNK_BYTES)
    for start in starts:
        piece = StreamedBodyResponse(
            body=body[start : start + MAX_CHUNK_BYTES], end_of_stream=ends and start == starts[-1]
        )
        yield CommonResponse(body_mutation=BodyMutation(streamed_response=piece))
