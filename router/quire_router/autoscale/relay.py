"""A port before a gRPC server, whose library takes connections until there are enough and cannot choose among them."""

import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from quire_router.api.connection_shares import ConnectionShares, peer_key

_PART = 64 * 1024  # bytes


class Relay:
    """Passes on what comes on ``listener`` to ``port`` of this machine, and back, as it is. ``shares`` says which
    connection makes room for a new one; all can be chosen, the one first whose client has sent nothing for the longest
    time.
    """

    def __init__(self, listener: socket.socket, port: int, shares: ConnectionShares) -> None:
        self._listener = listener
        self._target = port
        self._shares = shares
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None
        self.port: int = listener.getsockname()[1]

    async def start(self) -> None:
        """Begins to accept connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=_PART)

    async def stop(self) -> None:
        """Closes every connection."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for client in list(self._clients):
            client.evict()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        client = _Client(writer)
        address = writer.get_extra_info("peername")
        if not self._shares.add(client, peer_key(address[0] if address else "")):
            return client.evict()
        self._clients.add(client)
        self._shares.mark_idle(client)
        try:
            with suppress(OSError):
                await self._pass_on(client, reader, writer)
        finally:
            self._clients.discard(client)
            self._shares.remove(client)
            client.evict()

    async def _pass_on(self, client: "_Client", reader: StreamReader, writer: StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target, limit=_PART)
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._copy(reader, requests, client))
                directions.create_task(self._copy(answers, writer))
        finally:
            requests.transport.abort()

    async def _copy(self, source: StreamReader, sink: StreamWriter, client: "_Client | None" = None) -> None:
        """Until ``source`` ends, and ``sink`` with it; what comes from a ``client`` is noted."""
        with suppress(OSError):
            while data := await source.read(_PART):
                if client is not None:
                    self._shares.mark_idle(client)
                sink.write(data)
                await sink.drain()
        sink.close()


class _Client:
    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    def evict(self) -> None:
        """Closes the connection."""
        self._writer.transport.abort()
