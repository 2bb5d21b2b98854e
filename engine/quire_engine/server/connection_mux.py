"""``ConnectionMux``: one port for TLS and for plain text, while a fleet migrates from one to the other."""

import asyncio
import shutil
import socket
import tempfile
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from pathlib import Path

_TLS_HANDSHAKE = b"\x16"  # the type of the first record; HTTP/2 connections never begin with it
_FIRST_BYTE_SECONDS = 10.0
_CHUNK = 1 << 18  # bytes


class ConnectionMux:
    """Passes each connection on by its first byte, to a TLS server or to a plain text server. Both listen on Unix
    sockets in a folder that only this user can open: ``tls_address`` and ``plain_address``, in gRPC's notation.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="quire-engine-"))
        self._tls, self._plain = self._folder / "tls", self._folder / "plain"
        self.tls_address, self.plain_address = f"unix:{self._tls}", f"unix:{self._plain}"
        self._server: asyncio.Server | None = None
        self._open: set[StreamWriter] = set()

    async def listen(self, host: str, port: int) -> int:
        """Starts accepting connections and returns the port. ``::`` accepts IPv4 too. Raises ``OSError`` and closes
        itself if it cannot listen.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            port_socket = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
        except OSError:
            self.close()
            raise
        self._server = await asyncio.start_server(self._serve, sock=port_socket, limit=_CHUNK)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Closes every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_FIRST_BYTE_SECONDS):
                    first = await reader.read(_CHUNK)
                if first:
                    await self._relay(first, reader, writer)
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _relay(self, first: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        path = self._tls if first.startswith(_TLS_HANDSHAKE) else self._plain
        answers, requests = await asyncio.open_unix_connection(path, limit=_CHUNK)
        try:
            requests.write(first)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, requests))
                tasks.create_task(_copy(answers, writer))
        finally:
            requests.transport.abort()


async def _copy(source: StreamReader, sink: StreamWriter) -> None:
    """Copies until ``source`` ends, then closes ``sink``."""
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
    sink.close()
