"""Runs ASGI applications inside the router's own event loop, on limited connections."""

import errno
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp

from quire_router.api.connection_shares import ConnectionShares
from quire_router.api.rest.protocol import ConnectionLimits, LimitedConfig, LimitedHttpProtocol

log = logging.getLogger("quire.router")
_TICKS = 10  # of the server, a second together
_SILENCE = 30.0  # seconds from one line about descriptors to the next


class HttpServer(uvicorn.Server):
    """One application on one socket. Signals are left to whoever runs it."""

    _silent_until: ClassVar[float] = 0.0  # of the process: servers have their descriptors together

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: ConnectionLimits | None = None) -> None:
        super().__init__(http_config(app, limits or ConnectionLimits()))
        self._listener = listener
        self.port: int = listener.getsockname()[1]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Looks each second whether connections can be accepted; True when the server ends. The event loop closes new
        connections without a word when no descriptor is left.
        """
        if counter % _TICKS == 0 and monotonic() >= HttpServer._silent_until and not _is_descriptor_left():
            HttpServer._silent_until = monotonic() + _SILENCE
            log.error("no file descriptor is left (ulimit -n): new connections are closed until some others end")
        return await super().on_tick(counter)

    async def run_until_stopped(self) -> None:
        """Serves until ``should_exit`` is set and the last answers are out."""
        await self.serve([self._listener])


def http_config(app: ASGIApp, limits: ConnectionLimits) -> LimitedConfig:
    """How ``app`` is served, on connections within ``limits``."""
    config = LimitedConfig(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    config.limits = limits
    config.shares = ConnectionShares(limits.connections, limits.peer_share)
    config.timeout_keep_alive = math.ceil(limits.idle)
    return config


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: any free one), ``shared`` with other processes that say the
    same. Raises ``OSError``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former process may linger
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    return listener


def _is_descriptor_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
