"""What the router costs: processor time for each streamed token and for each request, the latency that it adds, and how
several processes on one port scale. All in one run, with a steady engine behind and raw sockets before it.

    python -m tests.bench.router [--streams 256] [--engines 1] [--tokens 200] [--workers 1,2]
        [--parts streams,latency,workers]

Processor time is the router's own, user and system, of all its processes; the engine and the clients are other
processes. A token's is taken while all streams run, so that it has no part of a request's. The floor is what the kernel
takes to send one event on a socket of this machine, whoever does it.

The load of one process is full when it streams as many tokens as fit into a second of processor time; half load is half
of these tokens. ``added_latency`` tells how the latency beside that is measured. Scaling is told twice: by the clock,
which needs a core for each worker and more for clients and engine, and in requests for each second of processor time.
As long as the latter stays what it is with one worker, more of them scale linearly until the cores are used up.
"""

import argparse
import asyncio
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import psutil

from tests.bench.added_latency import measure_added
from tests.bench.router_stage import body, processor_seconds, read_answer, running, stream_one
from tests.support.redis_server import redis_server

PAUSE = 0.04  # seconds between two steps: with 256 streams, half of a core or so is left to spare
EVENT_BYTES = 220
REQUESTS, LOADED_REQUESTS, PAIRS = 600, 2_000, 400


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


def report_streams(folder: Path, options: argparse.Namespace) -> None:
    """Processor time of one process, without Redis and with it, in turns."""
    with (
        redis_server() as redis,
        running(folder, PAUSE, engines=options.engines) as (_, alone),
        running(folder, PAUSE, "--redis-url", redis.url, engines=options.engines) as (_, durable),
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
        streams = f"{options.streams} streams over {options.engines} engines, {rate:.0f} tokens/s"
        print(f"{name}: a streamed token {cost:.1f} us, {cost - floor:.1f} above the floor ({streams})")
        print(f"{name}: a request without tokenising {statistics.median(requests[name]):.2f} ms")


def report_latency(folder: Path, options: argparse.Namespace) -> None:
    """Of one process, idle and at half load."""
    with running(folder, PAUSE) as (_, router):
        process = psutil.Process(router.popen.pid)
        full = asyncio.run(measure_streams(router.http_port, process, options.streams, options.tokens))
    most = 1e6 / full.cost
    print(f"one process streams {most:.0f} tokens/s at most ({full.cost:.1f} us each)")
    print(f"added latency, idle: {measure_added(folder, streams=0, pause=PAUSE, pairs=PAIRS)}")
    half = measure_added(folder, streams=options.streams, pause=2 * options.streams / most, pairs=PAIRS)
    load = f"{options.streams} streams, {half.tokens:.0f} tokens/s, busy for {half.share:.0%} of the time"
    print(f"added latency, half load ({load}): {half}")


def report_workers(folder: Path, counts: Sequence[int]) -> None:
    """Requests a second of several processes on one port, by the clock and by their processor time."""
    alone = 0.0
    for workers in counts:
        rate, spent = measure_workers(folder, workers)
        alone = alone or spent
        print(
            f"{workers} workers: {rate:.0f} requests/s; {1e3 / spent:.0f} for each second of processor time"
            f" ({spent:.2f} ms each), {alone / spent:.0%} of the first"
        )


def measure_workers(folder: Path, workers: int) -> tuple[float, float]:
    """Requests a second, and milliseconds of processor time for each, of all processes."""
    with (
        redis_server() as redis,
        running(folder, 0.002, "--workers", str(workers), "--redis-url", redis.url) as (_, router),
    ):
        process = psutil.Process(router.popen.pid)
        asyncio.run(measure_requests(router.http_port, process, REQUESTS, 64))  # until all of them are warm
        began = time.perf_counter()
        spent = asyncio.run(measure_requests(router.http_port, process, LOADED_REQUESTS, 64))
        return LOADED_REQUESTS / (time.perf_counter() - began), spent


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--engines", type=int, default=1, help="of the part streams, which they share")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--parts", default="streams,latency,workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        if "streams" in options.parts:
            report_streams(Path(folder), options)
        if "latency" in options.parts:
            report_latency(Path(folder), options)
        if "workers" in options.parts:
            report_workers(Path(folder), [int(count) for count in options.workers.split(",")])


if __name__ == "__main__":
    main()
