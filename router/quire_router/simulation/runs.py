"""All runs of one command: each policy at each utilisation, on the same requests."""

from collections.abc import Callable, Sequence

from quire_router.simulation.config import FleetSettings
from quire_router.simulation.fleet import FleetSimulation
from quire_router.simulation.flood import add_flood, assign_tenants
from quire_router.simulation.recorder import RunRecord
from quire_router.simulation.shared_prefix import generate
from quire_router.simulation.work import span
from quire_router.simulation.workload import Job, from_trace, stretched_to

Records = dict[float, dict[str, RunRecord]]
Change = Callable[[FleetSettings, list[Job]], list[Job]]


def read_jobs(settings: FleetSettings) -> list[Job]:
    """The requests, at times that mean nothing yet. Raises ``TraceError``."""
    if settings.trace is None:
        jobs = generate(settings.shared_prefix, settings.seed)[: settings.limit]
    else:
        jobs = from_trace(settings.trace, start=settings.start, limit=settings.limit, seed=settings.seed)
    return assign_tenants(jobs, settings.tenants, settings.seed)


def unchanged(settings: FleetSettings, jobs: list[Job]) -> list[Job]:
    """No change of the requests."""
    del settings
    return jobs


def with_flood(settings: FleetSettings, jobs: list[Job]) -> list[Job]:
    """The requests with those that the first tenant sends besides."""
    return add_flood(jobs, settings.tenants, settings.flood or 1.0, settings.seed)


def run_all(settings: FleetSettings, jobs: Sequence[Job], change: Change = unchanged) -> Records:
    """The records by utilisation and policy; ``change`` is made to the requests once they have their times."""
    records: Records = {}
    for utilisation in settings.utilisation:
        timed = change(settings, at_utilisation(settings, jobs, utilisation))
        records[utilisation] = {
            policy: FleetSimulation(settings.fleet(policy), settings, settings.seed).run(timed)
            for policy in settings.placement
        }
    return records


def at_utilisation(settings: FleetSettings, jobs: Sequence[Job], utilisation: float) -> list[Job]:
    """The jobs at times that make this utilisation."""
    step = settings.max_num_batched_tokens
    return stretched_to(jobs, span(jobs, utilisation, settings.engines, settings.latency, step))
