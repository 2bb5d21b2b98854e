"""The policies: what must hold of every one, and what each is for."""

from collections import Counter
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quire_router.placement.engine_table import EngineTable, StepTimes
from quire_router.placement.policies import (
    TIE_TOLERANCE,
    CandidateView,
    CostPolicy,
    PlacementQuery,
    PlacementSettings,
    PolicyName,
    argmin_breaking_ties,
    choose_by_water_filling,
    make_policy,
    make_scorers,
)

from tests.support.placement import IDLE, Engine, fleet, fleets

NAMES = get_args(PolicyName)
WORSE = {
    "requests": 1, "pending_tokens": 5000, "decoding": 1, "swapped": 1, "blocks_free": -1,
    "step_seconds": 0.001, "token_seconds": 0.001, "sequence_seconds": 0.001, "host_block_seconds": 0.001,
}  # fmt: skip
LOAD = ("requests", "pending_tokens", "decoding", "swapped", "blocks_free")


def cost() -> CostPolicy:
    return CostPolicy(make_scorers(PlacementSettings()))


def worse(engine: Engine, *names: str) -> Engine:
    """The engine with more load, or slower, in what is named."""
    return {**engine, **{name: max(0, engine[name] + WORSE[name]) for name in names}}


def choose(name: PolicyName, *engines: Engine, **request: object) -> int:
    table, query = fleet([{**IDLE, **engine} for engine in engines])
    return make_policy(PlacementSettings(policy=name)).choose(replace(query, **request), table)  # type: ignore[arg-type]


# All


@pytest.mark.parametrize("name", NAMES)
@given(engines=fleets, data=st.data())
@settings(deadline=None, max_examples=25)
def test_a_policy_chooses_one_of_the_rows_that_it_is_given(
    name: PolicyName, engines: list[Engine], data: st.DataObject
) -> None:
    table, query = fleet(engines)
    rows = data.draw(st.lists(st.sampled_from(query.rows.tolist()), min_size=1, unique=True))
    query = replace(query, rows=np.array(rows, np.intp), tie_break=data.draw(st.integers(0, 2**32 - 1)))
    policy = make_policy(PlacementSettings(policy=name))
    assert all(policy.choose(query, table) in rows for _ in range(3))


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_fleet_is_used_evenly(name: PolicyName) -> None:
    table, query = fleet([IDLE] * 4)
    policy = make_policy(PlacementSettings(policy=name))
    counts = Counter(policy.choose(replace(query, tie_break=7 * ticket), table) for ticket in range(400))
    assert len(counts) == 4
    assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_makes_the_same_choices_again(name: PolicyName) -> None:
    table, query = fleet([{**IDLE, "requests": n % 3, "pending_tokens": 100 * n} for n in range(5)])
    first, second = (make_policy(PlacementSettings(policy=name, seed=3)) for _ in range(2))
    queries = [replace(query, tie_break=ticket) for ticket in range(30)]
    assert [first.choose(q, table) for q in queries] == [second.choose(q, table) for q in queries]


# Cost


@given(fleets, st.sets(st.sampled_from(sorted(WORSE)), min_size=1), st.integers(0, 5), st.floats(0, 50))
@settings(deadline=None, max_examples=40)
def test_cost_never_chooses_an_engine_that_another_is_better_than_in_every_respect(
    engines: list[Engine], names: set[str], place: int, queue: float
) -> None:
    best = engines[place % len(engines)]
    dominated = worse(best, *names)
    table, query = fleet([*engines, dominated])
    query = replace(query, mean_queued=queue)
    # Engines of the usual kind count with their mean step times, so one that is a little slower may count as faster.
    assume(counts_as_no_faster(CandidateView(query, table), -1, place % len(engines)))
    total = cost().total(query, table)
    assert total[-1] >= total[place % len(engines)] - TIE_TOLERANCE
    assume(total[-1] > total[place % len(engines)] + TIE_TOLERANCE)
    assert cost().choose(query, table) != query.rows[-1]


def counts_as_no_faster(view: CandidateView, one: int, other: int) -> bool:
    """Whether each of the step times that the engine in row ``one`` counts with is at least that of ``other``."""
    columns = (np.broadcast_to(getattr(view.step_times, field.name), view.zeros.shape) for field in fields(StepTimes))
    return all(times[one] >= times[other] for times in columns)


@given(fleets, st.sampled_from(LOAD), st.integers(0, 5), st.floats(0, 50))
@settings(deadline=None, max_examples=40)
def test_load_never_attracts(engines: list[Engine], name: str, place: int, queue: float) -> None:
    place %= len(engines)
    before = cost_of(engines, queue)
    loaded = [worse(engine, name) if number == place else engine for number, engine in enumerate(engines)]
    change = cost_of(loaded, queue) - before
    assert change[place] >= -TIE_TOLERANCE
    assert (np.delete(change, place) <= TIE_TOLERANCE).all()


def cost_of(engines: list[Engine], queue: float) -> np.ndarray:
    table, query = fleet(engines)
    return cost().total(replace(query, mean_queued=queue), table)


@given(fleets, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_neither_the_order_of_rows_nor_names_matter_to_cost(engines: list[Engine], random: object) -> None:
    order = list(range(len(engines)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight, mixed = cost_of(engines, 1.0), cost_of([engines[number] for number in order], 1.0)
    assert np.allclose(straight[order], mixed, rtol=1e-9, atol=TIE_TOLERANCE)


def test_cost_follows_the_cache_while_that_is_faster_and_no_further() -> None:
    assert choose("cost", {"device": 992, "pending_tokens": 500}, {}) == 0
    assert choose("cost", {"device": 992, "pending_tokens": 9000}, {}) == 1


def test_a_busier_fleet_follows_the_cache_further() -> None:
    engines = {"device": 992, "pending_tokens": 9000}, {"pending_tokens": 500}
    assert [choose("cost", *engines, mean_queued=queue) for queue in (0.0, 20.0)] == [1, 0]


def test_cost_keeps_a_session_at_its_engine_unless_that_is_expensive() -> None:
    assert choose("cost", {}, {"pending_tokens": 1000}, {}, session_row=1) == 1
    assert choose("cost", {}, {"pending_tokens": 50_000}, session_row=1) == 0


# The others


def test_round_robin_takes_one_after_the_other() -> None:
    table, query = fleet([IDLE] * 3)
    policy = make_policy(PlacementSettings(policy="round_robin"))
    assert [policy.choose(query, table) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_load_looks_at_pending_tokens_and_then_at_requests() -> None:
    assert choose("least_load", {"pending_tokens": 2}, {"pending_tokens": 1, "requests": 9}) == 1
    assert choose("least_load", {"requests": 2}, {"requests": 1}, {"pending_tokens": 1}) == 1


def test_prefix_only_looks_at_nothing_but_the_cache() -> None:
    assert choose("prefix_only", {}, {"device": 160, "host": 32, "pending_tokens": 10**6}, {"device": 176}) == 1


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    table, query = fleet([{**IDLE, "requests": n} for n in range(4)])
    policy = make_policy(PlacementSettings(policy="power_of_two"))
    assert {policy.choose(query, table) for _ in range(200)} == {0, 1, 2}


def test_power_of_two_does_with_one() -> None:
    assert choose("power_of_two", {"requests": 5}) == 0


def test_llm_d_weighs_queue_memory_and_prefix_two_two_three() -> None:
    whole_prefix = {"requests": 10, "device": 1000}
    assert choose("llm_d", {**whole_prefix, "blocks_free": 900}, {}) == 0  # 0 + 1.8 + 3 against 2 + 2 + 0
    assert choose("llm_d", {**whole_prefix, "blocks_free": 400}, {}) == 1  # 0 + 0.8 + 3
    assert choose("llm_d", {**whole_prefix, "device": 600}, {}) == 1  # 0 + 2 + 1.8


def test_sglang_follows_more_than_half_a_match() -> None:
    assert choose("sglang", {"requests": 20, "device": 501}, {}) == 0
    assert choose("sglang", {"requests": 20, "device": 500}, {}) == 1


def test_sglang_goes_to_the_least_loaded_when_the_fleet_is_imbalanced() -> None:
    assert choose("sglang", {"requests": 33, "device": 900}, {}) == 1
    assert choose("sglang", {"requests": 432, "device": 900}, {"requests": 399}) == 0


# Ties


def test_among_equals_the_ticket_decides() -> None:
    costs = np.array([2.0, 1.0, 1.0 + TIE_TOLERANCE / 2, 1.1])
    assert [argmin_breaking_ties(costs, ticket) for ticket in range(4)] == [1, 2, 1, 2]


def test_a_request_that_is_placed_again_meets_the_same_choice() -> None:
    table: EngineTable
    query: PlacementQuery
    table, query = fleet([IDLE] * 5)
    query = replace(query, tie_break=123_456)
    assert len({cost().choose(query, table) for _ in range(5)}) == 1


# Several routers


COSTS = st.lists(st.floats(0, 10), min_size=1, max_size=8).map(np.array)


def drawn(costs: np.ndarray, width: float, tickets: int = 2000) -> np.ndarray:
    """How often each is chosen, over evenly spread parts."""
    places = [choose_by_water_filling(costs, width, (ticket + 0.5) / tickets) for ticket in range(tickets)]
    return np.bincount(places, minlength=len(costs)) / tickets


@given(COSTS, st.floats(0.01, 20))
@settings(deadline=None, max_examples=30)
def test_each_chosen_engine_is_the_cheapest_with_the_load_it_gets(costs: np.ndarray, width: float) -> None:
    often = drawn(costs, width)
    met = costs + width * often
    assert met[often > 0].max() - met.min() <= 0.02 * width + TIE_TOLERANCE


def test_work_that_others_have_not_published_spreads_choices_among_engines_that_are_nearly_as_good() -> None:
    table, query = fleet([{**IDLE, "pending_tokens": pending} for pending in (0, 100, 200, 90_000)])
    alone = {cost().choose(replace(query, tie_break=ticket << 24), table) for ticket in range(256)}
    table.unseen_tokens = 200.0
    many = Counter(cost().choose(replace(query, tie_break=ticket << 24), table) for ticket in range(256))
    assert alone == {0}
    assert many[0] > many[1] > many[2] > 0 == many[3]
