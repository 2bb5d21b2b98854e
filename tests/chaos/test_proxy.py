"""The proxy of the chaos run breaks what it says, and only that: half-open connections in each direction."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.chaos.proxy import DOWN, UP, Proxy

SHORT, LONG = 0.2, 10.0  # seconds in which nothing comes, and in which what is sent has come


class Upper:
    """Answers each line with itself in capitals, and keeps what it ``heard``."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(line.upper())
                await writer.drain()
        self.heard.append(b"end")
        writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Upper, Proxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through a proxy, on which something has passed each way."""
    upper = Upper()
    server = await asyncio.start_server(upper.serve, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    host, port = proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"a\n")
    assert await asyncio.wait_for(reader.readline(), LONG) == b"A\n"
    try:
        yield upper, proxy, reader, writer
    finally:
        writer.close()
        await proxy.stop()
        server.close()


@pytest.mark.parametrize(("directions", "heard"), [((UP,), False), ((DOWN,), True), ((UP, DOWN), False)])
async def test_a_half_open_connection_drops_one_direction_and_breaks_afterwards(
    directions: tuple[str, ...], heard: bool
) -> None:
    async with proxied() as (upper, proxy, reader, writer):
        proxy.break_silently(directions, loses=True)
        writer.write(b"b\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SHORT)
        assert (b"b\n" in upper.heard) is heard
        proxy.heal()
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), LONG) == b""


async def test_a_stalled_connection_delivers_everything_later() -> None:
    async with proxied() as (_, proxy, reader, writer):
        proxy.break_silently((UP, DOWN), loses=False)
        writer.write(b"b\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SHORT)
        proxy.heal()
        assert await asyncio.wait_for(reader.readline(), LONG) == b"B\n"


async def test_a_close_of_a_half_open_connection_is_noticed_only_afterwards() -> None:
    async with proxied() as (upper, proxy, _, writer):
        proxy.break_silently((UP,), loses=True)
        writer.transport.abort()
        await asyncio.sleep(SHORT)
        assert b"end" not in upper.heard
        proxy.heal()
        async with asyncio.timeout(LONG):
            while b"end" not in upper.heard:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
