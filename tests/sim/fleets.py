"""Small fleets, and what may be asked of every run of one."""

from typing import Any

from quire_router.simulation.config import FleetSettings
from quire_router.simulation.experiments import at_utilisation, read_jobs
from quire_router.simulation.report import Report, RunRecord, make_report
from quire_router.simulation.simulated_fleet import FleetSimulation
from quire_router.simulation.workload import Job

SMALL: dict[str, Any] = {
    "engines": 4,
    "gsp_num_groups": 16,
    "gsp_prompts_per_group": 12,
    "gsp_system_prompt_len": 1024,
    "gsp_question_len": 64,
    "gsp_output_len": 16,
}
UNIQUE: dict[str, Any] = {"gsp_system_prompt_len": 0, "gsp_question_len": 512}
AT_ONCE: dict[str, Any] = {"share_age": 0, "share_delay": 0, "load_age": 0, "event_delay": 0}
IDEAL: dict[str, Any] = {
    "weights_seconds": 0, "context_seconds": 0, "pair_seconds": 0, "draw_seconds": 0, "overhead_seconds": 0,
    "tokens_per_second": 1000,
}  # fmt: skip


def settings(**changes: Any) -> FleetSettings:
    return FleetSettings(**(SMALL | changes))


def run(jobs: list[Job] | None = None, **changes: Any) -> RunRecord:
    """One policy at one load."""
    config = settings(**({"policies": ["cost"]} | changes))
    (policy,), (load,) = config.placement, config.utilisation
    timed = at_utilisation(config, read_jobs(config), load) if jobs is None else jobs
    return FleetSimulation(config.fleet(policy), config, config.seed).run(timed)


def report(**changes: Any) -> Report:
    return make_report(run(**changes))


def assert_sound(record: RunRecord, jobs: list[Job]) -> None:
    """Every request ended once, in its order, with all of its tokens or an error, and no memory is lost."""
    assert record.leaked_blocks == 0
    assert record.end == max(trace.ended or 0 for trace in record.traces)
    assert max(record.busy) <= record.end
    assert len(record.traces) == len(jobs)
    for job, trace in zip(jobs, record.traces, strict=True):
        assert trace.ended is not None
        if trace.error is not None:
            assert trace.num_tokens < job.num_output
            continue
        assert trace.num_tokens == job.num_output
        assert None not in (trace.placed, trace.first_token, trace.last_token)
        assert trace.arrived <= trace.placed < trace.first_token <= trace.last_token == trace.ended <= record.end
        assert 0 <= trace.cached_tokens < job.num_prompt
