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


def ratio(engines: int, utilisation: float, lines: list[Job], count: int = 300) -> float:
    """The p95 of the time to the first token with a batch that is not done before the last request, over without."""
    shape = {**SHAPE, "engines": engines}
    jobs = at_utilisation(settings(**shape), conversations(count), utilisation)
    calm = run(jobs, **shape).traces
    record = run([*jobs, *lines], **shape)
    traces, of_lines = record.traces[: len(jobs)], record.traces[len(jobs) :]
    assert record.leaked_blocks == 0
    assert all(trace.error is None for trace in record.traces)
    assert max(trace.ended or 0 for trace in of_lines) > traces[-1].arrived, (
        "the batch lasts as long as the others come"
    )
    assert any((trace.ended or 0) < traces[-1].arrived for trace in of_lines), "and advances meanwhile"
    return p95(traces) / p95(calm)


@pytest.mark.parametrize(("engines", "utilisation"), [(1, 0.3), (4, 0.5)])
def test_a_batch_that_fills_a_fleet_raises_the_p95_of_first_tokens_by_a_twentieth_at_most(
    engines: int, utilisation: float
) -> None:
    assert ratio(engines, utilisation, batch(600 * engines)) <= BAR


def test_the_same_requests_without_the_class_raise_it_by_more() -> None:
    plain = [replace(job, best_effort=False, time=0.5 * number) for number, job in enumerate(batch(600))]
    assert ratio(1, 0.3, plain) > BAR
