"""One HTTP request and its response, as the routes see them: ``HttpExchange``, the body that is read, the response that
is written, and the errors that only HTTP knows.

``DirectWriter`` is the response's direct way to its connection: chunks that need no waiting are written without a
message to the server and without a coroutine.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire_router.api.auth import ANONYMOUS, Identity
from quire_router.api.request_limits import ReservedBody, WriteTimeout

if TYPE_CHECKING:
    from quire_router.api.rest.answer_format import AnswerFormat, EventEncoder

EXTENSION: Final = "quire"
DIRECT: Final = "direct"
"""Where the ``DirectWriter`` is among a scope's ``extensions``."""
_UNWRITTEN = 16 * 1024
"""Bytes that may wait in the transport. uvloop counts what it writes at the end of an iteration of its loop, and one
step of an engine may bring deltas of several choices; far more than that means that the client does not read.
"""


class DirectWriter:
    """Writes chunks of the response of ``cycle``: the same bytes that the server writes for a message."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    @property
    def is_streaming(self) -> bool:
        """Whether the response has started, is chunked, and has not ended."""
        return bool(self._cycle.chunked_encoding) and not self._cycle.response_complete

    @property
    def is_open(self) -> bool:
        """Whether the connection is open and its client has read nearly all that was written."""
        transport = self._transport
        return not (transport.is_closing() or transport.get_write_buffer_size() > _UNWRITTEN)

    def write(self, data: bytes) -> None:
        """Writes some of the body, not empty. Only while ``is_streaming`` and ``is_open``."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Aborts the connection of a client that left or does not read; drops what is not sent yet."""
        self._cycle.disconnected = True  # else the server logs a response that was not completed
        self._transport.abort()


def direct_writer(scope: Mapping[str, Any]) -> DirectWriter | None:
    """Returns the direct writer of a request's connection; None if its server has none."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get(DIRECT)
    return found if isinstance(found, DirectWriter) else None


_MAX_PATH = 128  # characters
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_CHAT = "use POST /v1/chat/completions"
_COMPLETIONS = "use POST /v1/completions"
_MESSAGES = "use POST /v1/messages"
_INSTEAD = {
    "/conversations": "use POST /v1/responses, with previous_response_id",
    "/v1/responses": "use POST /v1/responses; the base URL ends with /v1 already",
    "/messages": _MESSAGES,
    "/messages/batches": f"{_MESSAGES} for each of them",
    "/complete": _MESSAGES,
    "/embeddings": "use POST /v1/embeddings",
    "/v1/embeddings": "use POST /v1/embeddings; the base URL ends with /v1 already",
    "/chat/completions": _CHAT,
    "/chat/completion": _CHAT,
    "/chat": _CHAT,
    "/completions": _COMPLETIONS,
    "/completion": _COMPLETIONS,
    "/generate": _COMPLETIONS,
    "/load_lora_adapter": "start the router with --allow-lora-updates",
    "/unload_lora_adapter": "start the router with --allow-lora-updates",
    "/tokenize": "use POST /tokenize, without /v1",
    "/detokenize": "use POST /detokenize, without /v1",
    "/metrics": "metrics are on the port of --metrics-port, whose address quire serve prints",
    "/docs": "GET /openapi.json describes this API, for Swagger UI, Redoc and other tools",
    "/redoc": "GET /openapi.json describes this API, for Swagger UI, Redoc and other tools",
    "/models": "use GET /v1/models",
    "/v1/chat/completions": f"{_CHAT}; the base URL ends with /v1 already",
    "/v1/completions": f"{_COMPLETIONS}; the base URL ends with /v1 already",
    "/v1/messages": f"{_MESSAGES}; the base URL of Anthropic's clients ends without /v1",
    "/v1/models": "use GET /v1/models; the base URL ends with /v1 already",
    "/api/chat": _CHAT,
    "/api/generate": _COMPLETIONS,
}
"""What to use instead of paths that are often asked for, by the path without a first ``/v1``."""
_NOT_HERE = {
    "/v1/responses/compact": "conversations are not compacted here; "
    'send "truncation": "auto", which drops the earliest messages, or a shorter input',
}
"""What to use instead of paths of the official documents that look like another route, with an id at their end."""


class HttpError(Exception):
    """A request that HTTP itself refuses: route, method, size, content type. Such errors have no gRPC twin, so they are
    not in the table of ``quire_proto.errors``.
    """

    def __init__(
        self, status: HTTPStatus, code: str, message: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message)
        self.headers = headers
        self.status = status
        self.code = code
        self.message = message


def body_too_large(limit: int) -> HttpError:
    """The body has more than ``limit`` bytes."""
    message = f"The body is larger than the limit of {limit} bytes."
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message)


def not_on_this_port() -> HttpError:
    """The port has metrics and probes alone."""
    message = "This port has metrics and probes alone: the API is at --http-port."
    return HttpError(HTTPStatus.NOT_FOUND, "not_found", message)


def body_too_slow(seconds: float) -> HttpError:
    """The body did not arrive within ``seconds``."""
    message = f"The body did not arrive within {seconds:g} seconds."
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", message)


def upload_too_slow(seconds: float, rate: int) -> HttpError:
    """An upload did not arrive within ``seconds`` and the time that its bytes take at ``rate`` bytes a second."""
    message = (
        f"The upload came too slowly: after {seconds:g} seconds it has to reach {rate} bytes a second on average. "
        "Send it over a faster connection, or as several smaller files."
    )
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", message)


def head_too_large(limit: int) -> HttpError:
    """The request line and headers have more than ``limit`` bytes."""
    message = f"The headers are larger than the limit of {limit} bytes."
    return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)


def head_too_slow(seconds: float) -> HttpError:
    """The request line and headers did not arrive within ``seconds``."""
    message = f"The headers did not arrive within {seconds:g} seconds."
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, "headers_too_slow", message)


def too_many_headers(limit: int) -> HttpError:
    """There are more than ``limit`` headers."""
    message = f"There are more than {limit} headers."
    return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)


def no_tunnel() -> HttpError:
    """``CONNECT``, which asks a proxy for a tunnel."""
    message = "This is not a proxy: CONNECT is not served."
    return HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, [(b"allow", b"GET, POST, DELETE")])


def wrong_host() -> HttpError:
    """There is no Host, more than one, or one that cannot be."""
    message = "A request needs exactly one Host header, with a valid value."
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_request", message)


def other_host(host: str) -> HttpError:
    """The Host is not a name of this machine, which alone is served here without a key."""
    name = _UNPRINTABLE.sub("?", host[:_MAX_PATH])
    message = f"Without keys this service is for its own machine, and {name} is another name: use localhost, "
    return HttpError(HTTPStatus.FORBIDDEN, "host_not_allowed", f"{message}--allowed-hosts or --api-key.")


def other_site(site: str) -> HttpError:
    """A page of another site sent the request, and without a key no such page is served here."""
    name = _UNPRINTABLE.sub("?", site[:_MAX_PATH])
    message = f"Without keys this service is for its own machine, and not for pages of {name}: use --allowed-origins "
    return HttpError(HTTPStatus.FORBIDDEN, "origin_not_allowed", f"{message}or --api-key.")


def unknown_version() -> HttpError:
    """The request line names an HTTP version that this port does not speak."""
    message = "This port speaks HTTP/1.1 and HTTP/1.0."
    return HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_supported", message)


def unknown_coding() -> HttpError:
    """The body is in a transfer coding that is not read here."""
    message = "The only transfer coding that is read here is chunked."
    return HttpError(HTTPStatus.NOT_IMPLEMENTED, "transfer_coding_not_implemented", message)


def not_http() -> HttpError:
    """The bytes are no HTTP request."""
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not a valid HTTP request.")


def not_json() -> HttpError:
    """The content type of the body is not JSON."""
    message = "The body must be JSON: send the header Content-Type: application/json."
    return HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def unsupported_coding(codings: str) -> HttpError:
    """The body is in a content coding that is not read here, or in too many."""
    message = f"The body is in the coding {_UNPRINTABLE.sub('?', codings[:_MAX_PATH])}: send gzip, deflate or identity."
    headers = [(b"accept-encoding", b"gzip, deflate")]
    return HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding", message, headers)


def body_malformed(problem: str) -> HttpError:
    """The body is not in the coding that its head names."""
    message = f"The body is not in its Content-Encoding: {problem}."
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_body", message)


def no_such_route(path: str, instead: str | None = None) -> HttpError:
    """The path does not exist. ``instead`` says what to use; by default what suits the path."""
    instead = instead or _INSTEAD.get(path.removeprefix("/v1").rstrip("/"), "GET /openapi.json lists what there is")
    return HttpError(HTTPStatus.NOT_FOUND, "not_found", f"There is nothing at {path[:_MAX_PATH]}: {instead}.")


def wrong_method(path: str, method: str, allowed: str) -> HttpError:
    """The path exists, with other methods: ``allowed``, in the form of the header ``Allow``."""
    if path in _NOT_HERE:
        return no_such_route(path, _NOT_HERE[path])
    takes = " and ".join(sorted(allowed.split(", ")))
    message = f"{path[:_MAX_PATH]} takes {takes}, not {method[:_MAX_PATH]}."
    return HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, [(b"allow", allowed.encode())])


T = TypeVar("T")
Header = tuple[bytes, bytes]
JSON_HEADERS: tuple[Header, ...] = ((b"content-type", b"application/json"),)
json_text: Final = json.JSONEncoder(separators=(",", ":")).encode
"""Writes compact JSON in ASCII, so that no reader of lines can take a character for the end of one."""
SSE_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to collect events
)
_CHUNK = 256 * 1024  # bytes that are written at once


def to_json(value: object) -> bytes:
    """As ``json_text``, in bytes."""
    return json_text(value).encode("ascii")


class ClientDisconnectedError(Exception):
    """The client disconnected, or did not read for too long, so that no response can be sent."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most bytes of a request's body, and the seconds within which it must arrive."""

    max_bytes: int
    timeout: float


async def read_body(receive: Receive, limits: BodyLimits, body: ReservedBody) -> None:
    """Reads all of ``body``, whatever Content-Length says. Raises ``HttpError``, ``ClientDisconnectedError``, and
    ``QuireError`` OVERLOADED when the budget for bodies is used up.
    """
    try:
        async with asyncio.timeout(limits.timeout):
            await _read(receive, limits.max_bytes, body)
    except TimeoutError:
        raise body_too_slow(limits.timeout) from None


async def _read(receive: Receive, limit: int, body: ReservedBody) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        data, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(data) > limit:
            raise body_too_large(limit)
        body.append(data)


class HttpResponse:
    """The response to one request, with the request's id in its head. Raises ``ClientDisconnectedError`` when the
    client leaves, or does not take a write within ``timeout`` seconds.
    """

    def __init__(self, send: Send, timeout: float, request_id: str, direct: DirectWriter | None = None) -> None:
        self.request_id = request_id
        self.id_headers: tuple[bytes, ...] = (b"x-request-id",)
        self.direct = direct  # writes without waiting; None if the server has no such way
        self.extra_headers: Callable[[], Iterable[Header]] = tuple  # called when the head is written
        self._send = send
        self._write_timeout = WriteTimeout(timeout)
        self.started = False
        self.ended = False

    async def send(self, status: int, body: bytes, headers: Iterable[Header] = JSON_HEADERS) -> None:
        """Sends a whole response. A long body is written in chunks, each with its own timeout."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, (*headers, length))
        last = max(0, len(body) - 1) // _CHUNK * _CHUNK
        for begin in range(0, last, _CHUNK):
            await self.write(body[begin : begin + _CHUNK])
        await self.end(body[last:])

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Writes status and headers."""
        self.started = True
        request_id = self.request_id.encode("ascii")
        ids = [(name, request_id) for name in self.id_headers]
        named = [*headers, *self.extra_headers(), *ids]
        await self._write({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes) -> None:
        """Writes some of the body."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Writes the last of the body."""
        self.ended = True
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Ends the timer of the write timeout."""
        self._write_timeout.close()

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            await self._write_timeout.wait(self._send(message))
        except OSError:  # the connection broke, or (TimeoutError) the client does not read
            raise ClientDisconnectedError from None


LAST_EVENT_ID = "last-event-id"
KEY_HEADERS = ("api-key", "x-api-key")  # of Azure's and Anthropic's clients
_STATE = "quire.exchange"


@dataclass
class HttpExchange:
    """A request and its response, whose errors look as ``format`` says. ``caller`` is set once the key was checked,
    and ``shows_fleet``, whether the caller may know the engines.
    ``generation_id`` is the id of what a request generates, which its client is told once it may read that.
    ``has_output`` is set with the first delta of a stream. ``resumable`` says that the client can resume the response
    even before that. ``event_ids`` says whether the stream's events have ids, and ``encoder`` writes them.
    """

    scope: Scope
    receive: Receive
    response: HttpResponse
    format: "AnswerFormat"
    caller: Identity = ANONYMOUS
    shows_fleet: bool = False
    generation_id: str = ""
    has_output: bool = False
    resumable: bool = False
    event_ids: bool = False
    encoder: "EventEncoder | None" = None

    @classmethod
    def from_scope(cls, scope: Scope) -> "HttpExchange":
        """Returns the exchange that a route was called with."""
        exchange = scope[_STATE]
        assert isinstance(exchange, cls)
        return exchange

    def attach(self) -> Scope:
        """Puts this exchange into the scope, which the routes are called with, and returns that."""
        self.scope[_STATE] = self
        return self.scope

    @property
    def request_id(self) -> str:
        """The id of the request that is answered: the router's own, whatever the client sent."""
        return self.response.request_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        self.response.request_id = request_id

    @property
    def path(self) -> str:
        """The path that routing uses; a Host header cannot change it."""
        return str(self.scope["path"])

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers by their lower-case names; of several with one name, the last."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.scope["headers"]}

    def values(self, name: str) -> list[str]:
        """Returns every value of a header."""
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name.encode()]

    @property
    def credentials(self) -> list[str]:
        """Every ``authorization`` value; without one, the keys of ``KEY_HEADERS``, which clients send bare."""
        return self.values("authorization") or [f"Bearer {key}" for name in KEY_HEADERS for key in self.values(name)]

    @property
    def has_body(self) -> bool:
        """Whether a body comes, even if it is empty."""
        return self.content_length > 0 or "transfer-encoding" in self.headers

    def check_json_body(self, max_bytes: int, *, optional: bool = False) -> None:
        """Raises ``HttpError`` if the headers declare another type than JSON, or more than ``max_bytes``. No type is
        needed for no body, where that is ``optional``.
        """
        if optional and not self.has_body:
            return
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise not_json()
        if self.content_length > max_bytes:
            raise body_too_large(max_bytes)

    @property
    def content_length(self) -> int:
        """The size of the body in bytes by its Content-Length; 0 without one."""
        return int(self.headers.get("content-length", 0))

    @property
    def head_bytes(self) -> int:
        """The size of the request line and headers in bytes."""
        target = len(self.scope["raw_path"]) + len(self.scope["query_string"])
        return target + sum(len(name) + len(value) + 4 for name, value in self.scope["headers"])

    @property
    def path_parameters(self) -> dict[str, Any]:
        """What the route's pattern matched in the path."""
        return dict(self.scope["path_params"])

    async def cancel_on_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``work``, which is cancelled at once when the client disconnects. The body must have
        been read before. Raises ``ClientDisconnectedError``.
        """
        task = asyncio.current_task()
        assert task is not None
        left = False

        async def watch() -> None:
            nonlocal left
            while (await self.receive())["type"] != "http.disconnect":
                pass
            # Servers say so behind a whole response too. What is left to do then is not the client's concern, and
            # the connection stays open for its next request.
            if not self.response.ended:
                left = True
                task.cancel()

        watching = asyncio.create_task(watch())  # the only one: ``work`` is done in the caller's task
        try:
            return await work
        except BaseException:
            if left and not task.uncancel():  # else the task was cancelled by somebody else, too
                raise ClientDisconnectedError from None
            raise
        finally:
            watching.cancel()


def x_headers(headers: Mapping[str, str]) -> list[Header]:
    """Returns response headers by names without ``x-``."""
    return [(b"x-" + name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
