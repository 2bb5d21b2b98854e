"""Engines without a model, hundreds in a process, for ``tests.bench.scale``: each has an address of its own
(127.1.0.1 and so on), and the engine's real gRPC service and sessions, with what these send and leave out.

Only the core is made up. It makes steps at a pace that can be changed, as if most of its requests were other routers':
prompts come and are computed, their blocks are cached, and older ones are evicted. The first ``FREE`` engines have
little to do, so that routers send them their requests; each gets a token in every step.
"""

import asyncio
import multiprocessing
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop
from quire.v1 import engine_pb2 as pb
from quire.v1.engine_pb2_grpc import add_EngineServicer_to_server
from quire_engine.core.block_pool import BlockRemoved, BlockStored, KVCacheEvent, Tier
from quire_engine.core.engine_core import (
    AbortRequest,
    AddRequest,
    Command,
    EngineCoreOutputs,
    GetSnapshot,
    StepTrace,
)
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad
from quire_engine.core.request import Request
from quire_engine.core.step import StepTimings
from quire_engine.core.step_time_model import Pace
from quire_engine.server.grpc_options import server_options
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.session_manager import HEARTBEAT_INTERVAL, SessionManager
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarCompiler
from quire_proto.sampling import FinishReason

from tests.bench.steady_engine import MODEL, SteadyEngine
from tests.support.slow_grammars import SlowSource

FREE = 8
BLOCKS = 1 << 16
CACHED = 256
"""Blocks that an engine's cache holds here; a real one holds more, and changes as much in a step."""

SHARED = 16
"""Of these, so many are the same in all engines: a system prompt's."""

PROMPT_BLOCKS, PROMPT_EVERY = 20, 10
"""Every tenth step ends a prompt of 320 tokens that was not cached: two blocks a step."""


def address_of(number: int) -> str:
    """The host of the engine of this number, from 0 on."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


class WorkingCore:
    """Stands in for the engine's core."""

    def __init__(self, number: int, publish: Callable[[EngineCoreOutputs], None]) -> None:
        self._publish = publish
        self._free = number < FREE
        self._random = random.Random(number)
        self._steps = 0
        self._stored = number << 64  # what blocks are named by
        self._cached: deque[bytes] = deque()
        self._shared = [(each + 1 << 96).to_bytes(16, "big") for each in range(SHARED)]
        self._live: dict[str, list[int]] = {}  # of each request its position and its end
        self._store(CACHED - SHARED)

    def send(self, command: Command) -> None:
        """As ``EngineCore.send``."""
        match command:
            case GetSnapshot(reply):
                blocks = [BlockStored(name, Tier.DEVICE) for name in (*self._shared, *self._cached)]
                reply(self._load(), blocks)
            case AddRequest(request):
                self._live[request.request_id] = [len(request.output_token_ids), _end(request)]
            case AbortRequest(request_id):
                self._live.pop(request_id, None)
            case _:
                pass

    def step(self) -> None:
        """Makes one."""
        self._steps += 1
        events = self._store(PROMPT_BLOCKS) if self._steps % PROMPT_EVERY == 0 else []
        outputs = [self._output(name, place) for name, place in list(self._live.items())]
        trace = StepTrace(self._steps, 0, StepTimings(), 0, 0, 0.01, 0, 16, 16, 0, 0, False, [])
        self._publish(EngineCoreOutputs(outputs, self._load(), events, trace))

    @property
    def num_live(self) -> int:
        """Requests that it runs."""
        return len(self._live)

    def _output(self, name: str, place: list[int]) -> EngineCoreOutput:
        position, end = place
        place[0] += 1
        ended = place[0] >= end
        if ended:
            del self._live[name]
        reason = FinishReason.LENGTH if ended else None
        return EngineCoreOutput(name, [600 + position % 256], position, reason, ends_request=ended)

    def _store(self, count: int) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        for _ in range(count):
            self._stored += 1
            name = (self._stored * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "big")
            self._cached.append(name)
            events.append(BlockStored(name, Tier.DEVICE))
            if len(self._cached) > CACHED - SHARED:
                events.append(BlockRemoved(self._cached.popleft(), Tier.DEVICE))
        return events

    def _load(self) -> EngineLoad:
        running = len(self._live) if self._free else 24 + self._steps % 7
        prompts = 0 if self._free else 200_000 + 320 * (self._steps % PROMPT_EVERY)
        pace = Pace(0.02, 1e-4 * (1 + (self._steps // 50) % 5 / 100), 2e-4, 1e-4)
        used = 40 * running + self._steps % 1000
        return EngineLoad(running, 0, 0, running + prompts, BLOCKS, BLOCKS - used, 0, 0, pace)


def _end(request: Request) -> int:
    return request.sampling.max_tokens


class CountedServicer(EngineServicer):
    """Notes when sessions were opened."""

    def __init__(self, manager: SessionManager, description: pb.DescribeResponse) -> None:
        super().__init__(manager, description)
        self.opened: list[float] = []

    async def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - named by the contract
        """As that of an engine."""
        self.opened.append(time.monotonic())
        async for response in super().Session(request_iterator, context):
            yield response


class StandIn:
    """One engine. Each ``start`` is another generation, with the cache that it had."""

    def __init__(self, number: int, port: int, description: pb.DescribeResponse, grammars: GrammarCompiler) -> None:
        self._address = f"{address_of(number)}:{port}"
        self._number = number
        self._grammars = grammars
        self._description = description
        self.opened: list[float] = []
        self._server: grpc.aio.Server | None = None
        self._manager: SessionManager | None = None
        self.core: WorkingCore | None = None

    async def start(self) -> None:
        """Serves."""
        description = pb.DescribeResponse()
        description.CopyFrom(self._description)
        description.generation = random.getrandbits(63)
        tracing = TraceExporter(enabled=False, step_interval=1)

        def publish(step: EngineCoreOutputs) -> None:
            manager.publish(step)

        self.core = WorkingCore(self._number, publish)
        core: Any = self.core
        manager = SessionManager(core, description.generation, grace=1.0, tracing=tracing, grammars=self._grammars)
        self._manager = manager
        servicer = CountedServicer(manager, description)
        servicer.opened = self.opened
        self._server = grpc.aio.server(options=server_options())
        add_EngineServicer_to_server(servicer, self._server)
        self._server.add_insecure_port(self._address)
        await self._server.start()

    @property
    def sessions(self) -> tuple[int, int]:
        """Sessions that hear of its load and its cache, and those that do not."""
        each = [] if self._manager is None else list(self._manager._sessions)
        off = sum(session.updates.is_off for session in each)
        return len(each) - off, off

    def send_heartbeat(self) -> None:
        """As an engine does while it runs requests."""
        if self._manager is not None and self._manager.in_progress:
            self._manager.send_heartbeat()

    async def stop(self) -> None:
        """Breaks off what runs, as a process that was killed."""
        if self._server is not None:
            await self._server.stop(None)
        self.core = self._server = None


class Host:
    """A process's engines. Commands come from ``control``, and each is answered."""

    def __init__(self, engines: Sequence[StandIn], control: Connection) -> None:
        self._engines = engines
        self._control = control
        self._pace = 0.0
        self._paced = asyncio.Event()
        self._steps = 0

    async def run(self) -> None:
        """Never returns."""
        await self._start()
        self._control.send(len(self._engines))
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        loop.add_reader(self._control.fileno(), lambda: commands.put_nowait(self._control.recv()))
        working = [asyncio.create_task(work) for work in (self._work(), self._beat())]
        while True:
            name, argument = await commands.get()
            self._control.send(await getattr(self, f"_{name}")(argument))
            assert not any(task.done() for task in working), working

    async def _start(self, _: None = None) -> None:
        for engine in self._engines:
            await engine.start()

    async def _stop(self, _: None) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    async def _set_pace(self, pace: float) -> None:
        self._pace = pace
        (self._paced.set if pace else self._paced.clear)()

    async def _take_steps(self, _: None) -> int:
        steps, self._steps = self._steps, 0
        return steps

    async def _take_opened(self, _: None) -> list[list[float]]:
        taken = [list(engine.opened) for engine in self._engines]
        for engine in self._engines:
            engine.opened.clear()
        return taken

    async def _take_sessions(self, _: None) -> list[tuple[int, int]]:
        return [engine.sessions for engine in self._engines]

    async def _take_live(self, _: None) -> int:
        return sum(engine.core is not None and engine.core.num_live > 0 for engine in self._engines)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            for engine in self._engines:
                engine.send_heartbeat()

    async def _work(self) -> None:
        """Steps of all engines, one after the other, spread over the time between two of one engine."""
        loop = asyncio.get_running_loop()
        while True:
            await self._paced.wait()
            began, size = loop.time(), max(1, len(self._engines) // 16)
            for first in range(0, len(self._engines), size):
                for engine in self._engines[first : first + size]:
                    if engine.core is not None:
                        engine.core.step()
                        self._steps += 1
                due = began + (first + size) / len(self._engines) / (self._pace or 1)
                await asyncio.sleep(max(0.0, due - loop.time()))


def _host(numbers: Sequence[int], port: int, control: Connection) -> None:
    uvloop.run(_serve(numbers, port, control))


async def _serve(numbers: Sequence[int], port: int, control: Connection) -> None:
    description = await SteadyEngine(MODEL, 0.05, 1024).Describe(None, None)  # type: ignore[arg-type]
    grammars = GrammarCompiler(SlowSource())
    await Host([StandIn(number, port, description, grammars) for number in numbers], control).run()


@dataclass(frozen=True, slots=True)
class Opened:
    """Sessions that were opened: all, most of them within a second, and most at one engine within a second."""

    sessions: int
    peak: int
    peak_of_one: int


class Engines:
    """So many engines in some processes, all on ``port``."""

    def __init__(self, count: int, port: int, processes: int) -> None:
        self.count = count
        self.port = port
        context = multiprocessing.get_context("spawn")
        self._hosts: list[tuple[Any, Connection]] = []
        for part in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_host, args=(range(part, count, processes), port, there), daemon=True)
            process.start()
            self._hosts.append((process, here))
        started = sum(control.recv() for _, control in self._hosts)
        assert started == count

    @property
    def addresses(self) -> list[str]:
        """Their hosts."""
        return [address_of(number) for number in range(self.count)]

    @property
    def pids(self) -> list[int]:
        """Of their processes."""
        return [process.pid for process, _ in self._hosts]

    def set_pace(self, steps: float) -> None:
        """Steps a second, of each; none is an idle fleet."""
        self._ask("set_pace", steps)

    def take_steps(self) -> int:
        """Steps of all since the last call."""
        return sum(self._ask("take_steps"))

    def stop(self) -> None:
        """All at once."""
        self._ask("stop")

    def start(self) -> None:
        """All, again, as other generations."""
        self._ask("start")

    def take_opened(self) -> Opened:
        """Since the last call."""
        each = [times for answer in self._ask("take_opened") for times in answer]
        together = [moment for times in each for moment in times]
        return Opened(len(together), _most_in_a_second(together), max(map(_most_in_a_second, each), default=0))

    def num_serving(self) -> int:
        """How many engines have requests of the router."""
        return sum(self._ask("take_live"))

    def sessions(self) -> list[tuple[int, int]]:
        """Of each engine the sessions that hear of its load and its cache, and those that do not."""
        return [each for answer in self._ask("take_sessions") for each in answer]

    def close(self) -> None:
        """Ends the processes."""
        for process, _ in self._hosts:
            process.kill()
            process.join()

    def _ask(self, name: str, argument: Any = None) -> list[Any]:
        for _, control in self._hosts:
            control.send((name, argument))
        return [control.recv() for _, control in self._hosts]


def _most_in_a_second(moments: Sequence[float]) -> int:
    counts = Counter(int(moment) for moment in moments)
    return max(counts.values(), default=0)


@contextmanager
def engines(count: int, port: int, processes: int = 2) -> Iterator[Engines]:
    """For the length of a block."""
    running = Engines(count, port, processes)
    try:
        yield running
    finally:
        running.close()
