"""Events that are written straight to their connection: the client gets the same, and the way is open only while it
keeps up.
"""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import uvloop
from quire_router.api.rest.answer_format import EventEncoder
from quire_router.api.rest.http import DirectWriter, HttpResponse, direct_writer
from quire_router.api.rest.http_server import HttpServer, listen
from quire_router.api.rest.sse import HEARTBEAT, KeepAlive, SseDeltaSink, SseStream
from starlette.types import Receive, Scope, Send

from tests.support.scripted_api import completion, open_stage
from tests.support.waiting import until

REQUEST = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"
Answer = Callable[[SseStream], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer, heartbeat: float = 60.0, *, ids: bool = False) -> AsyncIterator[int]:
    """A port where every request is answered by ``answer``."""

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        reply = HttpResponse(send, 20.0, "r", direct_writer(scope))
        async with SseStream(reply, KeepAlive(heartbeat, heartbeat), ids=ids) as events:
            await answer(events)
        reply.close()

    server = HttpServer(app, listen("127.0.0.1", 0, "--http-port"))
    running = asyncio.create_task(server.run_until_stopped())
    try:
        yield server.port
    finally:
        server.should_exit = True
        await running


def is_open(events: SseStream) -> bool:
    """Whether events can be written without waiting, as the sink of a stream finds."""
    return SseDeltaSink(events, cast(EventEncoder, None)).is_open


@asynccontextmanager
async def asking(port: int, request: bytes = REQUEST) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has asked, and whose socket takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    writer.write(request)
    try:
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("direct", [True, False])
async def test_the_client_gets_the_same_bytes_with_and_without_direct_writes(direct: bool, ids: bool) -> None:
    pieces = [b"data: %d\n\n" % number for number in range(200)]
    ways: list[bool] = []

    async def answer(events: SseStream) -> None:
        ways.append(is_open(events))
        for piece in pieces:
            if direct and is_open(events):
                events.write_now(piece)
                ways.append(True)
            else:
                await events.write(piece)
        await events.end(b"data: end\n\n")
        ways.append(is_open(events))

    async with serving(answer, ids=ids) as port, httpx.AsyncClient(timeout=60) as client:
        body = (await client.get(f"http://127.0.0.1:{port}/")).content
    assert re.fullmatch(rb"retry: 1\d\d\d\n", body[:12]) if ids else body.startswith(pieces[0])
    assert body[12 * ids :] == b"".join(pieces) + b"data: end\n\n"
    assert ways == [False, *[True] * 199 * direct, False], "it opens with the first event, and closes with the last"


def test_several_events_of_one_loop_iteration_are_written_directly() -> None:
    """As those of several choices do, that one step of an engine brings."""

    async def scenario() -> list[bool]:
        opened: list[bool] = []

        async def answer(events: SseStream) -> None:
            await events.write(b"data: begin\n\n")
            await until(lambda: is_open(events))
            for _ in range(8):
                opened.append(is_open(events))
                if is_open(events):
                    events.write_now(b"data: x\n\n")
            await events.end(b"data: end\n\n")

        async with serving(answer) as port, httpx.AsyncClient(timeout=60) as client:
            body = (await client.get(f"http://127.0.0.1:{port}/")).content
        assert body.count(b"data: x\n\n") == opened.count(True)
        return opened

    assert uvloop.run(scenario()) == [True] * 8


@pytest.mark.parametrize(("unwritten", "opened"), [(0, True), (4_000, True), (60_000, False)])
def test_a_small_transport_buffer_does_not_stop_direct_writes(unwritten: int, opened: bool) -> None:
    """Some versions of uvloop count what they write at the end of a turn."""
    transport = SimpleNamespace(is_closing=lambda: False, get_write_buffer_size=lambda: unwritten)
    cycle = SimpleNamespace(transport=transport)
    assert DirectWriter(cycle).is_open is opened  # type: ignore[arg-type]


async def test_direct_writes_stop_while_the_client_does_not_read_and_resume_when_it_does() -> None:
    written, closed, again = 0, asyncio.Event(), asyncio.Event()

    async def answer(events: SseStream) -> None:
        nonlocal written
        await events.write(b"data: begin\n\n")
        while is_open(events) and written < 100_000:
            events.write_now(b"data: " + b"x" * 1000 + b"\n\n")
            written += 1
        closed.set()
        await until(lambda: is_open(events))
        again.set()
        await events.end(b"data: end\n\n")

    async with serving(answer) as port, asking(port) as reader:
        await closed.wait()
        assert written < 100_000, "what one client does not read is bounded"
        assert not again.is_set()
        received = b""
        while b"data: end\n\n" not in received[-100:]:
            received += await reader.read(1 << 16)
        assert again.is_set()
        assert received.count(b"x" * 1000) == written


async def test_direct_writes_stop_once_the_client_has_disconnected() -> None:
    left = asyncio.Event()

    async def answer(events: SseStream) -> None:
        await events.write(b"data: begin\n\n")
        await until(lambda: is_open(events))
        await until(lambda: not is_open(events))
        left.set()

    async with serving(answer) as port:
        async with asking(port) as reader:
            await reader.readuntil(b"begin")
            assert not left.is_set()
        await asyncio.wait_for(left.wait(), 10)


async def test_a_response_without_a_body_has_no_direct_writes() -> None:
    opened: list[bool] = []

    async def answer(events: SseStream) -> None:
        await events.write(b"data: begin\n\n")
        opened.append(is_open(events))
        await events.end(b"data: end\n\n")

    async with serving(answer) as port, httpx.AsyncClient(timeout=60) as client:
        assert (await client.head(f"http://127.0.0.1:{port}/")).status_code == 200
    assert opened == [False]


async def test_direct_writes_resume_after_each_heartbeat() -> None:
    reopened: list[None] = []

    async def answer(events: SseStream) -> None:
        await events.write(b"data: begin\n\n")
        await asyncio.sleep(0.2)
        await until(lambda: is_open(events))  # not at this very moment: a heartbeat may be on its way
        reopened.append(None)
        await events.end(b"data: end\n\n")

    async with serving(answer, heartbeat=0.01) as port, httpx.AsyncClient(timeout=60) as client:
        body = (await client.get(f"http://127.0.0.1:{port}/")).content
    assert body.count(HEARTBEAT) > 1
    assert reopened, "it opens again after each"


async def test_a_client_that_does_not_read_is_cut_and_nothing_is_logged_as_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = json.dumps(completion(stream=True)).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    async with (
        open_stage(["x" * 1_000_000] * 8, patience=0.3) as stage,
        asking(stage.port, head % len(body) + body) as reader,
    ):
        await until(lambda: len(stage.service.concurrency) == 1)
        await until(lambda: len(stage.service.concurrency) == 0)
        assert not (await asyncio.wait_for(reader.read(), 10)).endswith(b"0\r\n\r\n"), "the answer seems complete"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
