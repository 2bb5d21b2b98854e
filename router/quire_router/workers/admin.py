"""What the metrics port serves where several workers share the others: their metrics together, and one's health."""

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import ClientError, ClientSession, ClientTimeout
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import Receive, Scope, Send

from quire_router.api.frontend import new_request_id
from quire_router.api.rest.connection import JSON_HEADERS, ClientDisconnectedError, Header, HttpResponse

_WORKER_SECONDS = ClientTimeout(total=2.0)  # for a worker's answer
_OF_A_WORKER = ("/started", "/ready", "/health")
_TEXT: tuple[Header, ...] = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
Page = tuple[int, bytes, tuple[Header, ...]]


class Admin:
    """An ASGI application. ``folder`` is where the workers write their metrics, and ``host`` and ``port`` are where
    they serve; ``alive`` tells whether there is any. A client may leave its answer unread for ``patience`` seconds.
    """

    def __init__(self, folder: str, host: str, port: int, alive: Callable[[], bool], patience: float) -> None:
        self._folder = folder
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - where to ask, not to listen
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._alive = alive
        self._patience = patience
        self._pages: dict[str, Callable[[], Awaitable[Page]]] = {
            **{path: partial(self._of_a_worker, path) for path in _OF_A_WORKER},
            "/live": self._live,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answers one request."""
        reply = HttpResponse(send, self._patience, new_request_id())
        try:
            page = self._pages.get(scope["path"]) if scope["method"] == "GET" else None
            await reply.send(*((404, b"{}", JSON_HEADERS) if page is None else await page()))
        except ClientDisconnectedError:
            return
        finally:
            reply.close()

    async def _live(self) -> Page:
        return (
            (200, b'{"status":"ok"}', JSON_HEADERS) if self._alive() else (503, b'{"status":"no worker"}', JSON_HEADERS)
        )

    async def _of_a_worker(self, path: str) -> Page:
        """What the worker that takes the connection says there."""
        try:
            async with ClientSession(self._url, timeout=_WORKER_SECONDS) as session, session.get(path) as answer:
                return answer.status, await answer.read(), JSON_HEADERS
        except (ClientError, OSError, TimeoutError):
            return 503, b'{"status":"unavailable"}', JSON_HEADERS

    async def _metrics(self) -> Page:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return 200, generate_latest(registry), _TEXT
