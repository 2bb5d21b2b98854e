"""Whatever the fleet: every request ends once, everything is given back, and equal seeds are equal runs."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from quire_router.simulation.config import POLICIES
from quire_router.simulation.experiments import add_flood, at_utilisation, read_jobs
from quire_router.simulation.simulated_fleet import FleetSimulation

from tests.sim.fleets import AT_ONCE, UNIQUE, assert_sound, report, run, settings

shapes = st.fixed_dictionaries(
    {
        "engines": st.integers(1, 4),
        "replicas": st.integers(1, 4),
        "policies": st.sampled_from(POLICIES).map(lambda name: [name]),
        "utilisation": st.sampled_from([[0.3], [1.0], [4.0]]),
        "share_age": st.sampled_from([None, 0, 0.1, 3.0]),
        "load_age": st.sampled_from([0, 0.01, 2.0]),
        "event_delay": st.sampled_from([0, 0.01, 2.0]),
        "admission": st.booleans(),
        "room_seconds": st.sampled_from([0.05, 2.0]),
        "tenants": st.sampled_from([1, 3]),
        "num_gpu_blocks_override": st.sampled_from([None, 40]),
        "swap_space": st.sampled_from([4.0, 0.5]),
        "kv_disk_space": st.sampled_from([0, 0.1, 10]),
        "max_num_seqs": st.sampled_from([3, 256]),
        "max_waiting": st.sampled_from([2, 1 << 20]),
        "limit": st.just(60),
        "seed": st.integers(0, 1000),
    }
)


@examples(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes, st.booleans())
def test_every_request_ends_once_and_everything_is_freed(shape: dict[str, Any], floods: bool) -> None:
    config = settings(**shape)
    (policy,), (load,) = config.placement, config.utilisation
    jobs = at_utilisation(config, read_jobs(config), load)
    if floods and config.tenants > 1:
        jobs = add_flood(jobs, config.tenants, 3.0, config.seed)
    simulation = FleetSimulation(config.fleet(policy), config, config.seed)
    assert_sound(simulation.run(jobs), jobs)
    assert simulation.in_flight == 0


@pytest.mark.parametrize("changes", [{"replicas": 3}, {"policies": ["power_of_two"]}, {"jitter": 0.3}])
def test_equal_seeds_are_equal_runs_and_others_are_not(changes: dict[str, Any]) -> None:
    one, same, other = (run(seed=seed, **changes) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("policy", ["least_load", "llm_d", "sglang"])
def test_routers_with_instant_load_sharing_decide_as_one_does(policy: str) -> None:
    """Without shared prefixes: what a router expects to be cached soon, it does not tell the others."""
    shape: dict[str, Any] = {**UNIQUE, **AT_ONCE, "policies": [policy], "utilisation": [0.9]}
    one, four = (run(**shape, admission=False, replicas=replicas) for replicas in (1, 4))
    assert [(trace.engine, trace.first_token) for trace in one.traces] == [
        (trace.engine, trace.first_token) for trace in four.traces
    ]
    assert len({trace.router for trace in four.traces}) == 4


def test_four_routers_with_instant_load_sharing_are_as_good_as_one_with_cost() -> None:
    """They decide a little differently, as each remembers the queues that its own requests found."""
    one, four = (
        report(**UNIQUE, **AT_ONCE, utilisation=[0.9], replicas=replicas, gsp_prompts_per_group=30)
        for replicas in (1, 4)
    )
    assert four.ttft.mean < 1.1 * one.ttft.mean


def test_routers_without_load_sharing_decide_differently() -> None:
    shape: dict[str, Any] = {**UNIQUE, **AT_ONCE, "load_age": 1e3, "utilisation": [0.9], "replicas": 4}
    deaf = run(**shape | {"share_age": None})
    assert [trace.engine for trace in deaf.traces] != [trace.engine for trace in run(**shape).traces]
