"""What the metrics port serves where several workers share the others: their metrics together, and one's health."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PATIENCE = 2.0  # seconds
_MOST = 65_536  # bytes of a worker's answer
_JSON = "application/json"
_OF_A_WORKER = ("/started", "/ready", "/health")


class Admin:
    """An ASGI application. ``folder`` is where the workers write their metrics, and ``host`` and ``port`` are where
    they serve; ``alive`` tells whether there is any.
    """

    def __init__(self, folder: str, host: str, port: int, alive: Callable[[], bool]) -> None:
        self._folder = folder
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - where to ask, not to listen
        self._port = port
        self._alive = alive
        self._pages: dict[str, Callable[[], Awaitable[Response]]] = {
            **{path: partial(self._of_a_worker, path) for path in _OF_A_WORKER},
            "/live": self._live,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        page = self._pages.get(Request(scope).url.path)
        found = page is not None and scope["method"] == "GET"
        answer = await page() if page is not None and found else Response("{}", 404, media_type=_JSON)
        await answer(scope, receive, send)

    async def _live(self) -> Response:
        status = 200 if self._alive() else 503
        return Response('{"status":"ok"}' if status == 200 else '{"status":"no worker"}', status, media_type=_JSON)

    async def _of_a_worker(self, path: str) -> Response:
        try:
            async with asyncio.timeout(_PATIENCE):
                status, body = await self._ask(path)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            status, body = 503, b'{"status":"unavailable"}'
        return Response(body, status, media_type=_JSON)

    async def _metrics(self) -> Response:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _ask(self, path: str) -> tuple[int, bytes]:
        """What whichever worker takes the connection says there."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path.encode())
            head, _, body = (await reader.read(_MOST)).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), body or await reader.read(_MOST)
        finally:
            writer.close()
