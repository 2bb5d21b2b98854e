"""Runs ASGI applications inside the router's own event loop, with bounded request heads."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire_router.api.rest.app import MAX_HEAD_BYTES


class BoundedHttpProtocol(HttpToolsProtocol):
    """The HTTP protocol, which gives up a connection whose request head does not end within ``MAX_HEAD_BYTES``:
    the parser alone would collect it without end.
    """

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """Counts what arrives before a head is complete."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_headers_complete(self) -> None:
        """A head is complete; the application judges its size."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request's head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()


class HttpServer(uvicorn.Server):
    """One application on one socket. Signals are left to whoever runs it."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than load balancers keep a connection they may still use
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._listener = listener
        self.port: int = listener.getsockname()[1]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def run_until_stopped(self) -> None:
        """Serves until ``should_exit`` is set and the last answers are out."""
        await self.serve([self._listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: any free one). Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    return listener
