"""``HttpClient``: requests to one server, with bounds on what it may answer, and streams of server-sent events.

What a server sends is counted before it is parsed, and long answers are parsed on a thread: no server stalls the
streams of others.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp
from quire_proto.tls import ClientTls

from quire_router.engines.base import LONG, Offload, offload_long, on_any_thread

MAX_ANSWER_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
"""The first event of vLLM's streams repeats the prompt: some 7 bytes for each of its tokens."""
MAX_ERROR_BYTES = 16 * 2**10
MAX_VALUES, MAX_FIELDS = 2**20, 2**18
"""Of one answer or event: a prompt of a million tokens, and the log-probabilities of ten thousand."""
_LINES_PER_TURN = 64
_JSON = {"Content-Type": "application/json"}
_MAX_MESSAGE = 300  # characters of an error that are passed on

Json = Mapping[str, Any]
T = TypeVar("T")


class ServerError(Exception):
    """The server has answered with an error: ``status`` of HTTP, and what it says."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} ({status})" if message else f"status {status}")
        self.status = status
        self.message = message

    @classmethod
    def of(cls, status: int, body: Any, unnamed: int = 500) -> Self:
        """Reads the shapes of errors that servers have: ``{"error": {"message": …, "code": …}}``, also as an event of a
        stream, whose ``status`` is 200; and ``{"message": …}`` or ``{"detail": …}``. An event that names no code has
        the status ``unnamed``.
        """
        error = body.get("error", body) if isinstance(body, dict) else body
        if not isinstance(error, dict):
            return cls(status if status >= 400 else unnamed, _one_line(error))
        code = error.get("code")
        if status < 400:
            status = code if type(code) is int and 400 <= code < 600 else unnamed
        return cls(status, _one_line(error.get("message") or error.get("detail") or ""))


class BadAnswer(Exception):  # noqa: N818 - a finding about a server
    """The server answers with what cannot be understood, or with too much."""


TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
"""What is raised where a server cannot be reached, or breaks off."""


def explain(error: Exception) -> str:
    """One of ``TRANSPORT_ERRORS`` in a few words."""
    if is_refusal(error):
        return "connection refused"
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError)):
        return "the connection broke"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return _one_line(error) or type(error).__name__


def is_refusal(error: Exception) -> bool:
    """Whether the address refuses connections."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, ConnectionRefusedError)


class HttpClient:
    """Requests to the server at ``url``, each with ``api_key`` if one is given. Certificates are verified against the
    authorities of ``tls``, or those of the system. Long answers are read through ``offload``, in the server's turn. To
    be made within an event loop.

    Each request has a connection of its own: one that was idle may just be being closed by the server, and a POST
    cannot be repeated without knowing whether it runs. Proxies that the environment names are for connections beyond
    the router's own network, and are not used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        offload: Offload = on_any_thread,
    ) -> None:
        self._url = url
        self._offload = offload
        self._host = None if tls is None else tls.name
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=_ssl_context(url, tls)),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Ends every request."""
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body of an answer. Raises ``ServerError``, ``BadAnswer`` and ``TRANSPORT_ERRORS``."""
        async with self._session.get(self._url + path, allow_redirects=False, server_hostname=self._host) as response:
            if response.status != 200:
                raise await _error(response)
            return await _read(response, MAX_ANSWER_BYTES)

    async def get_json(self, path: str) -> Json:
        """The object in an answer. Raises as ``get``."""
        return await self.parse(await self.get(path), _parsed)

    async def post_json(self, path: str, body: Json) -> Json:
        """The object in the answer to ``body``. Raises as ``get``."""
        async with self._session.post(
            self._url + path, json=body, allow_redirects=False, server_hostname=self._host
        ) as response:
            if response.status != 200:
                raise await _error(response)
            return await self.parse(await _read(response, MAX_ANSWER_BYTES), _parsed)

    async def parse(self, payload: bytes, parse: Callable[[bytes], T]) -> T:
        """Returns what ``parse`` makes of what the server has sent, on a thread if it is long."""
        return await offload_long(self._offload, self._url, len(payload), partial(parse, payload))

    async def stream(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        unnamed: int = 500,
        read: Callable[[Json], Any] = lambda event: event,
        tenant: str = "",
        max_values: int = MAX_VALUES,
    ) -> AsyncGenerator[Any]:
        """Posts ``body``, which is JSON, for a ``tenant``, and yields what ``read`` makes of the events of the answer,
        each an object of at most ``max_values``, until it ends or says ``[DONE]``. A long event is read on a thread, in
        the tenant's turn. Closing the generator closes the connection, which makes servers end the request. Raises as
        ``get`` and ``read`` do, also after some events: an error among them without a code has the status ``unnamed``.
        """
        async with self._session.post(
            self._url + path, data=body, headers={**headers, **_JSON}, allow_redirects=False, server_hostname=self._host
        ) as response:
            if response.status != 200:
                raise await _error(response)

            def read_event(payload: bytes) -> Any:
                event = _parsed(payload, max_values)
                if event.get("error"):
                    raise ServerError.of(response.status, event, unnamed)
                return read(event)

            lines = _Lines()
            async for data in response.content.iter_any():
                for number, line in enumerate(lines.feed(data), 1):
                    if number % _LINES_PER_TURN == 0:
                        await asyncio.sleep(0)
                    if not line.startswith(b"data:"):
                        continue  # a comment, or an empty line
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        return
                    yield await offload_long(self._offload, tenant, len(payload), partial(read_event, payload))


class _Lines:
    """The lines of a stream that comes in pieces. Raises ``BadAnswer`` for one that is too long."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that end in the next piece. What came before it is not read again."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(line)
            yield bytes(self._rest)
            self._rest.clear()
        self._add(rest)

    def _add(self, data: bytes) -> None:
        if len(self._rest) + len(data) > MAX_EVENT_BYTES:
            raise BadAnswer("an event is too long")
        self._rest += data


def _ssl_context(url: str, tls: ClientTls | None) -> ssl.SSLContext | bool:
    if tls is None or not url.startswith("https:"):
        return True
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.identity is not None:
        context.load_cert_chain(tls.identity.certificate, tls.identity.key)
    return context


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit:
            raise BadAnswer("an answer is too long")
    return bytes(body)


async def _error(response: aiohttp.ClientResponse) -> ServerError:
    try:
        return ServerError.of(response.status, json.loads(await _read(response, MAX_ERROR_BYTES)))
    except (ValueError, RecursionError, BadAnswer):
        return ServerError(response.status, "")


def _parsed(payload: bytes, max_values: int = MAX_VALUES) -> Json:
    """Parsing holds the interpreter, on any thread, so what there is to parse is counted first."""
    if len(payload) > LONG and (
        payload.count(b",") > min(max_values, MAX_VALUES) or sum(map(payload.count, (b":", b"[", b"{"))) > MAX_FIELDS
    ):
        raise BadAnswer("an answer has too many values")
    try:
        parsed = json.loads(payload)
    except (ValueError, RecursionError):
        raise BadAnswer("an answer is not JSON") from None
    if not isinstance(parsed, dict):
        raise BadAnswer("an answer is not an object of JSON")
    return parsed


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())[:_MAX_MESSAGE]
