"""What one HTTP connection may make the router keep."""

import asyncio
import gc
import json
import socket
from collections.abc import Iterator

import pytest
from quire_router.api.rest.http_server import MAX_PIPELINED, ConnectionLimits, LimitedHttpProtocol

from tests.support.scripted_api import ANSWER, Answer, ask, chat, open_stage, read_answer
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
LIVE = b"GET /live HTTP/1.1\r\nhost: test\r\n\r\n"
LONG = 20  # seconds, after which a test has failed


def waiting_requests() -> int:
    """Requests that wait on a connection of this process, of the one that has most."""
    protocols = [each for each in gc.get_objects() if isinstance(each, LimitedHttpProtocol)]
    return max((len(each.pipeline) for each in protocols), default=0)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(LONG):
            return await reader.read()
    except ConnectionError:
        return b""


async def test_requests_that_wait_on_a_connection_are_answered_in_order():
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        for _ in range(3):
            writer.write(LIVE * (1 + MAX_PIPELINED))
            answers = [await read_answer(reader) for _ in range(1 + MAX_PIPELINED)]
            assert {answer.status for answer in answers} == {200}
        writer.close()


async def test_requests_that_wait_on_a_connection_are_bounded():
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        reading = asyncio.ensure_future(read_all(reader))
        for _ in range(20):
            if writer.transport.is_closing():
                break
            writer.write(LIVE * 2_000)
            await asyncio.sleep(0.01)
            assert waiting_requests() <= 1 + MAX_PIPELINED
        said = await reading
        writer.close()
    assert b"requests wait on this connection" in said or not said
    assert said.count(b"HTTP/1.1 200") < 20 * 2_000


def asking(**fields: object) -> bytes:
    """A whole chat request."""
    body = json.dumps(chat(**fields)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("leaves", ["closes", "half-closes", "aborts"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("behind", [b"", b"G", LIVE, LIVE * 3], ids=["nothing", "a byte", "a request", "requests"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_behind_its_request(behind, stream, leaves):
    """Nothing is read while requests wait, and so not the end either."""
    async with open_stage([asyncio.Event()]) as stage, asyncio.timeout(LONG):
        _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(asking(stream=stream))
        await stage.runner.started.wait()
        writer.write(behind)
        await asyncio.sleep(0.05)
        if leaves == "half-closes":
            writer.write_eof()
        else:
            (writer.close if leaves == "closes" else writer.transport.abort)()
        await stage.runner.abandoned.wait()
        await until(lambda: len(stage.service.concurrency) == 0)
        writer.close()


async def test_a_client_that_waits_for_several_answers_gets_them():
    """Also when it is looked for several times meanwhile."""
    gate = asyncio.Event()
    async with open_stage([gate, *ANSWER]) as stage, asyncio.timeout(LONG):
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(asking() + LIVE * 2 + asking())
        asyncio.get_running_loop().call_later(2.5, gate.set)
        answers = [await read_answer(reader) for _ in range(4)]
        writer.close()
    assert [answer.status for answer in answers] == [200] * 4
    assert ["choices" in answer.json for answer in (answers[0], answers[3])] == [True, True]


async def test_too_many_requests_behind_a_stream_are_not_refused_in_the_midst_of_it():
    gate = asyncio.Event()
    async with open_stage(["one", gate, *ANSWER]) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(asking(stream=True))
        said = await reader.readuntil(b'"one"')
        writer.write(LIVE * 3 * MAX_PIPELINED)
        said += await read_all(reader)
        writer.close()
    assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("behind", [b"5;a=", b"0\r\nx-a: "], ids=["extension", "trailer"])
async def test_chunk_extensions_are_not_collected(behind):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(head.encode() + b"1\r\n{\r\n" + behind)
        reading, sent = asyncio.ensure_future(read_all(reader)), 0
        for _ in range(100):
            if reading.done():
                break
            writer.write(b"y" * 4096)
            sent += 4096
            await asyncio.sleep(0.01)
        assert reading.done(), f"the server read {sent} bytes of it"
        assert b" 431 " in await reading or not await reading
        writer.close()


async def test_a_body_in_many_small_chunks_is_taken():
    body = json.dumps(chat("x" * 20_000)).encode()
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(head.encode() + chunks + b"0\r\nx-sum: 1\r\n\r\n")
        answer = await read_answer(reader)
        writer.close()
    assert answer.status in (200, 400)


@pytest.mark.parametrize("at_a_time", [1, 100_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_offer_is_answered_in_http_1_1_and_keeps_the_connection(chunked, at_a_time):
    body = json.dumps(chat()).encode()
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk"
    head = b"POST %b HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n%b\r\n%b\r\n\r\n"
    sent = (head % (CHAT.encode(), offer, length) + body) * 2 + LIVE
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        for start in range(0, len(sent), at_a_time):
            writer.write(sent[start : start + at_a_time])
            await asyncio.sleep(0)
        answers = [await asyncio.wait_for(read_answer(reader), LONG) for _ in range(3)]
        writer.close()
    assert [answer.status for answer in answers] == [200] * 3
    assert [generation.operation for generation in stage.runner.generations] == ["chat"] * 2


def open_protocols() -> Iterator[LimitedHttpProtocol]:
    """Those of connections that have not ended."""
    return (each for each in gc.get_objects() if isinstance(each, LimitedHttpProtocol) and each in each.connections)


async def unread(port: int) -> tuple[socket.socket, LimitedHttpProtocol]:
    """A client that has read none of its answers, of which the last ones are still here, too few to stop more."""
    before = set(map(id, open_protocols()))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(("127.0.0.1", port))
    await until(lambda: len(set(map(id, open_protocols())) - before) == 1)
    (protocol,) = (each for each in open_protocols() if id(each) not in before)
    protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client.setblocking(False)
    while protocol.transport.get_write_buffer_size() < 1_000:
        former = protocol.cycle
        await asyncio.get_running_loop().sock_sendall(client, LIVE)
        await until(lambda former=former: protocol.cycle is not former and protocol.cycle.response_complete)
    return client, protocol


@pytest.mark.parametrize("last", [b"", LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"?\r\n\r\n"])
async def test_a_connection_whose_responses_are_not_read_is_closed(last: bytes) -> None:
    async with open_stage(limits=ConnectionLimits(idle=1.0, head=0.5)) as stage:
        client, protocol = await unread(stage.port)
        await asyncio.get_running_loop().sock_sendall(client, last)
        await until(lambda: protocol not in protocol.connections)
        client.close()


async def test_an_evicted_idle_connection_is_closed_even_if_its_responses_are_not_read() -> None:
    async with open_stage(limits=ConnectionLimits(connections=1)) as stage:
        client, protocol = await unread(stage.port)
        assert (await ask(stage.port, "GET", "/live")).status == 200
        await until(lambda: protocol not in protocol.connections)
        client.close()


def post(body: bytes, version: str = "1.1", *headers: str, size: int = 0) -> bytes:
    """A request whose length is that of ``body``, or ``size``."""
    lines = [f"POST {CHAT} HTTP/{version}", "host: test", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {size or len(body)}", "", ""]).encode() + body


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_chunked_in_http_1_0(stream: bool) -> None:
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(post(json.dumps(chat(stream=stream)).encode(), "1.0"))
        head, _, body = (await asyncio.wait_for(reader.read(), LONG)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert (b"content-length" in head) is not stream
    if stream:
        answer = Answer(200, {}, body)
        assert answer.events[-1] == "[DONE]"
        pieces = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
        assert "".join(pieces) == "Hello wörld"
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "Hello wörld"


@pytest.mark.parametrize(("version", "headers"), [("1.0", ()), ("1.1", ("connection: close",))])
async def test_a_body_that_is_refused_on_its_last_connection_is_read_to_its_end(
    version: str, headers: tuple[str, ...]
) -> None:
    """A proxy that cannot send it all, or hears a reset, says 502 and not what the router said."""
    loop = asyncio.get_running_loop()
    async with open_stage(max_body_bytes=1000) as stage:
        with socket.create_connection(("127.0.0.1", stage.port)) as client:
            client.setblocking(False)
            async with asyncio.timeout(LONG):
                await loop.sock_sendall(client, post(b"x" * 2**25, version, *headers))  # far more than sockets hold
                said = b""
                while data := await loop.sock_recv(client, 65536):
                    said += data
    assert said.startswith(b"HTTP/1.1 413 ")
    assert said.count(b"HTTP/1.1") == 1


async def test_a_client_that_goes_on_sending_what_was_refused_is_disconnected() -> None:
    async with open_stage(max_body_bytes=1000, limits=ConnectionLimits(head=0.1)) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(post(b"x", "1.1", "connection: close", size=2**40))
        assert (await read_answer(reader)).status == 413
        assert await asyncio.wait_for(reader.read(), LONG) == b""

        async def send_on() -> None:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_on(), LONG)
        writer.close()


async def test_connections_whose_refused_bodies_are_thrown_away_keep_nobody_out() -> None:
    limits = ConnectionLimits(connections=3, peer_share=1.0)
    async with open_stage(max_body_bytes=1000, limits=limits) as stage:
        writers = []
        for _ in range(4 * limits.connections):  # the oldest one gives way
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writers.append(writer)
            writer.write(post(b"x", size=2**40))
            assert (await asyncio.wait_for(read_answer(reader), LONG)).status == 413
        for writer in writers:
            writer.close()
