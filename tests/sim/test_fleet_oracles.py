"""Runs small enough to compute by hand: a token takes a millisecond and nothing else takes any time."""

from typing import Any

import pytest
from quire_engine.simulation.simulated_executor import LatencyModel, splitmix
from quire_router.core import retry as cadence
from quire_router.simulation.report import RequestTrace
from quire_router.simulation.workload import Job, work

from tests.sim.fleets import IDEAL, run

TINY: dict[str, Any] = {**IDEAL, "engines": 2, "block_size": 16, "policies": ["round_robin"], "swap_space": 0}


def milliseconds(trace: RequestTrace) -> tuple[int, int]:
    """Until the first token and until the end."""
    assert trace.first_token is not None
    assert trace.ended is not None
    return round((trace.first_token - trace.arrived) / 1e6), round((trace.ended - trace.arrived) / 1e6)


def unique(name: int, time: float, length: int, output: int = 1) -> Job:
    return Job(time, ((name, length),), output)


def test_requests_share_engines_in_turn_and_steps_are_not_cut_short() -> None:
    jobs = [unique(0, 0.0, 100, 3), unique(1, 0.0, 200), unique(2, 0.05, 40)]
    # The third comes to the first engine 50 ms into its step. The next step computes its 40 tokens and one of the first
    # request; the one after that the first's last.
    assert [milliseconds(trace) for trace in run(jobs, **TINY).traces] == [(100, 142), (200, 200), (91, 91)]


def test_a_prefix_that_is_cached_takes_no_time_where_it_is_and_all_of_it_elsewhere() -> None:
    jobs = [unique(7, 0.1 * index, 65) for index in range(3)]
    record = run(jobs, **TINY)
    assert [milliseconds(trace)[0] for trace in record.traces] == [65, 65, 1]
    assert [trace.cached_tokens for trace in record.traces] == [0, 0, 64]


def test_cost_chooses_the_cached_prefix_once_engines_have_reported_step_times() -> None:
    jobs = [unique(index, 0.0, 40) for index in range(2)] + [unique(7, 1 + 0.1 * index, 65) for index in range(3)]
    followed = run(jobs, **(TINY | {"policies": ["cost"]})).traces
    assert [milliseconds(trace)[0] for trace in followed] == [40, 40, 65, 1, 1]
    assert len({trace.engine for trace in followed[2:]}) == 1


@pytest.mark.parametrize(("event_delay", "found"), [(0.5, 6), (10.0, 0)])
def test_cached_blocks_are_visible_only_after_the_delay(event_delay: float, found: int) -> None:
    """Each prompt comes again when its router no longer expects what it sent to be cached, and must be told."""
    names = range(6)
    jobs = [unique(name, 0.1 * name, 65) for name in names] + [unique(name, 5 + 0.1 * name, 65) for name in names]
    traces = run(jobs, **(TINY | {"engines": 4, "policies": ["prefix_only"], "event_delay": event_delay})).traces
    followed = [before.engine == after.engine for before, after in zip(traces[:6], traces[6:], strict=True)]
    assert found <= sum(followed) < found + 6
    assert [trace.cached_tokens for trace in traces[6:]] == [64 * same for same in followed]


@pytest.mark.parametrize(("share_age", "together"), [(0.0, True), (None, False)])
def test_a_new_prefix_follows_another_routers_speculative_blocks_before_any_event(
    share_age: float | None, together: bool
) -> None:
    jobs = [unique(name, 0.1 * name + gap, 65) for name in range(12) for gap in (0.0, 0.001)]
    changes = {"engines": 4, "replicas": 2, "policies": ["prefix_only"], "share_delay": 0, "event_delay": 10.0}
    traces = run(jobs, **(TINY | changes | {"share_age": share_age})).traces
    pairs = [pair for pair in zip(traces[::2], traces[1::2], strict=True) if pair[0].router != pair[1].router]
    assert len(pairs) >= 4
    assert all(first.engine == second.engine for first, second in pairs) is together


def test_no_request_queues_at_the_router_while_an_engine_has_capacity_and_the_rest_alternate() -> None:
    room = {**TINY, "room_seconds": 0.1, "engines": 1, "load_age": 0.0}
    warming = [unique(index, 0.2 * index, 100 + 10 * index) for index in range(9)]  # the router learns its pace
    jobs = [*warming, *(unique(9 + index, 3.0, 120) for index in range(3))]
    first, second, third = run(jobs, **room).traces[9:]
    assert first.placed == first.arrived
    # With 120 tokens to compute there is no room. The second is sent when they are done, and so is the third.
    assert (second.placed, third.placed) == (first.first_token, second.first_token)


def test_an_idle_router_still_publishes_its_last_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request comes too soon after the first for its router to tell of it at once."""
    monkeypatch.setattr(cadence, "BURST", 1)
    seed = next(seed for seed in range(100) if [splitmix(seed, index) % 2 for index in range(3)] == [0, 0, 1])
    jobs = [unique(0, 0.0, 900), unique(1, 0.05, 1000), unique(2, 0.5, 10)]
    shape = {**TINY, "policies": ["least_load"], "replicas": 2, "load_age": 1e3, "seed": seed}
    told = run(jobs, **shape, share_age=0.4).traces
    assert told[0].engine != told[1].engine
    assert told[2].engine == told[0].engine, "it has less to do"
    late = run(jobs, **shape, share_age=0.6).traces
    assert late[2].engine == late[1].engine, "as far as is known, it has nothing to do"


def test_work_is_what_full_steps_take() -> None:
    latency = LatencyModel(1000, 0.0, 1e-6, 1e-6, 1e-3, 0.02, 1.0)
    # 29 tokens of a step of 10 that adds 20 ms; chunks of 10, 10 and 5 tokens with their pairs; 4 tokens that see what
    # is before them; and five draws.
    pairs = 10 * 11 / 2 + (11 + 20) * 10 / 2 + (21 + 25) * 5 / 2
    seen = 26 + 27 + 28 + 29
    expected = 29 * (1e-3 + 2e-3) + 1e-6 * (pairs + seen) + 5e-3
    assert work(unique(0, 0.0, 25, 5), latency, 10) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("utilisation", "keeps_up"), [(0.8, True), (1.3, False)])
def test_at_a_utilisation_above_one_engines_without_a_cache_fall_behind(utilisation: float, keeps_up: bool) -> None:
    record = run(
        utilisation=[utilisation], enable_prefix_caching=False, policies=["least_load"], admission=False, engines=2
    )
    last = record.traces[-1].arrived
    assert (record.end < 1.15 * last) is keeps_up
