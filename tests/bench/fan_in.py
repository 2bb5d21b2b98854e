"""What a router costs that has no request at N engines, which work for other routers and send it their load and the
changes of their caches.

    python -m tests.bench.fan_in [--engines 100] [--steps 20] [--blocks 2] [--seconds 12]

The engines have no model. Two processes run them: each has its own port, and the real sessions and gRPC service of the
engine, to which a step's load, which changes, and some stored blocks are passed at that pace. 0 steps are idle engines.
Prints the processor time of the router, user and system, as a part of one core, and how many messages it got.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import psutil
from quire.v1.engine_pb2_grpc import add_EngineServicer_to_server
from quire_engine.core.block_pool import BlockStored, Tier
from quire_engine.core.engine_core import Command, EngineCoreOutputs, GetSnapshot, StepTrace
from quire_engine.core.outputs import EngineLoad
from quire_engine.core.step import StepTimings
from quire_engine.server.servicer import EngineServicer
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import GrammarCompiler

from tests.bench.router_stage import DEMO, processor_seconds
from tests.bench.steady_engine import MODEL, SteadyEngine
from tests.support.processes import Router
from tests.support.slow_grammars import SlowSource

BLOCKS_TOTAL = 1 << 16


class BusyCore:
    """Stands in for the engine's core: it works for others, and only answers what a new session asks."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self.steps = 0

    def send(self, command: Command) -> None:
        if isinstance(command, GetSnapshot):
            command.reply(self.load(), [])

    def load(self) -> EngineLoad:
        return EngineLoad(16, 0, 0, 16 + self.steps % 7, BLOCKS_TOTAL, BLOCKS_TOTAL - self.steps % 1000, 0, 0)

    def step(self, blocks: int) -> None:
        """One step for others, which stores so many blocks."""
        self.steps += 1
        stored = [BlockStored(os.urandom(16), Tier.DEVICE) for _ in range(blocks)]
        trace = StepTrace(self.steps, time.time_ns(), StepTimings(), 0, 0, 0.01, 0, 16, 16, 0, 0, False, [])
        self._manager.publish(EngineCoreOutputs([], self.load(), stored, trace))


async def serve(count: int, pace: float, blocks: int, ports: Connection) -> None:
    """So many engines, forever; their ports go to ``ports``."""
    grammars, opened = GrammarCompiler(SlowSource()), []
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            steady = SteadyEngine(MODEL, 0.05, 1024)
            description = await steady.Describe(None, None)  # type: ignore[arg-type]
            manager = SessionManager(
                description.generation,
                grace=1.0,
                tracing=TraceExporter(enabled=False, step_interval=1),
                grammars=grammars,
            )
            core: Any = BusyCore(manager)
            manager.bind(core)
            server = grpc.aio.server()
            add_EngineServicer_to_server(EngineServicer(manager, description), server)
            opened.append((server, server.add_insecure_port("127.0.0.1:0")))
            await server.start()
            if pace:
                tasks.create_task(work(core, pace, blocks, number / count))
        ports.send([port for _, port in opened])


async def work(core: BusyCore, pace: float, blocks: int, phase: float) -> None:
    """Steps at that pace, from ``phase`` of a step on."""
    await asyncio.sleep(phase / pace)
    while True:
        core.step(blocks)
        await asyncio.sleep(1 / pace)


def run_engines(count: int, pace: float, blocks: int, ports: Connection) -> None:
    asyncio.run(serve(count, pace, blocks, ports))


def start_engines(options: argparse.Namespace) -> tuple[list[multiprocessing.process.BaseProcess], list[int]]:
    """The processes, and the ports of all engines."""
    context = multiprocessing.get_context("spawn")
    processes: list[multiprocessing.process.BaseProcess] = []
    ports: list[int] = []
    for part in range(2):
        here, there = context.Pipe()
        count = (options.engines + part) // 2
        process = context.Process(target=run_engines, args=(count, options.steps, options.blocks, there), daemon=True)
        process.start()
        processes.append(process)
        ports += here.recv()
    return processes, ports


def measure(ports: Sequence[int], seconds: float, folder: Path) -> tuple[float, float]:
    """The router's processor time for each second, and its memory in MiB, once it has every engine."""
    router = Router(DEMO, [f"127.0.0.1:{port}" for port in ports], folder)
    try:
        router.wait_ready()
        deadline = time.monotonic() + 60
        while router.metric("quire_engines_ready") < len(ports):
            if time.monotonic() > deadline:
                sys.exit("not every engine was ready within a minute")
            time.sleep(0.5)
        time.sleep(3)
        process = psutil.Process(router.popen.pid)
        before, began = processor_seconds(process), time.perf_counter()
        time.sleep(seconds)
        share = (processor_seconds(process) - before) / (time.perf_counter() - began)
        return share, process.memory_info().rss / (1 << 20)
    finally:
        router.stop()


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--steps", type=float, default=20.0, help="a second, of each engine")
    parser.add_argument("--blocks", type=int, default=0, help="stored by each step")
    parser.add_argument("--seconds", type=float, default=12.0)
    options = parser.parse_args()
    processes, ports = start_engines(options)
    try:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            share, memory = measure(ports, options.seconds, Path(folder))
    finally:
        for process in processes:
            process.kill()
    steps = f"{options.steps:g} steps a second, {options.blocks} blocks stored by each"
    print(f"{options.engines} engines, {steps}: router {share:.1%} of a core, {memory:.0f} MiB")


if __name__ == "__main__":
    main()
