"""An OpenAI-compatible server over raw sockets, whose answers a test scripts byte for byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"

Answer = Callable[["Peer", dict[str, Any]], Awaitable[None]]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = " a", finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def response(status: int, body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} No", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass
class Peer:
    """One connection, as an answer sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hang(self) -> None:
        """Until the client leaves."""
        await self.reader.read()


@dataclass
class SseServer:
    """Answers every POST with ``answer``. ``bodies`` are what was asked, ``paths`` and ``headers`` where and how, and
    ``most_running`` how many ran at once at most.
    """

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._respond(head.decode(), Peer(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _respond(self, head: str, peer: Peer) -> None:
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        method, path, _ = first.split(" ")
        if method == "GET":
            await peer.send(response(200, {"data": [{"id": "scripted"}]}))
            return
        self.bodies.append(json.loads(await peer.reader.readexactly(int(headers["content-length"]))))
        self.paths.append(path)
        self.headers.append(headers)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.answer(peer, self.bodies[-1])
        finally:
            self.running -= 1


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[SseServer]:
    server = SseServer(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


def stream(*pieces: bytes, done: bool = True) -> Answer:
    """Sends the pieces as a stream that ends as it should."""

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        await peer.send(HEAD)
        for piece in (*pieces, *([DONE] if done else [])):
            await peer.send(chunk(piece))
        await peer.send(END)

    return answer
