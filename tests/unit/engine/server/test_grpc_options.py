"""An engine's gRPC server answers every ping, however many come at once."""

import asyncio

import grpc
from quire_engine.server.grpc_options import server_options

from tests.support.http2 import ACK, GOAWAY, PING, SETTINGS, frame, opening

PINGS = 500


async def test_pings_that_come_in_a_bunch_end_no_connection() -> None:
    """A router that was held up sends what it owes at once. gRPC's defaults allow two pings in five minutes."""
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(opening())
        assert (await next_frame(reader))[0] == SETTINGS
        async with asyncio.timeout(20):
            for count in (PINGS, 1):  # what ends a connection follows the answers
                writer.write(frame(PING, 0, 0, bytes(8)) * count)
                answers = 0
                while answers < count:
                    kind, flags = await next_frame(reader)  # raises where the server closes the connection
                    assert kind != GOAWAY
                    answers += (kind, flags) == (PING, ACK)
    finally:
        writer.close()
        await server.stop(None)


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    """The kind and the flags of the frame that comes next."""
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3]))
    return head[3], head[4]
