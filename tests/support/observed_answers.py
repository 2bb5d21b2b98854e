"""Hooks where tests' HTTP clients receive: of ``httpx``, of the ``openai`` and ``anthropic`` packages (``httpx2``), of
``http.client`` and of ``urllib``. Every answer of a router is held against the official documents.
"""

import http.client
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import httpx2
import pytest

from tests.support.official_documents import problems_of_answer

Observe = Callable[[bytes], None]
_REQUEST_ID = "x-request-id"  # of a router, or of what stands behind one


class Observed:
    """What was wrong with answers so far."""

    def __init__(self) -> None:
        self.answers = 0
        self.problems: list[str] = []

    def take(self) -> list[str]:
        """The problems that nobody has taken."""
        taken, self.problems = self.problems, []
        return taken

    def observer(self, method: str, path: str, status: int, headers: Mapping[str, str]) -> Observe | None:
        """What takes the body of an answer; None for those that are not a router's."""
        if headers.get(_REQUEST_ID) is None:
            return None

        def observe(body: bytes) -> None:
            self.answers += 1
            content_type = headers.get("content-type") or ""
            try:
                self.problems += problems_of_answer(method, path, status, content_type, body)
            except ValueError as error:  # a test cut it off
                if content_type.startswith("application/json") and len(body) == int(headers["content-length"] or 0):
                    self.problems.append(f"{method} {path}: {error}")

        return observe


class _Watched:
    """The body of an answer of either package: it is observed once it was read, or closed before its end."""

    def __init__(self, stream: Any, observe: Observe) -> None:
        self._stream, self._observe, self._body, self._seen = stream, observe, bytearray(), False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._body += part
            yield part
        self._end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._body += part
            yield part
        self._end()

    def close(self) -> None:
        self._stream.close()
        self._end()

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._end()

    def _end(self) -> None:
        if not self._seen:
            self._seen = True
            self._observe(bytes(self._body))


@contextmanager
def observed_answers() -> Iterator[Observed]:
    """Holds every answer that this process receives from a router against the official documents."""
    observed = Observed()
    with pytest.MonkeyPatch.context() as patch:
        for package in (httpx, httpx2):
            _watch_package(patch, package, observed)
        _watch_http_client(patch, observed)
        yield observed


def _watch_package(patch: pytest.MonkeyPatch, package: Any, observed: Observed) -> None:
    sync, asynchronous = package.HTTPTransport.handle_request, package.AsyncHTTPTransport.handle_async_request

    class Stream(_Watched, package.SyncByteStream, package.AsyncByteStream):  # type: ignore[misc]
        """As the package wants it."""

    def watched(request: Any, response: Any) -> Any:
        path = request.url.raw_path.decode()
        observe = observed.observer(request.method, path, response.status_code, response.headers)
        if observe is not None:
            response.stream = Stream(response.stream, observe)
        return response

    def handle(self: Any, request: Any) -> Any:
        return watched(request, sync(self, request))

    async def handle_async(self: Any, request: Any) -> Any:
        return watched(request, await asynchronous(self, request))

    patch.setattr(package.HTTPTransport, "handle_request", handle)
    patch.setattr(package.AsyncHTTPTransport, "handle_async_request", handle_async)


def _watch_http_client(patch: pytest.MonkeyPatch, observed: Observed) -> None:
    put, get = http.client.HTTPConnection.putrequest, http.client.HTTPConnection.getresponse
    read = http.client.HTTPResponse.read

    def putrequest(self: Any, method: str, url: str, *terms: Any, **named: Any) -> None:
        self.observed_request = method, url
        put(self, method, url, *terms, **named)

    def getresponse(self: Any) -> Any:
        response = get(self)
        response.observe = observed.observer(*self.observed_request, response.status, response.headers)
        return response

    def read_all(self: Any, amount: int | None = None) -> bytes:
        body = read(self, amount)
        if amount is None and getattr(self, "observe", None) is not None:
            self.observe(body)
        return body

    patch.setattr(http.client.HTTPConnection, "putrequest", putrequest)
    patch.setattr(http.client.HTTPConnection, "getresponse", getresponse)
    patch.setattr(http.client.HTTPResponse, "read", read_all)
