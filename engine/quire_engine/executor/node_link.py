"""The connection between node 0 of an engine and another node, or between engine 0 of a group and another engine. It is
one TCP connection, with TLS between machines. ``NodeLink`` carries the bytes that rank 0 and the ranks of the other
node send to each other. It tells a dead or frozen node from a busy one.

A frame consists of its kind, a rank, a length and bytes. DATA frames carry the byte stream of a rank's socket, cut
anywhere. All other frames carry JSON.
"""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quire_proto.supervise import forget_cancellations
from quire_proto.tls import ServerTls, TlsError

HEARTBEAT_SECONDS = 1.0
# A node that sends nothing for this long is lost: its machine is gone or cut off, or its processes are stopped.
SILENCE_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
_HEADER = struct.Struct("<BHI")
_CHUNK_BYTES = 1 << 16
_MAX_FRAME_BYTES = 1 << 20


class FrameKind(IntEnum):
    """What a frame holds and who sends it."""

    HELLO = 1  # other node or engine, first frame: its rank and what it runs
    ACCEPTED = 2  # member 0: accepted; the ranks that the node must run
    REFUSED = 3  # member 0: refused, and why
    DATA = 4  # both: bytes of a rank's socket
    HEARTBEAT = 5  # both
    RANK_ENDED = 6  # other node: how a rank ended
    LEAVING = 7  # other node: it was asked to stop
    READY = 8  # node 0: the engine serves; engine 0: all engines have joined
    CLOSE = 9  # node 0: the engine ends
    DP_MESSAGE = 10  # between engines: a ``DPMessage``
    STORED = 11  # between engines: a value of the ``RankStore``


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``rank`` is 0 if the frame belongs to no rank."""

    kind: int
    rank: int = 0
    data: bytes = b""

    @property
    def value(self) -> Any:
        """The JSON value of a frame other than DATA. Raises ``LinkEndedError``."""
        try:
            return json.loads(self.data)
        except ValueError:
            raise LinkEndedError("has sent something that is not a message") from None


class LinkEndedError(Exception):
    """The connection is no longer usable. The text says why, as the end of a sentence about the other node."""


def write_frame(writer: asyncio.StreamWriter, kind: FrameKind, value: object = None) -> None:
    """Sends ``value`` as a JSON frame."""
    data = json.dumps(value).encode()
    writer.write(_HEADER.pack(kind, 0, len(data)) + data)


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Reads the next frame. Raises ``LinkEndedError``."""
    try:
        kind, rank, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if size > _MAX_FRAME_BYTES:
            raise LinkEndedError("has sent something that is not a message")
        return Frame(kind, rank, await reader.readexactly(size))
    except (OSError, asyncio.IncompleteReadError) as error:  # ssl.SSLError is an OSError
        raise LinkEndedError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return f"does not accept the certificate that it is shown ({tls_reason(error)})"
    return "has closed the connection"


def tls_reason(error: ssl.SSLError) -> str:
    """Returns OpenSSL's word for ``error``."""
    return (error.reason or "unknown reason").lower().replace("_", " ")


class NodeLink:
    """One end of the connection. ``sockets`` lead to the ranks of the other node on node 0, and to this node's own
    ranks elsewhere.

    ``on_frame`` is called with each frame other than DATA and HEARTBEAT, and ``on_end`` with each rank whose socket has
    ended on this side. Both may raise ``LinkEndedError`` to end the connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sockets: Mapping[int, socket.socket],
        on_frame: Callable[[Frame], Awaitable[None]],
        on_end: Callable[[int], Awaitable[None]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sockets = sockets
        self._on_frame = on_frame
        self._on_end = on_end
        self._local_writers: dict[int, asyncio.StreamWriter] = {}
        self._heard = False
        self._is_delivering = False

    async def run(self) -> str:
        """Carries data until the connection ends, then closes it and the sockets. Returns why it ended, as the end of a
        sentence about the other node.
        """
        reasons: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank, end in self._sockets.items():
                    reader, self._local_writers[rank] = await asyncio.open_connection(sock=end)
                    tasks.create_task(self._send_all(rank, reader))
                tasks.create_task(self._receive_all())
                tasks.create_task(self._beat())
        except* LinkEndedError as group:
            reasons += map(str, group.exceptions)
            forget_cancellations()
        finally:
            for writer in (*self._local_writers.values(), self._writer):
                writer.transport.abort()
        return reasons[0]

    def send(self, kind: FrameKind, value: object = None) -> None:
        """Sends a JSON frame. Call it on the thread of the loop."""
        write_frame(self._writer, kind, value)

    def abort(self) -> None:
        """Ends the connection at once, so that ``run`` returns. Call it on the thread of the loop."""
        self._writer.transport.abort()

    async def _send_all(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Sends what a rank writes to its socket to the other node."""
        while data := await _read_some(reader):
            self._writer.write(_HEADER.pack(FrameKind.DATA, rank, len(data)) + data)
            try:
                await self._writer.drain()
            except OSError as error:
                raise LinkEndedError(_reason(error)) from error
        await self._on_end(rank)

    async def _receive_all(self) -> None:
        """Handles the frames of the other node."""
        while True:
            frame = await read_frame(self._reader)
            self._heard = True
            if frame.kind == FrameKind.DATA:
                if frame.rank not in self._local_writers:
                    raise LinkEndedError("has sent something that is not a message")
                await self._deliver(self._local_writers[frame.rank], frame.data)
            elif frame.kind != FrameKind.HEARTBEAT:
                await self._on_frame(frame)

    async def _deliver(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Writes data to a rank's socket. Waits if the rank is busy and its buffer is full."""
        self._is_delivering = True
        with suppress(OSError):  # the rank has ended, which ``on_end`` reports
            writer.write(data)
            await writer.drain()
        self._is_delivering = False

    async def _beat(self) -> None:
        """Sends heartbeats, and ends the connection if the other node sends nothing.

        Time in which this process could not listen does not count as silence: it was stopped or stalled, or it waited
        for one of its own ranks.
        """
        loop = asyncio.get_running_loop()
        silent = 0.0
        while True:
            self.send(FrameKind.HEARTBEAT)
            before, self._heard = loop.time(), False
            await asyncio.sleep(HEARTBEAT_SECONDS)
            lasted = min(loop.time() - before, 2 * HEARTBEAT_SECONDS)
            silent = 0.0 if self._heard or self._is_delivering else silent + lasted
            if silent >= SILENCE_SECONDS:
                raise LinkEndedError(f"has sent nothing for {SILENCE_SECONDS:g} seconds")


async def _read_some(reader: asyncio.StreamReader) -> bytes:
    """Reads what a rank sent. Returns no bytes at the end of the stream."""
    try:
        return await reader.read(_CHUNK_BYTES)
    except OSError:
        return b""


# Certificates


def tls_context(tls: ServerTls, *, server: bool) -> ssl.SSLContext:
    """Returns the TLS context for one side of a connection between nodes, on which both show certificates. Raises
    ``LinkEndedError`` if this node's own files were replaced by files that cannot be used; the other node is not at
    fault then.
    """
    try:
        return _load_context(tls, server=server)
    except OSError as error:  # ssl.SSLError is one
        reason = tls_reason(error) if isinstance(error, ssl.SSLError) else error.strerror or str(error)
        files = f"{tls.identity.certificate}, {tls.identity.key} or {tls.client_ca}"
        raise LinkEndedError(f"cannot be spoken to, as this node's own {files} cannot be used: {reason}") from error


def _load_context(tls: ServerTls, *, server: bool) -> ssl.SSLContext:
    """See ``tls_context``. Raises ``OSError`` if the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls.identity.certificate, tls.identity.key, password=str)
    context.load_verify_locations(tls.client_ca)
    context.check_hostname = False  # nodes change their addresses; ``check_peer`` compares the names instead
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def own_names(tls: ServerTls) -> frozenset[str]:
    """Returns the names in the certificate of ``tls``, as a peer sees them. Raises ``TlsError`` if other nodes with the
    same settings would not accept the certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server = _load_context(tls, server=True).wrap_bio(to_server, to_client, server_side=True)
        client = _load_context(tls, server=False).wrap_bio(to_client, to_server)
        for side in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise TlsError(
            f"{tls.identity.certificate} does not pass --tls-client-ca ({error.verify_message}) at other nodes"
        ) from error
    except OSError as error:
        raise TlsError(f"{tls.identity.certificate} cannot be used: {error}") from error
    names = _names(client.getpeercert())
    if not names:
        raise TlsError(f"{tls.identity.certificate} has no name (subjectAltName)")
    return names


def check_peer(writer: asyncio.StreamWriter, names: Iterable[str]) -> None:
    """Raises ``LinkEndedError`` unless the peer's certificate has one of ``names``. The certificate authority alone is
    not enough: it also signs for routers, which must not join as nodes.
    """
    if not _names(writer.get_extra_info("peercert")) & frozenset(names):
        raise LinkEndedError("has a certificate with none of the names of this node's")


def _names(certificate: Any) -> frozenset[str]:
    return frozenset(
        name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind in ("DNS", "IP Address")
    )
