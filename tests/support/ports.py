"""Ports for processes that tests start, and ways to them that go dead."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_FIRST, _OF_A_WORKER, _WORKERS = 20_000, 3_000, 4
_given: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on, and that was not given before. It is below those that the kernel gives out by
    itself, so that no connection takes it before it is used, and tests that run side by side draw from parts of their
    own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    first = _FIRST + worker * _OF_A_WORKER
    while True:
        port = random.SystemRandom().randrange(first, first + _OF_A_WORKER)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@asynccontextmanager
async def cut_off(port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A way to ``port`` that goes dead, with its connections open, when its event is set."""
    dead = asyncio.Event()
    tasks: list[asyncio.Future[None]] = []
    open_ends: list[asyncio.StreamWriter] = []  # one that nobody has is closed

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not dead.is_set():
                writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        open_ends.extend((back, writer))
        tasks.extend(asyncio.ensure_future(pump(*each)) for each in ((reader, back), (there, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], dead
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for end in open_ends:
            end.close()
