"""All runs of one command: each policy at each utilisation, on the same requests; with a flood of one tenant if that is
asked for; and the tables of the report.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
from quire_engine.simulation.simulated_executor import splitmix, uniform
from quire_engine.simulation.simulator import NANOSECONDS

from quire_router.simulation.config import FleetSettings
from quire_router.simulation.report import Report, RequestTrace, RunRecord, ttft
from quire_router.simulation.simulated_fleet import FleetSimulation
from quire_router.simulation.workload import Job, from_trace, generate, span, stretched_to

Records = dict[float, dict[str, RunRecord]]
Change = Callable[[FleetSettings, list[Job]], list[Job]]

_TENANT_DRAW, _TIME_DRAW = range(100, 102)  # streams of random numbers

_COLUMNS: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("hits", lambda r: f"{100 * r.hit_rate:.1f} %"),
    ("TTFT mean, s", lambda r: f"{r.ttft.mean:.3f}"),
    ("p50", lambda r: f"{r.ttft.p50:.3f}"),
    ("p90", lambda r: f"{r.ttft.p90:.3f}"),
    ("p99", lambda r: f"{r.ttft.p99:.3f}"),
    ("TPOT, ms", lambda r: f"{1000 * r.tpot.mean:.1f}"),
    ("E2EL p50, s", lambda r: f"{r.e2el.p50:.2f}"),
    ("rejects", lambda r: str(r.requests - r.completed)),
    ("imbalance", lambda r: f"{r.imbalance:.3f}"),
    ("busy", lambda r: f"{100 * r.busy:.0f} %"),
    ("preempted", lambda r: str(r.preemptions)),
)


def read_jobs(settings: FleetSettings) -> list[Job]:
    """Returns the requests; ``at_utilisation`` sets their final times. Raises ``TraceError``."""
    if settings.trace is None:
        jobs = generate(settings.shared_prefix, settings.seed)[: settings.limit]
    else:
        jobs = from_trace(settings.trace, start=settings.start, limit=settings.limit, seed=settings.seed)
    return assign_tenants(jobs, settings.tenants, settings.seed)


def unchanged(settings: FleetSettings, jobs: list[Job]) -> list[Job]:
    """Returns the requests as they are."""
    del settings
    return jobs


def with_flood(settings: FleetSettings, jobs: list[Job]) -> list[Job]:
    """Returns the requests with the flood of the first tenant."""
    return add_flood(jobs, settings.tenants, settings.flood or 1.0, settings.seed)


def run_all(
    settings: FleetSettings,
    jobs: Sequence[Job],
    change: Change = unchanged,
    watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Records:
    """Runs all policies. Returns the records by utilisation and policy; ``change`` is applied to the requests once they
    have their times. ``watch`` gets a line for each run, which is inside of what it returns.
    """
    records: Records = {}
    total = len(settings.utilisation) * len(settings.placement)
    for utilisation in settings.utilisation:
        timed = change(settings, at_utilisation(settings, jobs, utilisation))
        row = records[utilisation] = dict[str, RunRecord]()
        for policy in settings.placement:
            done = sum(map(len, records.values()))
            with watch(f"run {done + 1} of {total}: {policy} at utilisation {utilisation:g}"):
                row[policy] = FleetSimulation(settings.fleet(policy), settings, settings.seed).run(timed)
    return records


def at_utilisation(settings: FleetSettings, jobs: Sequence[Job], utilisation: float) -> list[Job]:
    """Returns the jobs, arriving within the time that makes this utilisation."""
    step = settings.max_num_batched_tokens
    return stretched_to(jobs, span(jobs, utilisation, settings.engines, settings.latency, step))


def assign_tenants(jobs: Sequence[Job], tenants: int, seed: int) -> list[Job]:
    """Returns the jobs, each with a random tenant; with one tenant it has no name."""
    if tenants == 1:
        return list(jobs)
    return [
        replace(job, tenant=f"tenant-{splitmix(seed, _TENANT_DRAW, index) % tenants}") for index, job in enumerate(jobs)
    ]


def add_flood(jobs: Sequence[Job], tenants: int, times: float, seed: int) -> list[Job]:
    """Returns the jobs, and so many more of the first tenant that it sends ``times`` as much as before. Prompts of the
    flood have the shapes of all jobs again, with contents of their own.
    """
    more = round((times - 1) * len(jobs) / tenants)
    end = jobs[-1].time
    names = 1 + max(name for job in jobs for name, _ in job.segments)
    extra: list[Job] = []
    for index in range(more):
        job = jobs[index % len(jobs)]
        shift = names * (1 + index // len(jobs))
        segments = tuple((name + shift, length) for name, length in job.segments)
        extra.append(Job(end * uniform(seed, _TIME_DRAW, index), segments, job.num_output, "tenant-0"))
    return sorted([*jobs, *extra], key=lambda job: job.time)


@dataclass(frozen=True, slots=True)
class Waits:
    """95th percentiles, in seconds: from the arrival of a request until it was placed, and until its first token; and
    how many were not completed.
    """

    turn_p95: float
    ttft_p95: float
    rejects: int


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a tenant that sends far more than its part does to the others: the waits of all tenants but the first,
    without its flood and with it, and those of the flood.
    """

    calm: Waits
    flooded: Waits
    flood: Waits


def tenant_report(calm: RunRecord, flooded: RunRecord) -> TenantReport:
    """Returns the waits of both runs."""
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


def make_table(reports: Mapping[str, Report]) -> str:
    """Returns the reports as a table: one row a policy, one column a figure."""
    rows = [["policy", *(name for name, _ in _COLUMNS)]]
    rows += [[name, *(cell(report) for _, cell in _COLUMNS)] for name, report in reports.items()]
    return _format(rows)


def make_tenant_table(reports: Mapping[str, TenantReport]) -> str:
    """Returns the waits without and with the flood as a table, three rows a policy."""
    rows = [["policy", "", "turn p95, s", "", "TTFT p95, s", "", "rejects"]]
    for name, report in reports.items():
        calm = report.calm
        rows.append([name, "without", *_wait_cells(calm, calm)])
        rows.append(["", "with the flood", *_wait_cells(report.flooded, calm)])
        rows.append(["", "the flood itself", *_wait_cells(report.flood, calm)])
    return _format(rows)


def _wait_cells(waits: Waits, calm: Waits) -> list[str]:
    turn, ttft = _format_change(waits.turn_p95, calm.turn_p95), _format_change(waits.ttft_p95, calm.ttft_p95)
    return [f"{waits.turn_p95:.3f}", turn, f"{waits.ttft_p95:.3f}", ttft, str(waits.rejects)]


def _format_change(seconds: float, before: float) -> str:
    return f"{seconds / before - 1:+.0%}" if before and seconds != before else ""


def _format(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_format_row(row, widths) for row in rows)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
    return "  ".join(cells).rstrip()
