"""A client of the OpenAI API for one person: streams that go on after a cut connection, with the standard library.

Each request has an ``Idempotency-Key``, so that Quire numbers its events; where the connection is cut the rest is read
from ``/v1/requests/{id}/events``, and nothing is printed twice. Other servers ignore the key: their cut streams end
with an error.
"""

import json
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from random import uniform
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

from quire_proto.logs import one_line

from quire_cli.machine.server import WRONG_KEY, base_url, no_server, not_http, other_server

READ_TIMEOUT = 60.0  # seconds of silence; Quire's streams have a comment each 5 s
PATIENCE = 60.0  # seconds in which a stream that was cut is tried again
NOTE = "engine "  # how a comment begins that says that an answer left an engine
PAUSE = 0.5  # seconds between two tries, at least
_UNAVAILABLE = 503
_UNAUTHORIZED = 401
_OK = 200
_NOT_FOUND = 404


class ApiError(Exception):
    """The server cannot be reached, or refuses. The text is one sentence."""


class _CutError(Exception):
    """The stream ended before its end, and can be read on."""


class Ask(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    headers: Mapping[str, str] | None = None


class ApiClient:
    """A server at ``url``, which may end with ``/v1`` or not. ``key`` is the bearer token."""

    def __init__(self, url: str, key: str | None = None, *, patience: float = PATIENCE) -> None:
        self.url = base_url(url)
        parts = _split(self.url)
        if parts is None:
            raise ApiError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000.")
        if key and not (key.isascii() and key.isprintable()):
            raise ApiError("the API key has characters that no HTTP header can have.")
        self._parts = parts
        self._prefix = f"{parts.path}/v1"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._patience = patience

    def models(self) -> list[str]:
        """Returns the names of the served models, without adapters, which have a ``parent``. Raises
        ``ApiError`` and ``OSError``.
        """
        try:
            with self._response(Ask("GET", "/models")) as response:
                entries = json.loads(response.read())["data"]
                return [str(entry["id"]) for entry in entries if not entry.get("parent")]
        except HTTPException:
            raise ApiError(not_http(self.url)) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ApiError(f"{self.url}/v1/models is not a list of models.") from None
        except _CutError as error:
            raise ApiError(str(error)) from None

    def fleet(self) -> Iterator[dict[str, Any]]:
        """Samples of Quire's fleet: all of it, then what changes. Raises ``ApiError``, ``OSError`` and others."""
        return (sample for _, sample in self._events(Ask("GET", "/fleet/events")))

    def stream(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        on_cut: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer, each once, across cut connections; before each new one ``on_cut`` is called.
        ``on_note`` gets what Quire says of an engine that was lost. If the caller stops reading, the request is
        cancelled. Raises ``ApiError``.
        """
        body = {**body, "stream": True}
        ask = Ask("POST", path, body, {"Idempotency-Key": uuid4().hex})
        request_id, ended, began = "", False, False
        last = monotonic()
        try:
            while True:
                try:
                    for event_id, chunk in self._events(ask, on_note):
                        request_id, last, began = str(chunk.get("id", "")), monotonic(), True
                        yield chunk
                        if event_id:
                            ask = Ask("GET", f"/requests/{request_id}/events", None, {"Last-Event-ID": event_id})
                    ended = True
                    return
                except ApiError:
                    ended = True
                    raise
                except (OSError, HTTPException, _CutError) as error:
                    if began and ask.method == "POST":
                        raise ApiError("the connection was cut, and this server cannot continue an answer.") from None
                    if not began and isinstance(error, ConnectionRefusedError):
                        raise ApiError(no_server(self.url)) from None
                    if monotonic() - last > self._patience:
                        said = str(error) if isinstance(error, _CutError) else f"the connection is lost: {error}."
                        raise ApiError(said) from None
                    on_cut()
                    sleep(uniform(1.0, 1.5) * PAUSE)  # noqa: S311 - so that those who lost one router come back apart
        finally:
            if request_id and not ended:
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Ends a request, if the server is there and knows it."""
        with suppress(ApiError, OSError, HTTPException), self._response(Ask("POST", f"/requests/{request_id}/cancel")):
            pass

    def _events(
        self, ask: Ask, on_note: Callable[[str], None] = lambda _: None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Id and content of each event of one connection. Raises ``_CutError`` if it ends before ``[DONE]``."""
        with self._response(ask) as response:
            event_id = ""
            while line := response.readline():
                name, _, value = line.decode().rstrip("\r\n").partition(": ")
                if name == "id":
                    event_id = value
                elif not name and value.startswith(NOTE):
                    on_note(one_line(value))
                elif name == "data":
                    if value == "[DONE]":
                        return
                    chunk = json.loads(value)
                    if "error" in chunk:
                        raise _error_of(chunk["error"])
                    yield event_id, chunk
        raise _CutError("the stream ended early")

    @contextmanager
    def _response(self, ask: Ask) -> Iterator[HTTPResponse]:
        """The response to a request, if it is a good one. Raises ``ApiError``, ``OSError`` and ``HTTPException``."""
        kind = HTTPConnection if self._parts.scheme == "http" else HTTPSConnection
        options: dict[str, Any] = {} if kind is HTTPConnection else {"context": ssl.create_default_context()}
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=READ_TIMEOUT, **options)
        data = None if ask.body is None else json.dumps(ask.body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        try:
            connection.request(
                ask.method, f"{self._prefix}{ask.path}", data, {**self._headers, **headers, **(ask.headers or {})}
            )
            response = connection.getresponse()
            if response.status == _OK:
                yield response
                return
            if response.status == _NOT_FOUND and ask.headers and "Last-Event-ID" in ask.headers:
                raise ApiError("the connection was cut, and the server has forgotten the request since.")
            message = _message_of(response) or other_server(self.url, response.status)
            if response.status == _UNAVAILABLE:
                raise _CutError(message)
            raise ApiError(f"{message.rstrip('.')}: {WRONG_KEY}." if response.status == _UNAUTHORIZED else message)
        finally:
            connection.close()


def _split(url: str) -> SplitResult | None:
    """The parts of the URL of a server; None if it is none."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0  # a wrong port raises
    except ValueError:
        return None
    written = f"{parts.netloc}{parts.path}"
    return parts if usable and written.isascii() and written.isprintable() and " " not in written else None


def _error_of(error: Mapping[str, Any]) -> Exception:
    message = str(error.get("message", "the server ended the answer with an error."))
    return _CutError(message) if error.get("resumable") else ApiError(message)


def _message_of(response: HTTPResponse) -> str:
    """What the error object of a response says; nothing without one."""
    try:
        return one_line(str(json.loads(response.read(1 << 16))["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return ""
