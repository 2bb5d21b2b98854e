"""Sends requests at their times, and waits for all of them.

In an open loop a request is sent when its time has come, however many are still running, as users do who know nothing
of each other. In a closed loop (``--max-concurrency``) the next one waits for another's end. A server that slows down
then gets fewer requests, so that the slow times are measured less often than users would see them: coordinated omission
(Gil Tene). Every request keeps its intended time, so that both latencies can be told.
"""

import asyncio
import gc
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf, isinf
from time import process_time

import numpy as np

from quire_cli.bench.client import HttpClient
from quire_cli.bench.dataset import SampleRequest
from quire_cli.bench.stream import Recording, RequestOutput, read_output

WATCH_PERIOD = 0.5  # seconds between two reports; one costs some microseconds
SPARE_FILES = 64  # open files besides the connections
MAX_UNREAD = 1 << 20  # pieces that may wait until the end of the run, some 300 MB; then answers are read at once


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: ``rate`` a second (inf for all at once) with the ``burstiness`` of their gaps, or at the
    times of the requests themselves (``self_timed``); at most ``max_concurrency`` at once.
    """

    rate: float = inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    self_timed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own, so that the client can be late."""
        return self.self_timed or not isinf(self.rate)

    def arrival_times(self, requests: Sequence[SampleRequest], rng: np.random.Generator) -> list[float]:
        """The second at which each request is to be sent, as ``vllm bench serve`` draws them: gaps from a gamma
        distribution, then stretched so that the last comes after exactly ``len(requests) / rate``.
        """
        if self.self_timed:
            return [request.time for request in requests]
        if isinf(self.rate):
            return [0.0] * len(requests)
        gaps = np.full(len(requests), 1.0)
        if not isinf(self.burstiness):
            gaps = rng.gamma(self.burstiness, 1.0, len(requests))
        times = np.cumsum(gaps)
        stretched: list[float] = (times * (len(requests) / self.rate / times[-1])).tolist()
        return stretched


@dataclass(frozen=True, slots=True)
class Run:
    """All answers in the order of their requests: ``outputs``. It took ``duration`` seconds until the last answer,
    and the client ``cpu_seconds`` of processor time. A run that was ``interrupted`` has the answers until then.
    """

    outputs: list[RequestOutput]
    duration: float
    cpu_seconds: float
    interrupted: bool = False


Watch = Callable[[int, int, float], None]
"""Is told how many requests have ended and were sent, and after how many seconds."""


async def run_load(
    client: HttpClient,
    path: str,
    requests: Sequence[SampleRequest],
    load: Load,
    rng: np.random.Generator,
    *,
    watch: Watch | None = None,
) -> Run:
    """Sends all requests and waits for their answers. Failures are outputs too. If the task is cancelled after an
    answer, what has ended is returned.
    """
    allow_connections(load.max_concurrency or len(requests))
    return await _Sender(client, path, load, watch).run(requests, load.arrival_times(requests, rng))


class _Sender:
    """One run."""

    def __init__(self, client: HttpClient, path: str, load: Load, watch: Watch | None) -> None:
        self._client = client
        self._path = path
        self._watch = watch
        self._sent = self._ended = 0
        self._turns = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
        self._outputs: dict[int, RequestOutput] = {}
        self._unread: dict[int, Recording] = {}
        self._pieces = 0

    async def run(self, requests: Sequence[SampleRequest], times: Sequence[float]) -> Run:
        now, interrupted = self._client.now, False
        with _no_collections():
            cpu, begin = process_time(), now()
            try:
                await self._send_all(requests, times, begin)
            except asyncio.CancelledError:
                if not self._ended:
                    raise
                interrupted = True
            duration, cpu = now() - begin, process_time() - cpu
        for index, recording in self._unread.items():
            self._outputs[index] = read_output(recording, requests[index].prompt_len)
        return Run([self._outputs[index] for index in sorted(self._outputs)], duration, cpu, interrupted)

    async def _send_all(self, requests: Sequence[SampleRequest], times: Sequence[float], begin: float) -> None:
        now = self._client.now
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._report(self._watch, begin)) if self._watch else None
            async with asyncio.TaskGroup() as sending:
                for index in sorted(range(len(requests)), key=lambda index: times[index]):
                    intended = begin + times[index]
                    if (wait := intended - now()) > 0:
                        await asyncio.sleep(wait)
                    sending.create_task(self._send(index, requests[index], intended))
            if watching is not None:
                watching.cancel()

    async def _report(self, watch: Watch, begin: float) -> None:
        while True:
            watch(self._ended, self._sent, self._client.now() - begin)
            await asyncio.sleep(WATCH_PERIOD)

    async def _send(self, index: int, request: SampleRequest, intended: float) -> None:
        recording = Recording(intended=intended, began=self._client.now())
        async with self._turns:
            self._sent += 1
            await self._client.post(self._path, request.body, recording)
        self._ended += 1
        self._pieces += len(recording.pieces)
        if self._pieces <= MAX_UNREAD:
            self._unread[index] = recording
        else:
            self._outputs[index] = read_output(recording, request.prompt_len)


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection: it would stop the clock of all streams, and a run makes hardly any cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allow_connections(count: int) -> None:
    """Raises the process's limit of open files to what ``count`` connections need, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
