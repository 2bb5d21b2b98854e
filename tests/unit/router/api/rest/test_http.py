"""What the REST ports make of heads and trailers that HTTP forbids, or that ask for another protocol."""

import asyncio
import json
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.api.rest.http_server import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    ConnectionLimits,
    HttpServer,
    LimitedHttpProtocol,
    http_config,
    listen,
)
from uvicorn.server import ServerState

from tests.support.scripted_api import Answer, ask, chat, open_stage, read_answer
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
KEY = "a-key-that-is-right"
LONG = 20  # seconds, after which a test has failed
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


class Counting(LimitedHttpProtocol):
    """Counts the heads that are parsed, and the deepest stack that one is parsed on."""

    heads, deepest = 0, 0

    def on_message_begin(self) -> None:
        frame, depth = sys._getframe(), 0
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            depth += 1
        self.heads, self.deepest = self.heads + 1, max(self.deepest, depth)
        super().on_message_begin()


class Sink(asyncio.Transport):
    """Takes what is written, and notes that it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Reads on."""

    resume_reading = write_eof = pause_reading


async def echo_nothing(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def fed(data: bytes, at_a_time: int = 1 << 20) -> tuple[Counting, Sink]:
    """A connection that has received ``data``."""
    protocol = Counting(http_config(echo_nothing, ConnectionLimits()), ServerState(), {}, asyncio.get_running_loop())
    sink = Sink()
    protocol.connection_made(sink)
    for start in range(0, len(data), at_a_time):
        protocol.data_received(data[start : start + at_a_time])
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    return protocol, sink


async def raw(port: int, sent: bytes) -> Answer:
    """The one answer to what is sent, after which the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = await asyncio.wait_for(read_answer(reader), LONG)
    assert await asyncio.wait_for(reader.read(), LONG) == b""
    writer.close()
    return answer


async def test_what_comes_behind_a_refused_body_is_no_request_while_its_response_waits_for_the_client() -> None:
    asked: list[str] = []

    async def refuse(scope: Any, _receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        protocol.pause_writing()  # the client does not read
        await send({"type": "http.response.body", "body": b"no"})

    protocol = Counting(http_config(refuse, ConnectionLimits()), ServerState(), {}, asyncio.get_running_loop())
    sink = Sink()
    protocol.connection_made(sink)
    protocol.data_received(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
    await until(lambda: bool(asked))
    protocol.data_received(b"xyzPOST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    protocol.resume_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    assert asked == ["/a"]
    assert sink.written.endswith(b"\r\n\r\nno")


# Other protocols


@pytest.mark.parametrize("target", [b"/", b"/x", b"*", b"http://x/y", b"x:443", b"x"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_connect_costs_no_more_than_a_get(target: bytes, version: bytes) -> None:
    protocol, sink = await fed(b"CONNECT %b HTTP/%b\r\nhost: x\r\n\r\n" % (target, version))
    plain, _ = await fed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (protocol.heads, protocol.deepest) == (plain.heads, plain.deepest)
    assert sink.closing


async def test_an_offer_of_another_protocol_is_parsed_twice_at_most() -> None:
    protocol, _ = await fed(b"GET / HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n")
    plain, _ = await fed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert protocol.heads == 2 * plain.heads
    assert protocol.deepest <= plain.deepest + 2


@pytest.mark.parametrize("target", ["/", "*", "x:443", CHAT])
@pytest.mark.parametrize("of_metrics", [False, True])
async def test_connect_is_refused_with_a_message_on_both_ports(target: str, of_metrics: bool) -> None:
    async with open_stage() as stage:
        port = stage.admin_port if of_metrics else stage.port
        answer = await raw(port, f"CONNECT {target} HTTP/1.1\r\nhost: x\r\n\r\nGET /live HTTP/1.1\r\n\r\n".encode())

    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]
    assert answer.headers["connection"] == "close"


TOKENS = st.text("abcXYZ019-_", min_size=1, max_size=8).map(str.encode)
METHODS = st.sampled_from([b"GET", b"POST", b"CONNECT", b"OPTIONS", b"PRI", b"M-SEARCH", b"DELETE"]) | TOKENS
TARGETS = st.sampled_from([b"/", b"*", b"/live", b"x:443", b"http://x/y", b"//", b"", b"/%ff", b"/\xff", b"?a"])
VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/3", b"", b"x"])
KNOWN = [
    b"host: x", b"host: y", b"connection: upgrade", b"connection: close", b"Connection: keep-alive, Upgrade",
    b"proxy-connection: upgrade", b"upgrade: websocket", b"upgrade: h2c", b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked", b"content-length: 3", b"content-length: 0", b"expect: 100-continue", b"te: x",
]  # fmt: skip
HEADERS = st.sampled_from(KNOWN) | st.tuples(TOKENS, TOKENS).map(b": ".join) | st.binary(max_size=10)
BODIES = st.sampled_from([b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", b"0\r\na: b\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    line = b" ".join([draw(METHODS), draw(TARGETS), draw(VERSIONS)])
    return b"\r\n".join([line, *draw(st.lists(HEADERS, max_size=6)), b"", b""]) + draw(BODIES)


@settings(max_examples=75, deadline=None)
@given(sent=st.lists(requests(), min_size=1, max_size=4), at_a_time=st.sampled_from([1, 7, 1 << 20]))
def test_no_head_is_parsed_again_and_again_or_raises(sent: list[bytes], at_a_time: int) -> None:
    async def feed() -> Counting:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        protocol, _ = await fed(b"".join(sent), at_a_time)
        assert errors == []
        return protocol

    protocol = asyncio.run(feed())
    # A body may hold one request more, and each may offer another protocol.
    assert protocol.heads <= 4 * len(sent)
    assert protocol.deepest < 100


# Heads


async def status_of(head: str, port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n\r\n")
    answer = await asyncio.wait_for(read_answer(reader), LONG)
    writer.close()
    return answer.status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /live HTTP/1.1\r\nhost: x", 200),
        ("GET /live HTTP/1.0", 200),
        ("GET /live HTTP/1.0\r\nhost: x:8000", 200),
        ("GET /live HTTP/1.1\r\nhost: [::1]:8000", 200),
        ("GET /live HTTP/1.1\r\nhost:", 200),
        ("GET /live HTTP/1.1", 400),
        ("GET /live HTTP/1.1\r\nhost: x\r\nhost: x", 400),
        ("GET /live HTTP/1.1\r\nhost: x\r\nHost: y", 400),
        ("GET /live HTTP/1.0\r\nhost: x\r\nhost: x", 400),
        ("GET /live HTTP/1.1\r\nhost: x/y", 400),
        ("GET /live HTTP/1.1\r\nhost: a b", 400),
        ("GET /live", 400),
        ("GET /live HTTP/0.9", 400),
        ("GET /live HTTP/2.0\r\nhost: x", 505),
        ("POST /live HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked", 400),
        ("POST /live HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked", 501),
        ("POST /live HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked", 501),
        ("POST /live HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked", 405),
    ],
)
@pytest.mark.parametrize("offers", [False, True])
async def test_a_head_that_others_may_read_differently_is_refused(head: str, status: int, offers: bool) -> None:
    head = head + "\r\n" + OFFER.decode().rstrip() if offers and "HTTP/" in head else head
    async with open_stage() as stage:
        assert await status_of(head, stage.port) == status


async def test_headers_are_bounded_in_number() -> None:
    async with open_stage() as stage:
        few = "".join(f"\r\na{number}: 1" for number in range(MAX_HEADERS - 1))
        assert await status_of(f"GET /live HTTP/1.1\r\nhost: x{few}", stage.port) == 200
        assert await status_of(f"GET /live HTTP/1.1\r\nhost: x{few}\r\nb: 1", stage.port) == 431
        answer = await raw(stage.port, b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a:1\r\n" * 3_000 + b"\r\n")
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


# Trailers


def chunked(path: str, trailers: bytes, head: bytes = b"") -> bytes:
    body = json.dumps(chat()).encode()
    start = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n%b\r\n"
    return start % (path.encode(), head) + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


async def test_a_key_in_a_trailer_is_no_key() -> None:
    trailer = f"authorization: Bearer {KEY}\r\n".encode()
    async with open_stage(keys=[KEY]) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(chunked(CHAT, trailer) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = [await asyncio.wait_for(read_answer(reader), LONG) for _ in range(2)]
        writer.close()

    assert [answer.status for answer in answers] == [401, 401]
    assert stage.runner.generations == []


async def test_an_idempotency_key_in_a_trailer_is_none() -> None:
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(chunked(CHAT, b"Idempotency-Key: one\r\n") * 2)
        answers = [await asyncio.wait_for(read_answer(reader), LONG) for _ in range(2)]
        writer.close()

    assert [answer.status for answer in answers] == [200, 200]
    assert [generation.digest for generation in stage.runner.generations] == ["", ""]


@pytest.mark.parametrize("key", [KEY, "wrong"], ids=["waiting for the body", "answered before it"])
async def test_trailers_without_end_are_answered_once_and_end_the_connection(key: str) -> None:
    head = f"authorization: Bearer {key}\r\n".encode()
    trailers = b"x-a: " + b"y" * (MAX_HEAD_BYTES + 1000) + b"\r\n"
    sent = chunked(CHAT, trailers, head)
    async with open_stage(keys=[KEY]) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        parts = sent.split(b"\r\n0\r\n")
        writer.write(parts[0])
        if key == "wrong":
            assert (await asyncio.wait_for(read_answer(reader), LONG)).status == 401
        writer.write(b"\r\n0\r\n" + parts[1])
        try:
            said = await asyncio.wait_for(reader.read(), LONG)
        except ConnectionError:
            said = b""
        writer.close()

    statuses = Counter(line.split()[1] for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1"))
    assert statuses in ([Counter()] if key == "wrong" else [Counter(), Counter({b"431": 1})])
    assert stage.runner.generations == []


async def test_long_trailers_within_the_limit_are_read_over() -> None:
    async with open_stage() as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(chunked(CHAT, b"x-sum: " + b"y" * (MAX_HEAD_BYTES - 1000) + b"\r\n"))
        answer = await asyncio.wait_for(read_answer(reader), LONG)
        again = await ask(stage.port, "GET", "/live")
        writer.close()
    assert (answer.status, again.status) == (200, 200)


# The server below


OF_A_CONNECTION = {
    "_start_asgi_task", "_unset_keepalive_if_required", "app_state", "connections", "cycle", "flow", "headers", "loop",
    "parser", "pipeline", "scope", "transport", "url",
}  # fmt: skip
OF_A_CYCLE = {
    "body", "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event", "more_body",
    "response_complete", "response_started", "scope", "transport",
}  # fmt: skip
OF_A_SERVER = {"capture_signals", "on_tick", "serve", "server_state", "should_exit"}


async def test_what_uvicorn_does_not_promise_is_there_in_the_minor_version_that_is_pinned() -> None:
    project = tomllib.loads((Path(__file__).parents[5] / "router/pyproject.toml").read_text())["project"]
    (pin,) = [each for each in project["dependencies"] if each.startswith("uvicorn")]
    major, minor = map(int, metadata.version("uvicorn").split(".")[:2])
    assert pin == f"uvicorn>={major}.{minor},<{major}.{minor + 1}"
    protocol, _ = await fed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    # Attributes that are no methods exist on instances only.
    assert {name for name in OF_A_CONNECTION if not hasattr(protocol, name)} == set()
    assert {name for name in OF_A_CYCLE if not hasattr(protocol.cycle, name)} == set()
    server = HttpServer(echo_nothing, listen("127.0.0.1", 0, "--http-port"))
    server._listener.close()
    assert {name for name in OF_A_SERVER if not hasattr(server, name)} == set()
    assert vars(ServerState()).keys() >= {"connections", "tasks"}
