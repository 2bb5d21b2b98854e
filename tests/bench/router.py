"""What the router costs: processor time for each streamed token and for each request, the latency that it adds, and how
several processes on one port scale. All in one run, with a steady engine behind and raw sockets before it.

    python -m tests.bench.router [--streams 256] [--tokens 200] [--workers 1,2] [--parts streams,latency,workers]

Processor time is the router's own, user and system, of all its processes; the engine and the clients are other
processes. A token's is taken while all streams run, so that it has no part of a request's. The floor is what the kernel
takes to send one event on a socket of this machine, whoever does it. Latency: the same requests over one connection to
the engine's contract and through the router, in turns.
"""

import argparse
import asyncio
import json
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import cast

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
PAUSE = 0.04  # seconds between two steps: with 256 streams, half of a core or so is left to spare
EVENT_BYTES = 220
REQUESTS, LOADED_REQUESTS = 600, 2_000


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
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def stream_one(port: int, tokens: int, counts: list[int], number: int) -> None:
    """A client that does nothing but count the events of its stream, in its place of ``counts``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(body(tokens, stream=True))
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


@dataclass(frozen=True, slots=True)
class Streaming:
    """Microseconds of the router for each event, and events a second, while all streams ran."""

    cost: float
    rate: float


async def measure_streams(port: int, router: psutil.Process, streams: int, tokens: int) -> Streaming:
    """All streams at once; measured from when each has begun until one is about to end."""
    counts = [0] * streams
    clients = asyncio.gather(*(stream_one(port, tokens, counts, number) for number in range(streams)))
    try:
        await until(lambda: min(counts) >= tokens // 10 or clients.done())
        before, spent, began = sum(counts), processor_seconds(router), time.perf_counter()
        await until(lambda: max(counts) >= tokens - tokens // 10 or clients.done())
        events, passed = sum(counts) - before, time.perf_counter() - began
        spent = processor_seconds(router) - spent
    finally:
        await clients
    return Streaming(1e6 * spent / events, events / passed)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until it is so."""
    while not condition():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def measure_floor(sends: int = 10_000, sockets: int = 256) -> float:
    """Microseconds of processor time that it takes to send one event's bytes to a process that waits for them, with as
    much between two of them as a router does.
    """
    spent, event = 0.0, bytes(EVENT_BYTES)
    with socket.create_server(("127.0.0.1", 0), backlog=sockets) as server, ExitStack() as opened:
        reading = get_context("spawn").Process(
            target=read_all, args=(server.getsockname(), sockets, sends), daemon=True
        )
        reading.start()
        writers = [opened.enter_context(server.accept()[0]) for _ in range(sockets)]
        for number in range(sends):
            pause = time.perf_counter() + 10e-6
            while time.perf_counter() < pause:
                pass
            began = time.thread_time()
            writers[number % sockets].send(event)
            spent += time.thread_time() - began
        reading.join(30)
    return 1e6 * spent / sends


def read_all(address: tuple[str, int], sockets: int, sends: int) -> None:
    """The process that reads what ``measure_floor`` sends."""
    wanted = sends * EVENT_BYTES
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for _ in range(sockets):
            selector.register(opened.enter_context(socket.create_connection(address)), selectors.EVENT_READ)
        while wanted > 0 and (ready := selector.select(30)):
            for key, _ in ready:
                wanted -= len(cast(socket.socket, key.fileobj).recv(1 << 16))


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
    return sorted(added)


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


async def under_load(engine_port: int, port: int, rounds: int, streams: int) -> list[float]:
    """The same, while other streams keep the router busy."""
    others = [asyncio.create_task(stream_one(port, 100_000, [0], 0)) for _ in range(streams)]
    try:
        await asyncio.sleep(0.5)
        return await measure_latency(engine_port, port, rounds)
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def report_streams(folder: Path, options: argparse.Namespace) -> None:
    """Processor time of one process, without Redis and with it, in turns."""
    with (
        redis_server() as redis,
        running(folder, PAUSE) as (_, alone),
        running(folder, PAUSE, "--redis-url", redis.url) as (_, durable),
    ):
        found: dict[str, list[Streaming]] = {"memory": [], "Redis": []}
        requests: dict[str, list[float]] = {"memory": [], "Redis": []}
        floors = []
        for _ in range(options.rounds):
            for name, router in (("memory", alone), ("Redis", durable)):
                process = psutil.Process(router.popen.pid)
                floors.append(measure_floor())
                streaming = measure_streams(router.http_port, process, options.streams, options.tokens)
                found[name].append(asyncio.run(streaming))
                requests[name].append(asyncio.run(measure_requests(router.http_port, process, REQUESTS, 16)))
    floor = statistics.median(floors)
    print(f"the floor, one send of {EVENT_BYTES} bytes: {floor:.1f} us of processor time")
    for name, all_streaming in found.items():
        cost = statistics.median(each.cost for each in all_streaming)
        rate = statistics.median(each.rate for each in all_streaming)
        streams = f"{options.streams} streams, {rate:.0f} tokens/s"
        print(f"{name}: a streamed token {cost:.1f} us, {cost - floor:.1f} above the floor ({streams})")
        print(f"{name}: a request without tokenising {statistics.median(requests[name]):.2f} ms")


def report_latency(folder: Path, options: argparse.Namespace) -> None:
    """Of one process, idle and beside other streams."""
    with running(folder, 0.0005) as (engine, router):
        _tell_latency("idle", asyncio.run(measure_latency(engine.port, router.http_port, 200)))
    with running(folder, 0.005) as (engine, router):
        _tell_latency(
            f"beside {options.others} streams",
            asyncio.run(under_load(engine.port, router.http_port, 200, options.others)),
        )


def _tell_latency(name: str, added: list[float]) -> None:
    p50, p99 = statistics.median(added), added[int(0.99 * len(added))]
    print(f"added latency, {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def report_workers(folder: Path, workers: int) -> None:
    """Requests a second of several processes on one port."""
    with (
        redis_server() as redis,
        running(folder, 0.002, "--workers", str(workers), "--redis-url", redis.url) as (_, router),
    ):
        process = psutil.Process(router.popen.pid)
        began = time.perf_counter()
        spent = asyncio.run(measure_requests(router.http_port, process, LOADED_REQUESTS, 64))
        rate = LOADED_REQUESTS / (time.perf_counter() - began)
        print(f"{workers} workers: {rate:.0f} requests/s, {spent:.2f} ms of processor time each")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", type=int, default=48, help="streams beside the requests whose latency is taken")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--parts", default="streams,latency,workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        if "streams" in options.parts:
            report_streams(Path(folder), options)
        if "latency" in options.parts:
            report_latency(Path(folder), options)
        for workers in map(int, options.workers.split(",") if "workers" in options.parts else ()):
            report_workers(Path(folder), workers)


if __name__ == "__main__":
    main()
