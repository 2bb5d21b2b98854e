"""What the router costs: processor time for each streamed token and for each request, the latency that it adds, and how
several processes on one port scale. All in one run, with a steady engine behind and raw sockets before it.

    python -m tests.bench.router [--streams 256] [--tokens 200] [--workers 1,2]

Processor time is the router's own, user and system, of all its processes; the engine and the clients are other
processes. Latency: the same requests over one connection to the engine's contract and through the router, in turns.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.engine_pb2_grpc import EngineStub

from tests.bench.steady_engine import MODEL
from tests.support.processes import Process, Router, free_port
from tests.support.redis_server import redis_server

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROMPT = list(range(100, 132))


class SteadyEngineProcess(Process):
    """The steady engine, one step every ``pause`` seconds."""

    def __init__(self, folder: Path, pause: float) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.bench.steady_engine", "--port", str(self.port), "--pause", str(pause)]
        super().__init__(command, folder / f"engine-{self.port}.log")


@contextmanager
def running(folder: Path, pause: float, *flags: str) -> Iterator[tuple[SteadyEngineProcess, Router]]:
    """An engine and a router before it."""
    engine = SteadyEngineProcess(folder, pause)
    router = Router(DEMO, [f"127.0.0.1:{engine.port}"], folder, "--max-concurrent-requests", "4096", *flags)
    try:
        router.wait_ready()
        yield engine, router
    finally:
        router.stop()
        engine.kill()


def body(tokens: int, *, stream: bool) -> bytes:
    """A completion of a prompt that is tokens already."""
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    data = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def stream_one(port: int, tokens: int) -> int:
    """How many events a stream has; its client does nothing but count."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(body(tokens, stream=True))
    events, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"the stream ended early: {tail!r}")
        events += data.count(b"data: ")
        tail = tail[-16:] + data
    writer.close()
    return events


def processor_seconds(process: psutil.Process) -> float:
    """Of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def measure_streams(port: int, router: psutil.Process, streams: int, tokens: int) -> tuple[float, float]:
    """Microseconds of the router for each token, and tokens a second."""
    before, began = processor_seconds(router), time.perf_counter()
    counts = await asyncio.gather(*(stream_one(port, tokens) for _ in range(streams)))
    spent, passed = processor_seconds(router) - before, time.perf_counter() - began
    return 1e6 * spent / (streams * tokens), sum(counts) / passed


async def measure_requests(port: int, router: psutil.Process, requests: int, width: int) -> float:
    """Milliseconds of the router for each request of one token."""
    wanted, before = body(1, stream=False), processor_seconds(router)

    async def client(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            writer.write(wanted)
            await read_answer(reader)
        writer.close()

    await asyncio.gather(*(client(requests // width) for _ in range(width)))
    return 1e3 * (processor_seconds(router) - before) / requests


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """One answer of known length."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head[:20], head
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    return await reader.readexactly(length)


async def measure_latency(engine_port: int, port: int, rounds: int) -> list[float]:
    """Milliseconds that the router adds to the first token, one value for each pair of requests."""
    added = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{engine_port}") as channel:
        call = EngineStub(channel).Session()
        await call.write(pb.SessionRequest(open=pb.Open(session_id="bench")))
        await call.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(rounds):
            began = time.perf_counter()
            await direct(call, f"r{number}")
            between = time.perf_counter()
            writer.write(body(1, stream=False))
            await read_answer(reader)
            added.append(1e3 * ((time.perf_counter() - between) - (between - began)))
        writer.close()
    return added


async def direct(call: grpc.aio.StreamStreamCall, request_id: str) -> None:
    """One request of one token, without a router."""
    sampling = types_pb2.SamplingParams(max_tokens=1)
    await call.write(
        pb.SessionRequest(submit=pb.Submit(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling))
    )
    while True:
        response = await call.read()
        if any(output.request_id == request_id for output in response.step_batch.outputs):
            return


def report_one(folder: Path, options: argparse.Namespace) -> None:
    """One process: tokens, requests, latency idle and under half of the load."""
    with running(folder, 0.025) as (engine, router):
        process = psutil.Process(router.popen.pid)
        asyncio.run(measure_streams(router.http_port, process, options.streams, 20))
        costs = [
            asyncio.run(measure_streams(router.http_port, process, options.streams, options.tokens))[0]
            for _ in range(options.rounds)
        ]
        requests = [asyncio.run(measure_requests(router.http_port, process, 600, 16)) for _ in range(options.rounds)]
        print(f"a streamed token at {options.streams} streams: {statistics.median(costs):.1f} us of processor time")
        print(f"a request without tokenising:          {statistics.median(requests):.2f} ms of processor time")
    with running(folder, 0.0005) as (engine, router):
        added = sorted(asyncio.run(measure_latency(engine.port, router.http_port, 400)))
        print(f"added latency, p50 {statistics.median(added):.2f} ms, p99 {added[int(0.99 * len(added))]:.2f} ms, idle")
        added = sorted(asyncio.run(under_load(engine.port, router.http_port, 400)))
        print(
            f"added latency, p50 {statistics.median(added):.2f} ms, p99 {added[int(0.99 * len(added))]:.2f} ms, loaded"
        )


async def under_load(engine_port: int, port: int, rounds: int) -> list[float]:
    """The same, while other streams take about half of a core of the router."""
    others = [asyncio.create_task(stream_one(port, 100_000)) for _ in range(16)]
    try:
        await asyncio.sleep(0.5)
        return await measure_latency(engine_port, port, rounds)
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def report_workers(folder: Path, workers: int, options: argparse.Namespace) -> None:
    """Requests a second of several processes on one port."""
    with (
        redis_server() as redis,
        running(folder, 0.002, "--workers", str(workers), "--redis-url", redis.url) as (_, router),
    ):
        process = psutil.Process(router.popen.pid)
        began = time.perf_counter()
        spent = asyncio.run(measure_requests(router.http_port, process, 2000, 64))
        rate = 2000 / (time.perf_counter() - began)
        print(f"{workers} workers: {rate:.0f} requests/s, {spent:.2f} ms of processor time each")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="1,2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        report_one(Path(folder), options)
        for workers in map(int, options.workers.split(",")):
            report_workers(Path(folder), workers, options)


if __name__ == "__main__":
    main()
