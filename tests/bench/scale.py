"""What a fleet of a thousand engines costs a router that has its requests at eight of them.

    python -m tests.bench.scale [--engines 10 100 300 1000] [--json FILE] [--plot FILE --before FILE]

The engines have no model, and the rest of an engine (``tests.bench.scale_engines``); the router finds them by the
EndpointSlices of the tests' API server. Printed for each fleet, all of the router's process:

* the seconds from its start until it has every engine, its memory, and its processor time while no engine works;
* its processor time while each makes ``--steps`` steps a second for others;
* its processor time for the choice of an engine, and for a token of a stream, beside those steps;
* with ``--storms``: all engines leave and join at once, all are killed and started again, and eight routers are started
  together.

``--python`` is the interpreter of another checkout, whose router is measured instead. Processor time is that of the
process, so that engines and clients on the same cores disturb it little, but a machine that is busy is seen in it.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.bench.router_stage import DEMO, processor_seconds, read_answer, stream_one
from tests.bench.router_stage import body as completion
from tests.bench.scale_engines import FREE, Engines, engines
from tests.support.kube_api import KubeApiServer, endpoint, kube_api, slice_of
from tests.support.ports import free_port
from tests.support.processes import Router, fetch
from tests.support.redis_server import RedisServer, redis_server

SLICE = 100
ROUTERS = 8
STREAMS_OF_AN_ENGINE = 32
CHOICES = 400
READY = "quire_engines_ready"
MIB = 1 << 20


class Slices:
    """The engines of a Service, at an API server that runs in a thread of its own."""

    def __init__(self, server: KubeApiServer, loop: asyncio.AbstractEventLoop, config: str) -> None:
        self._server = server
        self._loop = loop
        self.config = config

    def put(self, fleet: Engines) -> None:
        """All engines are there."""
        hosts = fleet.addresses
        for first in range(0, len(hosts), SLICE):
            each = [
                endpoint(host, ready=True, serving=True, terminating=False) for host in hosts[first : first + SLICE]
            ]
            item = slice_of(f"engines-{first}", each, ports=(("grpc", fleet.port),))
            self._loop.call_soon_threadsafe(self._server.put, item)

    def clear(self) -> None:
        """None is there."""

        def delete() -> None:
            for name in list(self._server.slices):
                self._server.delete(name)

        self._loop.call_soon_threadsafe(delete)


@contextmanager
def slices(folder: Path) -> Iterator[Slices]:
    """An API server without slices, for the length of a block."""
    made: list[Slices] = []
    started, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with kube_api() as server:
            made.append(Slices(server, asyncio.get_running_loop(), server.kubeconfig(folder)))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield made[0]
    finally:
        made[0]._loop.call_soon_threadsafe(ended.set)
        thread.join()


class MeasuredRouter(Router):
    """A router by ``python``, which finds its engines at an API server."""

    def __init__(self, python: str, api: Slices, folder: Path, *flags: str) -> None:
        self._python = python
        self.began = time.monotonic()
        super().__init__(
            DEMO, ["kubernetes://engines"], folder, "--max-concurrent-requests", "4096", *flags, KUBECONFIG=api.config
        )
        self.process = psutil.Process(self.popen.pid)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> Any:
        return super()._start([self._python, *command[1:]], environment, stdout)

    def wait_engines(self, count: int, timeout: float = 120.0) -> float:
        """Returns when it has so many, with the seconds since it was started."""
        deadline = time.monotonic() + timeout
        while self.metric(READY) != count:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the router has {self.metric(READY):.0f} of {count} engines:\n{self.text[-4000:]}")
            time.sleep(0.1)
        return time.monotonic() - self.began

    def cpu(self) -> float:
        """Processor seconds so far, of workers too."""
        return processor_seconds(self.process)

    def share(self, seconds: float) -> float:
        """The part of a core that it takes."""
        before, began = self.cpu(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu() - before) / (time.monotonic() - began)

    def memory(self) -> float:
        """MiB, of workers too."""
        return sum(each.memory_info().rss for each in (self.process, *self.process.children(recursive=True))) / MIB

    def choices(self) -> dict[float, float]:
        """How many choices took at most so many seconds; empty where the router does not count them."""
        counts = re.findall(
            r'^quire_route_seconds_bucket{.*le="([^"]+)".*} (\S+)$', fetch(self.metrics_port, "/metrics")[1], re.M
        )
        return {float(bound): float(count) for bound, count in counts}


@dataclass
class Point:
    """A fleet's figures: parts of a core, MiB, seconds, milliseconds and microseconds, as their names say."""

    engines: int
    steps_per_second: float = 0.0
    seen_seconds: float = 0.0
    idle_core: float = 0.0
    idle_mib: float = 0.0
    busy_core: float = 0.0
    busy_mib: float = 0.0
    choice_p50_ms: float | None = None
    choice_p99_ms: float | None = None
    token_us: float = 0.0
    tokens_per_second: float = 0.0
    storms: dict[str, float] = field(default_factory=dict)


def measure(fleet: Engines, router: MeasuredRouter, options: argparse.Namespace) -> Point:
    """The figures of one router and fleet, without storms."""
    point = Point(fleet.count)
    point.seen_seconds = router.wait_engines(fleet.count)
    time.sleep(options.settle)
    point.idle_core, point.idle_mib = router.share(options.seconds), router.memory()
    fleet.set_pace(options.steps)
    time.sleep(options.settle)
    fleet.take_steps()
    point.busy_core = router.share(options.seconds)
    point.steps_per_second = fleet.take_steps() / options.seconds / fleet.count
    point.busy_mib = router.memory()
    asyncio.run(measure_streams(fleet, router, point, options))
    before = router.choices()
    asyncio.run(ask(router, CHOICES))
    point.choice_p50_ms, point.choice_p99_ms = (quantile(before, router.choices(), part) for part in (0.5, 0.99))
    return point


async def measure_streams(fleet: Engines, router: MeasuredRouter, point: Point, options: argparse.Namespace) -> None:
    """Streams at the engines that are free. What they cost is what the router takes more than just before and after,
    for each token.
    """
    count = STREAMS_OF_AN_ENGINE * min(FREE, fleet.count)
    counts, length = [0] * count, int(options.steps * (options.seconds + 2 * options.settle))
    before = await asyncio.to_thread(router.share, options.seconds / 2)
    streams = [asyncio.create_task(stream_one(router.http_port, length, counts, each)) for each in range(count)]
    await asyncio.sleep(options.settle)
    tokens, began = sum(counts), time.monotonic()
    busy = await asyncio.to_thread(router.share, options.seconds)
    point.tokens_per_second = (sum(counts) - tokens) / (time.monotonic() - began)
    await asyncio.gather(*streams)
    after = await asyncio.to_thread(router.share, options.seconds / 2)
    point.token_us = 1e6 * (busy - (before + after) / 2) / max(1.0, point.tokens_per_second)


async def ask(router: MeasuredRouter, count: int) -> None:
    """So many short requests, four at a time."""

    async def some(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        for number in range(first, count, 4):
            writer.write(completion(2, stream=False, number=100 + number))
            await read_answer(reader)
        writer.close()

    await asyncio.gather(*map(some, range(4)))


def quantile(before: Mapping[float, float], after: Mapping[float, float], part: float) -> float | None:
    """Milliseconds, as ``histogram_quantile`` would have it, of what was counted in between; None without any."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if not counts or not counts[-1][1]:
        return None
    rank, below, lower = part * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            return 1e3 * (lower + (min(bound, 1e3) - lower) * (rank - below) / max(count - below, 1.0))
        below, lower = count, bound
    return None


def storm(fleet: Engines, api: Slices, router: MeasuredRouter) -> dict[str, float]:
    """All engines leave, join, and are killed and started again; the seconds and processor seconds of each."""
    found: dict[str, float] = {}

    def timed(name: str, count: int, action: Callable[[], None]) -> None:
        fleet.take_opened()
        before, began = router.cpu(), time.monotonic()
        action()
        router.wait_engines(count)
        found[f"{name}_seconds"] = time.monotonic() - began
        found[f"{name}_cpu"] = router.cpu() - before
        found[f"{name}_peak"] = fleet.take_opened().peak

    timed("leave", 0, api.clear)
    timed("join", fleet.count, lambda: api.put(fleet))
    timed("kill", 0, fleet.stop)
    timed("restart", fleet.count, fleet.start)
    return found


def start_together(fleet: Engines, api: Slices, python: str, folder: Path) -> dict[str, float]:
    """``ROUTERS`` routers at once: until the last one has all engines, and how many sessions engines had to open."""
    with ExitStack() as stack:
        fleet.take_opened()
        routers = []
        for number in range(ROUTERS):
            own = folder / f"together-{number}"
            own.mkdir()
            routers.append(MeasuredRouter(python, api, own))
            stack.callback(routers[-1].kill)
        seconds = max(router.wait_engines(fleet.count) for router in routers)
        opened, cpu = fleet.take_opened(), sum(router.cpu() for router in routers) / ROUTERS
    return {
        "together_seconds": seconds,
        "together_cpu": cpu,
        "together_peak": opened.peak,
        "together_peak_of_one": opened.peak_of_one,
        "together_sessions": opened.sessions,
    }


def run(count: int, api: Slices, options: argparse.Namespace, folder: Path) -> Point:
    """One fleet."""
    flags: list[str] = []
    with ExitStack() as stack:
        if options.workers > 1:
            redis: RedisServer = stack.enter_context(redis_server())
            flags += ["--workers", str(options.workers), "--redis-url", redis.url]
        fleet = stack.enter_context(engines(count, free_port(), options.processes))
        stack.callback(api.clear)
        api.put(fleet)
        own = folder / str(count)
        own.mkdir()
        router = MeasuredRouter(options.python, api, own, *flags)
        stack.callback(router.kill)
        point = measure(fleet, router, options)
        if options.storms:
            fleet.set_pace(0)
            point.storms = storm(fleet, api, router)
            router.stop()
            point.storms |= start_together(fleet, api, options.python, own)
        return point


def row(point: Point) -> str:
    """A line of the table."""
    choice = (
        "—"
        if point.choice_p50_ms is None or point.choice_p99_ms is None
        else f"{point.choice_p50_ms:.2f}, {point.choice_p99_ms:.2f}"
    )
    return (
        f"| {point.engines:,} | {point.seen_seconds:.1f} s | {point.idle_core:.1%} | {point.idle_mib:.0f} MiB "
        f"| {point.busy_core:.1%} ({point.steps_per_second:.0f}) | {point.busy_mib:.0f} MiB | {choice} ms "
        f"| {point.token_us:.0f} µs ({point.tokens_per_second:.0f}) |"
    )


HEAD = """\
| engines | all seen after | idle | | working (steps/s) | | choice p50, p99 | a token (tokens/s) |
|---|---|---|---|---|---|---|---|"""


def draw(path: Path, series: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes a picture with a line for each of the series. Raises ``ImportError`` without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = (
        ("idle_core", "idle, % of a core", 100.0),
        ("busy_core", "working for others, % of a core", 100.0),
        ("busy_mib", "memory, MiB", 1.0),
    )
    for axes, (name, label, factor) in zip(figure.subplots(1, 3), panels, strict=True):
        for legend, points in series.items():
            axes.plot(
                [each["engines"] for each in points], [factor * each[name] for each in points], "o-", label=legend
            )
        axes.set_xlabel("engines")
        axes.set_title(label, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--steps", type=float, default=20.0, help="a second, of each engine that works")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before it")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="of the engines")
    parser.add_argument("--storms", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--before", type=Path, help="file that was written by an earlier run, for the plot")
    parser.add_argument("--plot", type=Path, help="file to write")
    options = parser.parse_args()
    for path in (options.json, options.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of each engine that leaves
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process behind
    points: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name, slices(Path(name)) as api:
        for count in options.engines:
            point = run(count, api, options, Path(name))
            print(row(point), flush=True)
            points.append(asdict(point))
    for each in points:
        for storm_name, value in each["storms"].items():
            print(f"{each['engines']:,} engines: {storm_name} {value:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(points, indent=1) + "\n")
    if options.plot is not None:
        before = {} if options.before is None else {"before": json.loads(options.before.read_text())}
        draw(options.plot, {**before, "now": points})


if __name__ == "__main__":
    main()
