"""A TCP proxy in this process, whose connections can be cut, or go quiet in either direction, as networks do it."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

UP, DOWN = "up", "down"
"""Towards the target, and back from it."""


class _Direction:
    """What becomes of the bytes that go one way: they pass, they wait (``passes`` is cleared), or they are lost."""

    def __init__(self) -> None:
        self.passes = asyncio.Event()
        self.passes.set()
        self.loses = False
        self.delay = 0.0


class Proxy:
    """Listens at ``place``, an address of this host and a port, and passes everything on to ``target``, another port;
    without it at any free port.
    """

    def __init__(self, target: int, place: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self._place = place
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._directions = {UP: _Direction(), DOWN: _Direction()}

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return "{}:{}".format(*self._server.sockets[0].getsockname())

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._accept, *self._place)

    async def stop(self) -> None:
        """Ends all connections."""
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._tasks)

    def cut(self) -> int:
        """Breaks off every connection, without a word to either side; returns how many there were."""
        count = len(self._writers) // 2
        for writer in list(self._writers):
            writer.transport.abort()
        return count

    def delay(self, directions: Iterable[str], seconds: float) -> None:
        """Has what comes these ways arrive so much later."""
        for name in directions:
            self._directions[name].delay = seconds

    def break_silently(self, directions: Iterable[str], *, loses: bool) -> None:
        """Lets no byte through these ways, nor the end of a connection, and closes nothing: neither side learns of it.
        What comes is lost, or waits until this heals.
        """
        for name in directions:
            self._directions[name].passes.clear()
            self._directions[name].loses = loses

    def heal(self) -> None:
        """Passes everything on again. Connections break where bytes were lost, as none has a hole."""
        lost = any(direction.loses for direction in self._directions.values())
        for direction in self._directions.values():
            direction.loses = False
            direction.passes.set()
        if lost:
            self.cut()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        await asyncio.gather(
            _pass_on(reader, back, self._directions[UP]), _pass_on(there, writer, self._directions[DOWN])
        )
        self._writers -= ends


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            if direction.loses:
                continue
            if direction.delay:
                await asyncio.sleep(direction.delay)
            await direction.passes.wait()
            writer.write(data)
            await writer.drain()
    await direction.passes.wait()
    writer.transport.abort()
