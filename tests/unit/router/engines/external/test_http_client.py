"""Requests of HTTP to servers: events that come in pieces, errors in every shape, and answers without an end."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import process_time
from typing import Any, TypeVar

import aiohttp
import pytest
from quire_proto.tls import ClientTls
from quire_router.engines.base import Offload, on_any_thread
from quire_router.engines.external import http_client
from quire_router.engines.external.http_client import (
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    BadAnswer,
    HttpClient,
    Json,
    ServerError,
    _Lines,
    explain,
    is_refusal,
)

from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority
from tests.support.ports import free_port

T = TypeVar("T")
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes, offload: Offload = on_any_thread) -> AsyncIterator[HttpClient]:
    """A client of a server that sends these bytes, one write each, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", offload=offload)
        try:
            yield client
        finally:
            await client.close()


async def events(client: HttpClient) -> list[Json]:
    return [event async for event in client.stream("/", b"{}", {})]


async def test_events_may_come_in_any_pieces() -> None:
    stream = b': keep-alive\n\ndata: {"a": 1}\r\n\r\ndata:{"a": 2}\n\ndata: [DONE]\n\n'
    async with answering(OK, *(bytes([byte]) for byte in stream)) as client:
        assert await events(client) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "excess", [b"[1" + b",1" * (2**20 + 1) + b"]", b"[" + b"{}," * 2**18 + b"1]"], ids=["values", "objects"]
)
async def test_an_event_with_too_many_values_is_not_parsed(excess: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client.json, "loads", lambda _: pytest.fail("it was parsed"))
    async with answering(OK, b'data: {"a": ' + excess + b"}\n\n") as client:
        with pytest.raises(BadAnswer, match="too many values"):
            await events(client)


async def test_an_event_has_as_many_values_as_its_request_may_have_and_no_more() -> None:
    event = b'data: {"a": [1' + b",1" * 20_000 + b"]}\n\n"
    for most in (20_000, 19_999):
        async with answering(OK, event) as client:
            stream = client.stream("/", b"{}", {}, read=lambda found: len(found["a"]), max_values=most)
            if most == 20_000:
                assert [count async for count in stream] == [20_001]
            else:
                with pytest.raises(BadAnswer, match="too many values"):
                    await anext(stream)


async def test_long_events_are_read_on_a_thread_and_short_ones_at_once() -> None:
    found: list[bool] = []
    tenants: list[str] = []

    async def offload(tenant: str, work: Callable[[], T]) -> T:
        tenants.append(tenant)
        return await on_any_thread(tenant, work)

    short, long = b'data: {"a": 1}\n\n', b'data: {"a": "' + b"x" * 20_000 + b'"}\n\n'
    async with answering(OK, short + long, offload=offload) as client:
        stream = client.stream(
            "/",
            b"{}",
            {},
            read=lambda _: found.append(threading.current_thread() is threading.main_thread()),
            tenant="t",
        )
        assert [event async for event in stream] == [None, None]
    async with answering(OK, b'{"a": "' + b"x" * 20_000 + b'"}', offload=offload) as client:
        assert len((await client.get_json("/"))["a"]) == 20_000
        assert tenants == ["t", client._url]
    assert found == [True, False]


def test_a_line_in_many_pieces_is_read_once() -> None:
    lines, begun = _Lines(), process_time()
    for _ in range(15_000):
        assert not list(lines.feed(b"x" * 1024))
    (line,) = lines.feed(b"\n")
    assert len(line) == 15_000 * 1024
    assert process_time() - begun < 3


async def test_a_stream_may_end_without_saying_so() -> None:
    async with answering(OK, b'data: {"a": 1}\n\ndata: {"a"') as client:
        assert await events(client) == [{"a": 1}]


async def test_an_event_without_an_end_is_not_kept() -> None:
    async with answering(OK, b"data: " + b"x" * (MAX_EVENT_BYTES + 1)) as client:
        with pytest.raises(BadAnswer, match="too long"):
            await events(client)


async def test_an_answer_without_an_end_is_not_kept() -> None:
    async with answering(OK, b"x" * (MAX_ANSWER_BYTES + 1)) as client:
        with pytest.raises(BadAnswer, match="too long"):
            await client.get("/metrics")


@pytest.mark.parametrize("body", [b"data: nonsense\n\n", b"data: [1]\n\n"])
async def test_what_is_no_object_of_json_is_no_event(body: bytes) -> None:
    async with answering(OK, body) as client:
        with pytest.raises(BadAnswer):
            await events(client)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"error": {"message": "too\n long", "code": 400}}, 400, "too long"),
        ({"error": {"message": "busy", "code": 503}}, 503, "busy"),
        ({"error": {"message": "odd", "code": "x"}}, 500, "odd"),
        ({"error": "Unauthorized"}, 500, "Unauthorized"),
        ({"error": {}}, 500, ""),
    ],
)
def test_errors_within_a_stream_have_the_status_that_they_name(body: Any, status: int, message: str) -> None:
    error = ServerError.of(200, body)
    assert (error.status, error.message) == (status, message)


def test_an_error_without_a_code_means_what_the_kind_of_server_means_by_it() -> None:
    assert ServerError.of(200, {"error": {"message": "too long"}}, 400).status == 400
    assert ServerError.of(200, {"error": "too long"}, 400).status == 400
    assert ServerError.of(200, {"error": {"message": "busy", "code": 503}}, 400).status == 503
    assert ServerError.of(502, {"error": {"message": "gone"}}, 400).status == 502


def test_errors_are_read_whatever_their_shape() -> None:
    assert ServerError.of(404, {"detail": "Not Found"}).message == "Not Found"
    assert ServerError.of(422, {"object": "error", "message": "no"}).message == "no"
    assert ServerError.of(400, [1]).status == 400
    assert len(ServerError.of(400, {"message": "x" * 10_000}).message) == 300


async def test_an_error_that_is_no_json_has_its_status() -> None:
    async with answering(b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\n\r\n<html>") as client:
        with pytest.raises(ServerError, match="502"):
            await events(client)


async def test_redirects_are_not_followed() -> None:
    async with answering(b"HTTP/1.1 302 Found\r\nlocation: http://169.254.1.1/\r\nconnection: close\r\n\r\n") as client:
        with pytest.raises(ServerError, match="302"):
            await client.get("/health")


async def test_an_address_where_nobody_listens_is_told_from_a_broken_connection() -> None:
    client = HttpClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Exception) as refused:
        await client.get("/health")
    await client.close()
    assert is_refusal(refused.value)
    assert explain(refused.value) == "connection refused"
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc") as client:
        with pytest.raises(Exception) as broken:
            await client.get("/health")
    assert not is_refusal(broken.value)
    assert explain(broken.value) == "the connection broke"


# TLS


@asynccontextmanager
async def answering_over_tls(authority: Authority, *, asks_for_one: bool = False) -> AsyncIterator[str]:
    """The URL of a server with a certificate for ``ENGINE_NAME``, which may ask for one of its client."""
    files = authority.issue(ENGINE_NAME)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    if asks_for_one:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.ca)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b'{"a": 1}')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_of(url: str, tls: ClientTls | None) -> Json:
    client = HttpClient(url, tls=tls)
    try:
        return await client.get_json("/")
    finally:
        await client.close()


async def test_a_server_is_believed_by_the_authority_and_the_name_that_were_set(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger")
    async with answering_over_tls(authority) as url:
        assert await answer_of(url, ClientTls(authority.ca, name=ENGINE_NAME)) == {"a": 1}
        for tls in (ClientTls(authority.ca), ClientTls(stranger.ca, name=ENGINE_NAME), None):
            with pytest.raises(aiohttp.ClientConnectorCertificateError) as refused:
                await answer_of(url, tls)
            assert "certificate" in explain(refused.value).lower()


async def test_a_certificate_is_shown_to_a_server_that_asks_for_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with answering_over_tls(authority, asks_for_one=True) as url:
        identity = authority.issue(ROUTER_NAME, files="router")
        assert await answer_of(url, ClientTls(authority.ca, identity, ENGINE_NAME)) == {"a": 1}
        with pytest.raises((aiohttp.ClientError, OSError)):
            await answer_of(url, ClientTls(authority.ca, name=ENGINE_NAME))
