"""A small DNS server over UDP and TCP with a test's records."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
from dns.asyncresolver import Resolver

from tests.support.ports import free_port


class DnsServer:
    """``records`` are the addresses of a name by kind, such as ``{"engines.test.": {"A": ["10.0.0.1"]}}``. A name that
    is not there does not exist. While ``silent`` it says nothing, and with ``fails`` that it cannot say.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[str, list[str]]] = {}
        self.silent = False
        self.fails = False
        self.patience = 0.2  # seconds that a resolver of it waits
        self.asked: list[tuple[str, str, str]] = []
        self.port = free_port()

    def resolver(self) -> Resolver:
        """One that asks this server, and has no more than ``patience``."""
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], self.port
        resolver.timeout = resolver.lifetime = self.patience
        return resolver

    def answer(self, question: bytes, over: str) -> bytes | None:
        query = dns.message.from_wire(question)
        [asked] = query.question
        name, kind = asked.name.to_text(), dns.rdatatype.to_text(asked.rdtype)
        self.asked.append((name, kind, over))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        if self.fails:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.records:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif addresses := self.records[name].get(kind):
            response.answer.append(dns.rrset.from_text_list(name, 5, "IN", kind, addresses))
        wire = response.to_wire(max_size=65535)
        if over == "udp" and len(wire) > 512:
            response.answer.clear()
            response.flags |= dns.flags.TC
            wire = response.to_wire()
        return wire

    async def serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(2))
        wire = self.answer(await reader.readexactly(length), "tcp")
        if wire is not None:
            writer.write(len(wire).to_bytes(2) + wire)
            await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        wire = self._server.answer(data, "udp")
        if wire is not None:
            self._transport.sendto(wire, addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """A server for the length of a block."""
    server = DnsServer()
    loop = asyncio.get_running_loop()
    address = ("127.0.0.1", server.port)
    transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(server), address)
    streams = await asyncio.start_server(server.serve_stream, *address)
    try:
        yield server
    finally:
        transport.close()
        streams.close()
