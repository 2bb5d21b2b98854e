"""What a flood does to other tenants, with the engines' real schedulers: against the same traffic without the flood."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from quire_router.admission.fair_queue import FairQueue
from quire_router.simulation.experiments import TenantReport, assign_tenants, at_utilisation, tenant_report, with_flood
from quire_router.simulation.workload import Job

from tests.sim.fleets import run, settings

SHAPE: dict[str, Any] = {"engines": 8, "block_size": 64, "tenants": 8, "flood": 10}


def conversations(count: int) -> Iterator[Job]:
    """Requests whose lengths vary as those of conversations do: most prompts are short, and some are long."""
    chance, time = Random(0), 0.0
    for name in range(count):
        time += chance.expovariate(1)
        prompt = min(20 + int(chance.lognormvariate(6.7, 1.0)), 6000)
        yield Job(time, ((name, prompt),), 1 + min(int(chance.expovariate(1 / 64)), 400))


def jobs_at(utilisation: float, count: int = 400, **shape: Any) -> list[Job]:
    config = settings(**SHAPE | shape)
    return at_utilisation(config, assign_tenants(list(conversations(count)), config.tenants, 0), utilisation)


def waits_at(utilisation: float, **shape: Any) -> TenantReport:
    jobs = jobs_at(utilisation, **shape)
    flooded = with_flood(settings(**SHAPE | shape), jobs)
    return tenant_report(run(jobs, **SHAPE | shape), run(flooded, **SHAPE | shape))


@pytest.mark.parametrize("utilisation", [*(pytest.param(low, marks=pytest.mark.soak) for low in (0.3, 0.5)), 0.7])
def test_a_tenant_that_sends_ten_times_as_much_raises_the_others_p95_waits_by_less_than_a_fifth(
    utilisation: float,
) -> None:
    """Their waits for a turn and for the first token; the utilisations are those without the flood."""
    waits = waits_at(utilisation)
    assert waits.flooded.turn_p95 <= 1.2 * waits.calm.turn_p95
    assert waits.flooded.ttft_p95 <= 1.2 * waits.calm.ttft_p95
    assert waits.flooded.rejects == 0


@pytest.mark.soak
def test_the_order_of_turns_alone_does_not_keep_that_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "is_ahead", lambda *_: False)
    waits = waits_at(0.7)
    assert waits.flooded.turn_p95 > 1.2 * waits.calm.turn_p95
    assert waits.flooded.ttft_p95 > 1.2 * waits.calm.ttft_p95


def test_a_tenant_that_is_alone_gets_all_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it sends, it is treated as if no room were ever kept."""
    alone = {"tenants": 1, "flood": None}
    jobs = jobs_at(1.5, 150, **alone)
    traces = run(jobs, **SHAPE | alone).traces
    assert any(trace.placed is not None and trace.placed > trace.arrived for trace in traces)
    monkeypatch.setattr(FairQueue, "is_ahead", lambda *_: False)
    assert traces == run(jobs, **SHAPE | alone).traces
