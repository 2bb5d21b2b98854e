"""What a tenant that sends far more than its part does to the others: its requests, and their waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from quire_engine.executor.mixing import splitmix, uniform
from quire_engine.simulation.clock import NANOSECONDS

from quire_router.simulation.recorder import RequestTrace, RunRecord
from quire_router.simulation.report import ttft
from quire_router.simulation.workload import Job

_WHO, _WHEN = range(100, 102)


@dataclass(frozen=True, slots=True)
class Waits:
    """95th percentiles, in seconds: from the arrival until the router's queue let go of a request, and until its first
    token; and how many were not completed.
    """

    turn_p95: float
    ttft_p95: float
    rejects: int


@dataclass(frozen=True, slots=True)
class TenantReport:
    """The waits of all tenants but the first, without its flood and with it, and those of the flood."""

    calm: Waits
    flooded: Waits
    flood: Waits


def assign_tenants(jobs: Sequence[Job], tenants: int, seed: int) -> list[Job]:
    """Each job is anybody's; with one tenant it has no name."""
    if tenants == 1:
        return list(jobs)
    return [replace(job, tenant=f"tenant-{splitmix(seed, _WHO, index) % tenants}") for index, job in enumerate(jobs)]


def add_flood(jobs: Sequence[Job], tenants: int, times: float, seed: int) -> list[Job]:
    """The jobs, and so many more of the first tenant that it sends ``times`` as much as before. Prompts of the flood
    are other tenants' jobs over again, with contents of their own.
    """
    more = round((times - 1) * len(jobs) / tenants)
    end = jobs[-1].time
    names = 1 + max(name for job in jobs for name, _ in job.segments)
    extra: list[Job] = []
    for index in range(more):
        job = jobs[index % len(jobs)]
        shift = names * (1 + index // len(jobs))
        segments = tuple((name + shift, length) for name, length in job.segments)
        extra.append(Job(end * uniform(seed, _WHEN, index), segments, job.num_output, "tenant-0"))
    return sorted([*jobs, *extra], key=lambda job: job.time)


def tenant_report(calm: RunRecord, flooded: RunRecord) -> TenantReport:
    """The two runs beside each other."""
    return TenantReport(
        _measure_waits(trace for trace in calm.traces if trace.tenant != "tenant-0"),
        _measure_waits(trace for trace in flooded.traces if trace.tenant != "tenant-0"),
        _measure_waits(trace for trace in flooded.traces if trace.tenant == "tenant-0"),
    )


def _measure_waits(traces: Iterable[RequestTrace]) -> Waits:
    asked = list(traces)
    turns = [(trace.placed - trace.arrived) / NANOSECONDS for trace in asked if trace.placed is not None]
    first = [ttft(trace) for trace in asked if trace.first_token is not None]
    return Waits(_p95(turns), _p95(first), sum(trace.error is not None for trace in asked))


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else 0.0
