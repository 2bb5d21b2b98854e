"""A connection stays open behind an answer, unless the answer says ``Connection: close`` (RFC 9112, 9.6)."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason

from tests.support.scripted_api import ANSWER, MODEL, Answer, Script, Stage, chat, completion, open_stage, read_answer

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, completion()),
    (COMPLETIONS, completion(["a", "b", "c"])),
    (COMPLETIONS, completion(["a", "b"], n=2, stream_options={"include_usage": True})),
    (COMPLETIONS, completion(n=3)),
    (CHAT, chat(n=2)),
    (MESSAGES, chat(max_tokens=5)),
    (RESPONSES, {"model": MODEL, "input": "hello"}),
]
FAILS: Script = ("Hel", QuireError(ErrorCode.INTERNAL, "It broke."))
SCRIPTS: list[Script] = [ANSWER, (FinishReason.STOP,), FAILS]


def request(method: str, path: str, body: object = None, **headers: str) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    given = {"host": "test", "content-type": "application/json", "content-length": str(len(payload)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


class Connection:
    """One connection, and the answers that come on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, stage: Stage) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", stage.port))

    async def ask(self, sent: bytes) -> Answer:
        self.writer.write(sent)
        return await read_answer(self.reader)

    async def is_as_said(self, answer: Answer) -> bool:
        """Whether the connection was closed if the answer says so, and else answers another request."""
        if answer.headers.get("connection") == "close":
            return await self.reader.read() == b""
        return (await self.ask(request("GET", "/v1/models"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=["an answer", "an empty one", "an error"])
async def test_a_connection_stays_open_behind_an_answer(script: Script, stream: bool) -> None:
    async with open_stage(script) as stage:
        connection = await Connection.to(stage)
        for path, body in BODIES:
            if not stream:
                body.pop("stream_options", None)
            for headers in ({}, {"idempotency-key": f"{path} {body}"[:64]}):
                answer = await connection.ask(request("POST", path, {**body, "stream": stream}, **headers))
                assert "connection" not in answer.headers
        assert await connection.is_as_said(answer)
        connection.writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        request("GET", "/v1/models", connection="close"),
        request("GET", "/v1/models").replace(b"HTTP/1.1", b"HTTP/1.0"),
        request("GET", "/nothing"),
        request("DELETE", CHAT),
        request("POST", CHAT, {"model": "other"}),
        request("POST", CHAT, chat(), **{"content-type": "text/plain"}),
        request("POST", CHAT, "x" * 200_000),
        request("POST", CHAT, chat("x" * 1000)).replace(b"1.1\r\n", b"1.1\r\nexpect: 100-continue\r\n", 1),
        request("GET", "/v1/models", **{f"x-{number}": "x" for number in range(200)}),
        request("GET", "/v1/models", large="x" * 20_000),
        request("GET", "/v1/models", **{"transfer-encoding": "gzip"}),
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"nothing that is HTTP\r\n\r\n",
        request("GET", "/health"),
        request("GET", "/v1/requests/none/events"),
    ],
)
async def test_an_answer_says_whether_it_is_the_last(sent: bytes) -> None:
    async with open_stage() as stage:
        connection = await Connection.to(stage)
        connection.writer.write(sent)
        if b"expect: 100-continue" in sent:
            await connection.reader.readuntil(b"\r\n\r\n")
        answer = await read_answer(connection.reader)
        assert await connection.is_as_said(answer)
        connection.writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/ready", "/health", "/nothing"])
async def test_every_answer_of_a_router_that_leaves_is_the_last(path: str) -> None:
    async with open_stage(keys=["k" * 16]) as stage:
        stage.service.concurrency.start_draining()
        for headers in ({}, {"x-api-key": "k" * 16}):
            connection = await Connection.to(stage)
            answer = await connection.ask(request("GET", path, **headers))
            assert answer.headers["connection"] == "close"
            assert await connection.is_as_said(answer)
            connection.writer.close()


async def test_a_client_that_keeps_its_connection_never_finds_it_closed() -> None:
    async with open_stage() as stage, httpx.AsyncClient(base_url=stage.url) as client:
        for _ in range(5):
            for path, body in BODIES:
                answer = await client.post(path, json={**body, "stream": True})
                assert answer.status_code == 200
        pool: Any = client._transport._pool  # type: ignore[attr-defined]
        assert len(pool.connections) == 1
