"""The measurements, and their medians over rounds in which the systems take turns."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire_engine.bench.workload import Workload

Figure = Literal["throughput", "latency", "prefill"]
UNITS: Mapping[Figure, str] = {"throughput": "output tokens/s", "latency": "ms/token", "prefill": "tokens/s"}
LOWER_IS_BETTER = ("latency",)


class System(Protocol):
    """What is measured, with the model loaded."""

    def seconds(self, workload: Workload) -> float:
        """Runs all requests at once to their ends, and returns how long that took. Raises ``SystemFailedError``."""
        ...

    def close(self) -> None:
        """Ends it, and gives its memory back."""
        ...


class SystemFailedError(Exception):
    """A system cannot be started or broke down; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured in each round, by figure: a function of the round's number."""

    workloads: Mapping[Figure, Callable[[int], Workload]]
    rounds: int


@dataclass(slots=True)
class Readings:
    """What one system showed, round by round, in the units of ``UNITS``; or why there is nothing."""

    values: dict[Figure, list[float]] = field(default_factory=dict)
    failure: str | None = None

    def median(self, figure: Figure) -> float | None:
        """Of all rounds; None where there were none."""
        values = self.values.get(figure)
        return statistics.median(values) if values else None


def run_in_turn(
    systems: Mapping[str, Callable[[], System]],
    plan: Plan,
    report: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> dict[str, Readings]:
    """All systems are started, then each round runs one after the other. ``between`` is called before each system's
    turn.
    """
    readings = {name: Readings() for name in systems}
    with ExitStack() as started:
        running: dict[str, System] = {}
        for name, start in systems.items():
            report(f"starting {name}")
            with _noted(readings[name]):
                running[name] = started.enter_context(closing(start()))
                _warm(running[name], plan)
        for number in range(plan.rounds):
            for name, system in running.items():
                if readings[name].failure is None:
                    between()
                    report(f"round {number + 1} of {plan.rounds}: {name}")
                    with _noted(readings[name]):
                        _round(readings[name], system, plan, number)
    return readings


def run_apart(
    systems: Mapping[str, Callable[[], System]],
    plan: Plan,
    report: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> dict[str, Readings]:
    """One system after the other is started, measured in all rounds and ended. ``between`` as in ``run_in_turn``."""
    readings: dict[str, Readings] = {}
    for name, start in systems.items():
        readings |= run_in_turn({name: start}, plan, report, between)
    return readings


def ratio(ours: float, theirs: float, figure: Figure) -> float:
    """How many times better ours is."""
    return theirs / ours if figure in LOWER_IS_BETTER else ours / theirs


@contextmanager
def _noted(readings: Readings) -> Iterator[None]:
    """What a system fails with is noted, and the others go on."""
    try:
        yield
    except SystemFailedError as failure:
        readings.failure = str(failure)


def _warm(system: System, plan: Plan) -> None:
    """Runs everything once: threads, caches, what is compiled or packed when it is first needed."""
    for make in plan.workloads.values():
        system.seconds(make(plan.rounds))


def _round(readings: Readings, system: System, plan: Plan, number: int) -> None:
    for figure, make in plan.workloads.items():
        readings.values.setdefault(figure, []).append(_read(figure, system, make(number)))


def _read(figure: Figure, system: System, workload: Workload) -> float:
    seconds = system.seconds(workload)
    match figure:
        case "throughput":
            return workload.output_tokens / seconds
        case "prefill":
            return sum(map(len, workload.prompts)) / seconds
        case "latency":
            return 1e3 * (seconds - system.seconds(first_tokens(workload))) / (workload.output_tokens - 1)


def first_tokens(workload: Workload) -> Workload:
    """The same prompts, answered with one token each: what of a stream is not the time between its tokens."""
    return Workload(workload.prompts, [1] * len(workload.prompts))
