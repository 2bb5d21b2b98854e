"""What clients see of an engine's end: the longest pause of each stream that it ran.

A router, Redis and engines as real processes. In each round streams run on all engines; one engine is killed with
SIGKILL, or is frozen with SIGSTOP, as a host that is lost looks, or is told to leave with SIGTERM, as in a rollout, and
has so little time that its streams do not end there; they go on elsewhere. Their longest pauses are told, and so are
those of the streams that the others ran, and how much of each pause some process waited for a processor, which a busy
machine explains and Quire does not (Linux counts it for each thread). Each text is compared with the one of a round
without a fault. The bars: 1.5 s at p99 for a killed engine, 3 s for a frozen one, 0.5 s beside that wait for one that
leaves.

    .venv/bin/python -m tests.bench.failover [--faults killed frozen drained] [--rounds 20] [--streams 12]
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import httpx

from tests.support.processes import Engine, Router, eventually
from tests.support.redis_server import redis_server

DEMO = Path(__file__).parents[2] / "demo" / "model"
BARS = {"killed": 1.5, "frozen": 3.0, "drained": 0.5}  # seconds
_NUM_ENGINES = 3
_BEGUN = 5  # events of every stream before something happens
_READY = "quire_engines_ready"
_SAMPLE = 0.02  # seconds between two looks at who waits for a processor

Faults = Mapping[str, Callable[[Engine], None]]
FAULTS: Faults = {
    "killed": Engine.kill,
    "frozen": lambda engine: engine.signal(signal.SIGSTOP),
    "drained": lambda engine: engine.signal(signal.SIGTERM),
}


@dataclass(slots=True)
class Stream:
    """``engine`` is the address that it began on. ``pause`` is the longest one between two events, in seconds, which
    began at ``paused_at``.
    """

    number: int
    engine: str = ""
    text: str = ""
    events: int = 0
    pause: float = 0.0
    paused_at: float = 0.0

    async def run(self, http: httpx.AsyncClient, tokens: int) -> None:
        body = {"model": "quire-demo", "prompt": f"Story {self.number}:", "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "seed": self.number}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            self.engine = answer.headers["x-quire-route"].split(";")[0]
            last = 0.0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = perf_counter()
                    if last and now - last > self.pause:
                        self.pause, self.paused_at = now - last, last
                    last, self.events = now, self.events + 1
                    self.text += json.loads(line[6:])["choices"][0]["text"]


class Waits:
    """For how long each thread has waited for a processor, read again and again from ``/proc``."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._waited: list[dict[int, float]] = []

    @contextmanager
    def watch(self, pids: Iterable[int]) -> Iterator[None]:
        over, every = threading.Event(), tuple(pids)

        def look() -> None:
            while not over.wait(_SAMPLE):
                self._waited.append({task: waited for pid in every for task, waited in waits_of(pid).items()})
                self._times.append(perf_counter())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def within(self, begin: float, end: float) -> float:
        """At least so many seconds between two times the thread that waited longest did."""
        first, last = bisect_left(self._times, begin), bisect_left(self._times, end) - 1
        if last <= first:
            return 0.0
        before, after = self._waited[first], self._waited[last]
        return max((after[task] - before[task] for task in after.keys() & before.keys()), default=0.0)


def waits_of(pid: int) -> dict[int, float]:
    """Seconds, of each thread of a process; empty for one that has ended, or where Linux does not count them."""
    waited = {}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                waited[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


@dataclass(slots=True)
class Pauses:
    """Of the streams of the engine that died, the same without what a processor was waited for, and of the others."""

    hit: list[float] = field(default_factory=list)
    unexplained: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    changed: int = 0


class Fleet:
    """The processes for the length of ``ending``."""

    def __init__(self, model: Path, folder: Path, ending: ExitStack) -> None:
        self._model, self._folder = model, folder
        self.engines = {(engine := self._engine(0)).address: engine for _ in range(_NUM_ENGINES)}
        ending.callback(lambda: [engine.kill() for engine in self.engines.values()])
        redis = ending.enter_context(redis_server(persistent=True))
        flags = "--redis-url", redis.url, "--debug-route", "--sse-keepalive-seconds", "0"
        self.router = Router(model, list(self.engines), folder, *flags)
        ending.callback(self.router.kill)
        self.router.wait_ready()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in (self.router, *self.engines.values())]

    def wait_ready(self) -> None:
        """Until the router has all engines."""
        eventually(lambda: self.router.metric(_READY) == _NUM_ENGINES, timeout=120)

    def replace(self, address: str) -> None:
        """Ends an engine, whatever its state, and starts another on its port."""
        self.engines[address].kill()
        self.engines[address] = self._engine(self.engines[address].port)

    def _engine(self, port: int) -> Engine:
        return Engine(self._model, self._folder, "--dtype", "float32", "--shutdown-timeout", "0.1", port=port)


async def one_round(
    fleet: Fleet, streams: int, tokens: int, fault: Callable[[Engine], None] | None
) -> tuple[list[Stream], str]:
    """All streams at once, and the address of the engine that ``fault`` was done to when all had begun."""
    every = [Stream(number) for number in range(streams)]
    async with httpx.AsyncClient(base_url=fleet.router.url, timeout=120) as http:
        running = [asyncio.create_task(stream.run(http, tokens)) for stream in every]
        while not all(stream.events >= _BEGUN for stream in every):
            await asyncio.wait(running, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                if task.done():
                    task.result()
        victim = every[0].engine
        if fault is not None:
            fault(fleet.engines[victim])
        await asyncio.gather(*running)
    return every, victim


def measure(fleet: Fleet, name: str, options: argparse.Namespace, expected: list[str]) -> Pauses:
    """All rounds of one fault."""
    found = Pauses()
    for number in range(options.rounds):
        fleet.wait_ready()
        waits = Waits()
        with waits.watch(fleet.pids):
            streams, victim = asyncio.run(one_round(fleet, options.streams, options.tokens, FAULTS[name]))
        moved = [stream for stream in streams if stream.engine == victim]
        hit = [stream.pause for stream in moved]
        found.hit += hit
        found.unexplained += [
            stream.pause - waits.within(stream.paused_at, stream.paused_at + stream.pause) for stream in moved
        ]
        found.others += [stream.pause for stream in streams if stream.engine != victim]
        found.changed += sum(stream.text != text for stream, text in zip(streams, expected, strict=True))
        print(f"{name} {number + 1:3d}: {len(hit)} streams moved, longest pause {max(hit):.2f} s", flush=True)
        fleet.replace(victim)
    return found


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    lines, is_met = [], True
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="quire-failover-")))
        fleet = Fleet(options.model, folder, ending)
        fleet.wait_ready()
        expected = [stream.text for stream in asyncio.run(one_round(fleet, options.streams, options.tokens, None))[0]]
        for name in options.faults:
            found = measure(fleet, name, options, expected)
            worst = percentile(found.unexplained if name == "drained" else found.hit, 0.99)
            is_met &= worst <= BARS[name] and not found.changed
            lines.append(
                f"{name}: {len(found.hit)} streams moved, pause p50 {percentile(found.hit, 0.5):.2f} s, "
                f"p99 {percentile(found.hit, 0.99):.2f} s, longest {max(found.hit):.2f} s; without waits "
                f"for processors p99 {percentile(found.unexplained, 0.99):.2f} s (bar {BARS[name]} s); the others' p99 "
                f"{percentile(found.others, 0.99):.2f} s; {found.changed} texts changed"
            )
    print("\n" + "\n".join(lines))
    return 0 if is_met else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left behind
    sys.exit(main())
