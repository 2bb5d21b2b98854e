"""A router before a steady engine, and raw clients of it, for benchmarks."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.bench.steady_engine import DEMO, MODEL
from tests.support.ports import free_port
from tests.support.processes import Process, Router

PROMPT = list(range(100, 132))


class SteadyEngineProcess(Process):
    """The steady engine, one step every ``pause`` seconds."""

    def __init__(self, folder: Path, pause: float, model: str = MODEL) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.bench.steady_engine", "--port", str(self.port)]
        command += ["--pause", str(pause), "--model", model]
        super().__init__(command, folder / f"engine-{self.port}.log")


@contextmanager
def running(folder: Path, pause: float, *flags: str, engines: int = 1) -> Iterator[tuple[SteadyEngineProcess, Router]]:
    """The first of so many engines, and a router before them."""
    with ExitStack() as stack:
        started = []
        for _ in range(engines):
            started.append(SteadyEngineProcess(folder, pause))
            stack.callback(started[-1].kill)
        addresses = [f"127.0.0.1:{engine.port}" for engine in started]
        router = Router(DEMO, addresses, folder, "--max-concurrent-requests", "4096", *flags)
        stack.callback(router.stop)
        router.wait_ready()
        yield started[0], router


def body(tokens: int, *, stream: bool, model: str = MODEL, number: int = 0) -> bytes:
    """A completion of a prompt that is tokens already, others for each ``number``: a router sends equal prompts to one
    engine.
    """
    prompt = [100 + number, *PROMPT[1:]]
    request = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    data = json.dumps(request).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def stream_one(port: int, tokens: int, counts: list[int], number: int) -> None:
    """A client that does nothing but count the events of its stream, in its place of ``counts``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(body(tokens, stream=True, number=number))
    tail = b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"the stream ended early: {tail!r}")
        counts[number] += data.count(b"data: ")
        tail = tail[-16:] + data
    writer.close()


def processor_seconds(process: psutil.Process) -> float:
    """Of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """One answer of known length."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head[:20], head
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    return await reader.readexactly(length)
