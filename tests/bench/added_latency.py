"""The latency that a router adds to a request of one token, idle and at half of what one process can stream.

The same request goes to the engine's contract and through the router, in turns; what is told is the difference. The
engine that it goes to answers at once, so nothing of the difference is chance of when its step begins. Another engine
and another process of clients make the load.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import grpc
import psutil
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.engine_pb2_grpc import EngineStub

from tests.bench.router_stage import (
    DEMO,
    PROMPT,
    SteadyEngineProcess,
    body,
    processor_seconds,
    read_answer,
    running,
    stream_one,
)
from tests.support.processes import Router

PROBED = "probed"
ENDLESS = 200_000  # tokens; more than any stream gets while it is measured
SETTLE = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Added:
    """Milliseconds that were added to each request, in order of size, while so many ``tokens`` a second were streamed
    and the router was busy for ``share`` of the time.
    """

    latencies: list[float]
    tokens: float
    share: float

    def __str__(self) -> str:
        p50, p99 = statistics.median(self.latencies), self.latencies[int(0.99 * len(self.latencies))]
        return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"


def measure_added(folder: Path, *, streams: int, pause: float, pairs: int) -> Added:
    """Beside ``streams`` that get a token every ``pause`` seconds. The router has a core of its own, where there are
    two.
    """
    with ExitStack() as ending:
        probed = SteadyEngineProcess(folder, 0.0, PROBED)
        ending.callback(probed.kill)
        flags = ("--model", f"{PROBED}={DEMO}", "--engine", f"127.0.0.1:{probed.port}")
        _, router = ending.enter_context(running(folder, pause, *flags))
        process = psutil.Process(router.popen.pid)
        ending.enter_context(_apart(process))
        counts = ending.enter_context(_load(router, streams))
        time.sleep(SETTLE)
        before, spent, began = sum(counts), processor_seconds(process), time.perf_counter()
        latencies = asyncio.run(_measure_pairs(probed.port, router.http_port, pairs))
        passed = time.perf_counter() - began
        share = (processor_seconds(process) - spent) / passed
        return Added(latencies, (sum(counts) - before) / passed, share)


@contextmanager
def _apart(router: psutil.Process) -> Iterator[None]:
    """The router on the first core, this process and those that it starts on the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for thread in router.threads():
            os.sched_setaffinity(thread.id, cores[:1])
        os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _load(router: Router, streams: int) -> Iterator[list[int]]:
    """So many streams that another process reads, and how many events of each it has read so far."""
    counts = get_context("spawn").Array("q", max(1, streams), lock=False)
    reading = get_context("spawn").Process(target=_read, args=(router.http_port, streams, counts), daemon=True)
    reading.start()
    try:
        yield counts  # type: ignore[misc]  # an array that other processes write to
    finally:
        reading.terminate()
        reading.join(10)


def _read(port: int, streams: int, counts: list[int]) -> None:
    async def read() -> None:
        await asyncio.gather(*(stream_one(port, ENDLESS, counts, number) for number in range(streams)))

    asyncio.run(read())


async def _measure_pairs(engine_port: int, port: int, pairs: int) -> list[float]:
    """Milliseconds, in order of size."""
    added, wanted = [], body(1, stream=False, model=PROBED)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{engine_port}") as channel:
        call = EngineStub(channel).Session()
        await call.write(pb.SessionRequest(open=pb.Open(session_id="bench")))
        await call.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(pairs):
            began = time.perf_counter()
            await _ask_engine(call, f"r{number}")
            between = time.perf_counter()
            writer.write(wanted)
            await read_answer(reader)
            added.append(1e3 * ((time.perf_counter() - between) - (between - began)))
            await asyncio.sleep(0.005)  # so that the load's steps come at any place in a pair
        writer.close()
    return sorted(added)


async def _ask_engine(call: grpc.aio.StreamStreamCall, request_id: str) -> None:
    """One request of one token, without a router."""
    sampling = types_pb2.SamplingParams(max_tokens=1)
    await call.write(
        pb.SessionRequest(submit=pb.Submit(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling))
    )
    while True:
        response = await call.read()
        if any(output.request_id == request_id for output in response.step_batch.outputs):
            return
