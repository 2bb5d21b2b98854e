"""What ``quire-router simulate`` does: reads settings and requests, runs the policies, prints the reports."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from quire_engine.simulation.trace import TraceError
from quire_proto.cli import read_settings
from quire_proto.extras import install_command
from quire_proto.terminal import fail, waiting

from quire_router.simulation.config import FleetSettings
from quire_router.simulation.experiments import (
    Records,
    TenantReport,
    make_table,
    make_tenant_table,
    read_jobs,
    run_all,
    tenant_report,
    with_flood,
)
from quire_router.simulation.report import Report, draw_plots, make_report
from quire_router.simulation.workload import Job

Reports = Mapping[float, Mapping[str, Report]]
TenantReports = Mapping[float, Mapping[str, TenantReport]]


def run(arguments: Sequence[str]) -> None:
    """Runs the command; see ``simulate``."""
    settings = read_settings(FleetSettings, arguments)
    try:
        jobs = read_jobs(settings)
    except TraceError as error:
        fail(str(error))
    records = run_all(settings, jobs, watch=waiting)
    tenants = _run_flood(settings, jobs, records) if settings.flood is not None else {}
    reports = {load: {name: make_report(each) for name, each in row.items()} for load, row in records.items()}
    output = _as_json(settings, reports, tenants) if settings.as_json else _as_text(settings, reports, tenants)
    sys.stdout.write(f"{output}\n")
    if settings.plot is not None:
        _plot(settings.plot, records)


def _run_flood(settings: FleetSettings, jobs: Sequence[Job], calm: Records) -> TenantReports:
    """Runs all once more with the flood. Returns the waits with and without it."""
    flooded = run_all(settings, jobs, with_flood, waiting)
    return {
        load: {name: tenant_report(record, flooded[load][name]) for name, record in row.items()}
        for load, row in calm.items()
    }


def _as_text(settings: FleetSettings, reports: Reports, tenants: TenantReports) -> str:
    parts: list[str] = []
    for load, row in reports.items():
        one = next(iter(row.values()))
        parts.append(
            f"utilisation {load:g}, {settings.engines} engines, {settings.replicas} routers; "
            f"{one.requests} requests within {one.arrival_seconds:.0f} s"
        )
        parts.append(make_table(row))
        if load in tenants:
            parts.append(f"waits of all tenants but the first, which then sends {settings.flood:g} times as much")
            parts.append(make_tenant_table(tenants[load]))
    return "\n".join(parts)


def _as_json(settings: FleetSettings, reports: Reports, tenants: TenantReports) -> str:
    """Returns the settings and the reports of all runs."""
    dumped = settings.model_dump(mode="json", exclude={"as_json", "plot"})
    dumped |= {"latency": asdict(settings.latency), "capacity": asdict(settings.kv_cache_config)}
    runs = [
        {"utilisation": load, "policy": name, "report": asdict(report)}
        for load, row in reports.items()
        for name, report in row.items()
    ]
    for entry in runs if tenants else ():
        entry["tenants"] = asdict(tenants[entry["utilisation"]][entry["policy"]])  # type: ignore[index]
    return json.dumps({"settings": dumped, "runs": runs}, indent=2)


def _plot(path: Path, records: Records) -> None:
    try:
        draw_plots(path, records)
    except ImportError:
        fail(f"Plots need matplotlib: {install_command('quire-router', 'plot')}.")
    except (OSError, ValueError) as error:
        fail(f"The plot cannot be written: {error}.")
