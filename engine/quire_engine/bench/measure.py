"""Measures systems over rounds in which they take turns (``run_in_turn``) or one after the other (``run_apart``).
``PeerProcess`` is a system in a process of its own.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from quire_engine.bench.workload import Workload
from quire_engine.simulation.report import Percentiles

Measured = Literal["throughput", "latency", "prefill"]
Figure = Measured | Literal["E2EL mean", "E2EL p99"]
UNITS: Mapping[Figure, str] = {
    "throughput": "output tokens/s",
    "E2EL mean": "s",
    "E2EL p99": "s",
    "latency": "ms/token",
    "prefill": "tokens/s",
}
LOWER_IS_BETTER = ("latency", "E2EL mean", "E2EL p99")
SCRIPTS = Path(__file__).parent / "peers"


SECONDS_TO_END = 20.0
SHOWN_LINES = 3  # of a failed peer's standard error


class System(Protocol):
    """A system to measure, with the model loaded."""

    padding: float | None
    """The part of the token positions of the last workload that were computed for nothing; None if it is unknown."""

    latencies: Sequence[float]
    """Seconds from the beginning to the end of each request of the last workload; empty if they are unknown."""

    def seconds(self, workload: Workload) -> float:
        """Runs all requests at once to their ends, and returns how long that took. Raises ``SystemFailedError``."""
        ...

    def close(self) -> None:
        """Stops it and frees its memory."""
        ...


class SystemFailedError(Exception):
    """A system cannot be started, or failed. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The workload of each figure, as a function of the round's number. Each is run once before the first round, with
    at most ``warm_up_len`` tokens of each output, or all of them. ``has_latencies``: the latencies of the requests of
    throughput are figures too.
    """

    workloads: Mapping[Measured, Callable[[int], Workload]]
    rounds: int
    warm_up_len: int | None = None
    has_latencies: bool = False

    def warm_up(self, figure: Measured) -> Workload:
        """What is run before the first round."""
        workload = self.workloads[figure](self.rounds)
        most = self.warm_up_len
        return workload if most is None else replace(workload, outputs=[min(most, size) for size in workload.outputs])


@dataclass(slots=True)
class Readings:
    """One system's values, one for each round, in the units of ``UNITS``; or the reason of its failure. ``padding`` is
    that of the last round of throughput.
    """

    values: dict[Figure, list[float]] = field(default_factory=dict)
    padding: float | None = None
    failure: str | None = None

    def median(self, figure: Figure) -> float | None:
        """The median over all rounds; None if there is none."""
        values = self.values.get(figure)
        return statistics.median(values) if values else None


def run_in_turn(
    systems: Mapping[str, Callable[[], System]],
    plan: Plan,
    report: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> dict[str, Readings]:
    """Starts all systems, then measures one after the other in each round. Calls ``between`` before each measurement,
    and ``report`` with a line when anything begins that takes long, and with each value: a run that is cut off has
    shown what it measured.
    """
    readings = {name: Readings() for name in systems}
    with ExitStack() as started:
        running: dict[str, System] = {}
        for name, start in systems.items():
            report(f"starting {name}")
            with _record_failure(readings[name]):
                running[name] = started.enter_context(closing(start()))
                _warm(running[name], plan, report=report, name=name)
        for number in range(plan.rounds):
            for name, system in running.items():
                if readings[name].failure is None:
                    between()
                    with _record_failure(readings[name]):
                        _round(readings[name], system, plan, number, report=report, name=name)
    return readings


def run_apart(
    systems: Mapping[str, Callable[[], System]],
    plan: Plan,
    report: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> dict[str, Readings]:
    """Starts one system after the other, measures it in all rounds and stops it. Arguments as in ``run_in_turn``."""
    readings: dict[str, Readings] = {}
    for name, start in systems.items():
        readings |= run_in_turn({name: start}, plan, report, between)
    return readings


def ratio(ours: float, theirs: float, figure: Figure) -> float:
    """How many times better ``ours`` is."""
    return theirs / ours if figure in LOWER_IS_BETTER else ours / theirs


@contextmanager
def _record_failure(readings: Readings) -> Iterator[None]:
    """Records the failure of a system, so that the others can be measured."""
    try:
        yield
    except SystemFailedError as failure:
        readings.failure = str(failure)


def _warm(system: System, plan: Plan, *, report: Callable[[str], None], name: str) -> None:
    """Runs everything once: starts threads, fills caches, and compiles or packs what is needed."""
    for figure in plan.workloads:
        report(f"warming up {name}: {figure}")
        system.seconds(plan.warm_up(figure))


def _round(
    readings: Readings, system: System, plan: Plan, number: int, *, report: Callable[[str], None], name: str
) -> None:
    for figure, make in plan.workloads.items():
        report(f"round {number + 1} of {plan.rounds}: {name}, {figure}")
        value = _read(figure, system, make(number))
        report(f"  {value:,.4g} {UNITS[figure]}")
        readings.values.setdefault(figure, []).append(value)
        if figure == "throughput":
            readings.padding = system.padding
            if plan.has_latencies and system.latencies:
                latencies = Percentiles.of(system.latencies)
                readings.values.setdefault("E2EL mean", []).append(latencies.mean)
                readings.values.setdefault("E2EL p99", []).append(latencies.p99)


def _read(figure: Measured, system: System, workload: Workload) -> float:
    seconds = system.seconds(workload)
    match figure:
        case "throughput":
            return workload.output_tokens / seconds
        case "prefill":
            return sum(map(len, workload.prompts)) / seconds
        case "latency":
            return 1e3 * (seconds - system.seconds(first_tokens(workload))) / (workload.output_tokens - 1)


def first_tokens(workload: Workload) -> Workload:
    """The same prompts with one output token each: the part of a stream's time that is not between its tokens."""
    return Workload(workload.prompts, [1] * len(workload.prompts), workload.n)


class PeerProcess:
    """A peer in a process of its own, in the environment where it is installed. A ``System``.

    The child gets its settings as JSON on its command line. It reads a JSON line ``{"prompts", "outputs", "n"}`` for
    each workload. Its answers are JSON lines too: first ``{"ready": name and version}``, then ``{"seconds",
    "padding"}`` for each workload, or ``{"error"}`` with one sentence.
    """

    padding: float | None = None
    latencies: Sequence[float] = ()

    def __init__(
        self, python: Path, script: str, settings: Mapping[str, object], environment: Mapping[str, str]
    ) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(  # noqa: S603 - our own script, and no shell
            [str(python), str(SCRIPTS / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            self.name = str(self._answer()["ready"])
        except BaseException:
            self.close()
            raise

    def seconds(self, workload: Workload) -> float:
        """See ``System.seconds``."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(asdict(workload)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemFailedError(self._stderr_tail()) from None
        answer = self._answer()
        self.padding = float(answer["padding"])
        return float(answer["seconds"])

    def close(self) -> None:
        """Closes its input and waits for its end; kills its process group after ``SECONDS_TO_END``."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            _end_group(self._process.pid)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemFailedError(self._stderr_tail())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemFailedError(str(answer["error"]))
        return answer

    def _stderr_tail(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read()[-4096:].splitlines() if line.strip()]
        return f"It ended: {' / '.join(lines[-SHOWN_LINES:]) or 'it said nothing'}"


def has_module(python: Path, module: str) -> bool:
    """Whether the environment of an interpreter has ``module``."""
    test = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", test], check=False, capture_output=True, timeout=60).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


def own_python() -> Path:
    """The interpreter of this process."""
    return Path(sys.executable)


def _end_group(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
