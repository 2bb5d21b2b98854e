"""What is known of placement shows in the simulator, with slack."""

from typing import Any

from quire_router.simulation.experiments import at_utilisation, read_jobs, tenant_report, with_flood

from tests.sim.fleets import UNIQUE, report, run, settings


def test_following_prefixes_and_load_beats_following_either() -> None:
    means = {name: report(policies=[name], utilisation=[0.9]) for name in ("cost", "round_robin", "least_load")}
    assert means["cost"].ttft.mean < 0.8 * means["round_robin"].ttft.mean
    assert means["cost"].ttft.mean < 0.9 * means["least_load"].ttft.mean
    assert means["cost"].hit_rate > 1.2 * means["round_robin"].hit_rate


def test_routers_that_do_not_share_load_make_requests_wait() -> None:
    shape: dict[str, Any] = {
        **UNIQUE,
        "gsp_prompts_per_group": 30,
        "replicas": 8,
        "utilisation": [0.9],
        "load_age": 5.0,
    }
    deaf = report(**shape, share_age=None)
    told = report(**shape, share_age=0, share_delay=0)
    assert deaf.ttft.mean > 1.3 * told.ttft.mean


def test_more_load_means_longer_waits() -> None:
    calm, busy = (report(**UNIQUE, utilisation=[load], gsp_prompts_per_group=24) for load in (0.4, 1.2))
    assert busy.ttft.mean > 1.5 * calm.ttft.mean
    assert busy.busy > calm.busy


def test_a_fair_queue_keeps_the_others_waits_short_when_one_tenant_floods() -> None:
    config = settings(**UNIQUE, tenants=4, flood=30, utilisation=[0.5], room_seconds=0.2)
    jobs = at_utilisation(config, read_jobs(config), 0.5)
    flooded = with_flood(config, jobs)
    assert len(flooded) > 7 * len(jobs)
    shape = {**UNIQUE, "tenants": 4, "room_seconds": 0.2}
    calm = run(jobs, **shape)
    fair = tenant_report(calm, run(flooded, **shape))
    unfair = tenant_report(calm, run(flooded, **shape, admission=False))
    assert fair.flooded.ttft_p95 < 0.2 * unfair.flooded.ttft_p95
    assert fair.flooded.ttft_p95 < fair.flood.ttft_p95
    assert fair.flooded.rejects == 0
