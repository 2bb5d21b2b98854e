"""What a batch does to interactive requests' first tokens, with the engines' real schedulers and the real queue."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from quire_router.simulation.experiments import at_utilisation
from quire_router.simulation.report import RequestTrace
from quire_router.simulation.workload import Job

from tests.sim.fleets import run, settings

BAR = 1.05
SHAPE: dict[str, Any] = {"block_size": 64, "preset": "a100-8b"}


def conversations(count: int) -> list[Job]:
    """Requests whose lengths vary as those of conversations do."""
    chance, time, jobs = Random(0), 0.0, list[Job]()
    for name in range(count):
        time += chance.expovariate(1)
        prompt = min(20 + int(chance.lognormvariate(6.7, 1.0)), 6000)
        jobs.append(Job(time, ((name, prompt),), 1 + min(int(chance.expovariate(1 / 64)), 400)))
    return jobs


def batch(count: int) -> list[Job]:
    """Lines that are all there from the beginning."""
    chance = Random(1)
    return [
        Job(
            0.0,
            ((10**6 + name, 20 + int(chance.expovariate(1 / 500))),),
            1 + int(chance.expovariate(1 / 100)),
            best_effort=True,
        )
        for name in range(count)
    ]


def p95(traces: list[RequestTrace]) -> float:
    waits = sorted(trace.first_token - trace.arrived for trace in traces if trace.first_token is not None)
    assert len(waits) == len(traces)
    return float(waits[int(0.95 * (len(waits) - 1))])


def ratio(engines: int, utilisation: float, lines: list[Job], count: int) -> tuple[float, list[RequestTrace]]:
    """The p95 of the time to the first token with a batch over that without, and what became of the lines."""
    shape = {**SHAPE, "engines": engines}
    jobs = at_utilisation(settings(**shape), conversations(count), utilisation)
    calm = run(jobs, **shape).traces
    record = run([*jobs, *lines], **shape)
    assert record.leaked_blocks == 0
    assert all(trace.error is None for trace in record.traces)
    return p95(record.traces[:count]) / p95(calm), record.traces[count:]


@pytest.mark.parametrize(
    ("engines", "utilisation", "count"),
    [(1, 0.3, 100), pytest.param(4, 0.5, 1_000, marks=pytest.mark.soak)],
)
def test_a_batch_that_fills_a_fleet_raises_the_p95_of_first_tokens_by_a_twentieth_at_most(
    engines: int, utilisation: float, count: int
) -> None:
    raised, lines = ratio(engines, utilisation, batch(2 * count), count)
    assert raised <= BAR
    assert len({trace.ended for trace in lines}) > 10, "they are not all over before anybody comes"


def test_the_same_lines_without_the_class_raise_it_by_more() -> None:
    raised, _ = ratio(1, 0.3, [replace(job, best_effort=False) for job in batch(100)], 60)
    assert raised > 2 * BAR
