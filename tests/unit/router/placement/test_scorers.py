"""Each term of the cost: what it is worth in seconds, and in which direction it pushes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.placement.engine_table import STEP_TIMES_TTL, EngineTable
from quire_router.placement.policies import (
    CandidateView,
    PlacementSettings,
    affinity_bound,
    make_scorers,
    memory,
    neighbours,
    others,
    prefill,
    session,
    waiting,
)

from tests.support.placement import PACE, Engine, candidates, fleet, fleets, rises, seconds

# A prompt token takes 1e-4 seconds, and its part of a step of 2,000 tokens that takes 0.01 besides.
TOKEN = 1e-4 + 0.01 / 2000
STEP = {"step_tokens": 2000}


def test_waiting_is_the_time_that_the_pending_tokens_take() -> None:
    found = waiting(candidates(STEP, {**STEP, "pending_tokens": 2000}, {**STEP, "pending_tokens": 4000}))
    assert seconds(found) == [0, round(2000 * TOKEN, 6), round(4000 * TOKEN, 6)]


def test_waiting_goes_by_each_engines_own_pace() -> None:
    slow = {"pending_tokens": 1000, "token_seconds": 2e-3}
    fast = {"pending_tokens": 3000, "token_seconds": 1e-4}
    one, other = waiting(candidates(slow, fast))
    assert one > other


def test_an_engine_without_measured_step_times_is_taken_to_be_as_fast_as_the_usual() -> None:
    measured = [{"token_seconds": seconds, "pending_tokens": 1000} for seconds in (1e-4, 1.1e-4, 9e-4)]
    usual, _, slow, unmeasured = waiting(candidates(*measured, {"pending_tokens": 1000, "measured": 0}))
    assert unmeasured == usual < slow


def test_slow_step_times_of_an_idle_engine_expire_and_those_of_a_busy_one_count() -> None:
    others, slow = [{"stepped": 95.0}] * 3, {"token_seconds": 9e-4}
    loads = [{**engine, "pending_tokens": 1000} for engine in (*others, {**slow, "stepped": 95.0})]
    found = waiting(candidates(*loads, now=100.0))
    assert found[3] > found[0]
    loads[3]["stepped"] = 100.0 - STEP_TIMES_TTL
    found = waiting(candidates(*loads, now=100.0))
    assert found[3] == found[0]


def test_engines_that_were_all_idle_are_alike() -> None:
    found = waiting(
        candidates(*({"token_seconds": each, "pending_tokens": 10} for each in (1e-4, 1e-4, 9e-4)), now=1e6)
    )
    assert len(set(seconds(found))) == 1


def test_step_times_that_differ_by_less_than_noise_are_equal() -> None:
    near = [{"pending_tokens": 1000, "token_seconds": seconds} for seconds in (1e-4, 0.9e-4, 1.1e-4)]
    assert len(set(seconds(waiting(candidates(*near))))) == 1


def test_the_cost_of_a_sequence_is_equal_on_engines_of_one_kind_and_differs_between_kinds() -> None:
    usual = [{"decoding": 10, "sequence_seconds": each} for each in (1e-4, 5e-4, 0.0)]
    *alike, other = neighbours(candidates(*usual, {**usual[1], "step_seconds": 0.1}))
    assert seconds(alike) == [seconds(alike)[0]] * 3
    assert other > 2 * alike[0]


def test_one_engine_that_is_far_off_changes_nothing_for_the_others() -> None:
    usual = [{"pending_tokens": 1000, "token_seconds": each} for each in (1e-4, 1.1e-4, 1e-4)]
    wrong = {"pending_tokens": 1000, "token_seconds": 1e9}
    assert seconds(waiting(candidates(*usual))) == seconds(waiting(candidates(*usual, wrong)))[:3]


def test_tokens_that_the_running_step_has_computed_are_not_waited_for() -> None:
    step = {**STEP, "pending_tokens": 3000, "computing": 2000}
    begun = [{**step, "stepped": moment} for moment in (9.95, 9.9, 5.0, 11.0)]
    found = waiting(candidates(*begun, now=10.0))
    whole = 3000 * TOKEN
    assert seconds(found) == [round(whole - done, 6) for done in (0.05, 0.1, 2000 * TOKEN, 0.0)]


def test_engines_without_measured_step_times_are_alike() -> None:
    unmeasured = {"pending_tokens": 1000, "measured": 0}
    assert len(set(seconds(waiting(candidates(unmeasured, unmeasured))))) == 1


def test_prefill_is_the_uncached_tokens_and_one_step() -> None:
    found = prefill(candidates(STEP, {**STEP, "device": 600}, {**STEP, "device": 999}))
    assert seconds(found) == [round(n * TOKEN + 0.01, 6) for n in (1000, 400, 1)]


def test_a_block_of_the_host_tier_costs_a_copy_and_less_than_computing_it() -> None:
    both = [{"device": 320, "host": 320}, {"device": 640}, {"device": 320}]
    some_host, all_device, no_host = prefill(candidates(*both))
    assert some_host - all_device == pytest.approx(20 * 2e-4)
    assert some_host < no_host


def test_neighbours_slow_each_step_until_the_first_token() -> None:
    found = neighbours(
        candidates(STEP, {**STEP, "decoding": 10}, {**STEP, "decoding": 10, "pending_tokens": 4000}, output_tokens=0)
    )
    assert seconds(found) == [0, round(1.5 * 10 * 1e-4, 6), round(3.5 * 10 * 1e-4, 6)]


def test_a_step_that_takes_fewer_tokens_of_prompts_makes_more_steps_of_them() -> None:
    """Each takes its own time, and lasts longer by what decodes in it."""
    whole = {**STEP, "decoding": 10, "pending_tokens": 4000}
    places = candidates(whole, {**whole, "prompt_tokens_per_step": 200}, output_tokens=0)
    assert seconds(waiting(places)) == [round(4000 * 1e-4 + steps * 0.01, 6) for steps in (2, 20)]
    assert seconds(prefill(places)) == [round(1000 * 1e-4 + (steps + 1) * 0.01, 6) for steps in (0.5, 5)]
    assert seconds(neighbours(places)) == [round((steps + 1) * 10 * 1e-4, 6) for steps in (2.5, 25)]


@given(fleets, st.lists(st.integers(0, 2048), min_size=2, max_size=2), st.floats(0, 100))
@settings(deadline=None, max_examples=30)
def test_the_fewer_prompt_tokens_a_step_takes_the_later_is_the_first_token(
    engines: list[Engine], chunks: list[int], now: float
) -> None:
    def until_first_token(chunk: int) -> np.ndarray:
        table, query = fleet([{**engine, "prompt_tokens_per_step": chunk} for engine in engines])
        table.computing[:] = np.minimum(table.pending_tokens, table.prompt_tokens_per_step)
        view = CandidateView(replace(query, now=now), table)
        return sum(view.score(scorer) for scorer in (waiting, prefill, neighbours))

    few, many = map(until_first_token, sorted(chunks))
    assert (few >= many * (1 - 1e-12)).all()


def test_neighbours_and_each_sequence_of_the_request_slow_each_other_a_little() -> None:
    place = {**STEP, "decoding": 10, "device": 999}
    none, some, twice = (
        neighbours(candidates(place, output_tokens=output, sequences=sequences))[0]
        for output, sequences in ((0, 1), (50, 1), (50, 2))
    )
    assert some - none == pytest.approx(0.02 * 2 * 50 * 10 * 1e-4)
    assert twice - none == pytest.approx(2 * (some - none))


def test_what_a_client_allows_beyond_a_typical_output_changes_nothing() -> None:
    one, other = (neighbours(candidates({"decoding": 10}, output_tokens=output))[0] for output in (256, 100_000))
    assert one == other


def test_memory_costs_nothing_where_enough_blocks_are_free() -> None:
    assert seconds(memory(candidates({}, {"blocks_free": 63, "decoding": 20}))) == [0, 0]


def test_memory_costs_more_the_more_blocks_have_to_become_free() -> None:
    assert rises(memory(candidates({}, {"blocks_free": 50}, {"blocks_free": 20}, {"blocks_free": 0})))


def test_blocks_that_are_cached_there_are_not_needed_again() -> None:
    assert seconds(memory(candidates({"blocks_free": 13, "device": 800}))) == [0]


def test_memory_costs_more_the_more_sequences_have_to_end() -> None:
    full = [{"requests": n, "decoding": 60} for n in (63, 64, 70, 90)]
    assert rises(memory(candidates(*full)))


def test_swapped_out_sequences_come_back_first() -> None:
    assert rises(memory(candidates({"requests": 63}, {"requests": 63, "swapped": 1}, {"requests": 63, "swapped": 9})))


def test_an_engine_of_unknown_size_is_assumed_to_be_large_enough() -> None:
    unknown = {"blocks_total": 0, "blocks_free": 0, "max_sequences": 0, "requests": 10}
    found = memory(candidates(unknown, {"blocks_free": 0}))
    assert found[0] == 0 < found[1]


def test_others_pay_for_what_is_computed_the_more_of_them_wait() -> None:
    places = [{"device": 900}, {}]
    idle, busy, busier = (others(candidates(*places, mean_queued=queue)) for queue in (0.0, 1.0, 2.0))
    assert rises(idle)
    assert busy == pytest.approx(prefill(candidates(*places)) * 2.1)
    assert busier - busy == pytest.approx(busy - idle)


def test_an_engines_own_queue_does_not_make_its_computing_dearer() -> None:
    one, other = others(candidates({"requests": 50}, {}))
    assert one == other


def test_the_cache_counts_in_full_up_to_the_bound() -> None:
    near = {"pending_tokens": 90_000, "device": 992, **STEP}
    assert seconds(affinity_bound(10)(candidates(near, {}))) == [0, 0]


def test_beyond_the_bound_no_hit_makes_up_for_the_wait() -> None:
    far = {"pending_tokens": 110_000, "device": 992, **STEP}
    scorers = make_scorers(PlacementSettings(max_affinity_wait=10))
    for queue in (0.0, 10.0, 1e6):
        there, here = sum(scorer(candidates(far, STEP, mean_queued=queue)) for scorer in scorers.values())
        assert here < there


def test_session_affinity_is_worth_a_number_of_seconds() -> None:
    assert seconds(session(0.5)(candidates({}, {}, {}, session_row=1))) == [0.5, 0, 0.5]


def test_a_session_whose_engine_is_unavailable_makes_no_difference() -> None:
    assert seconds(session(0.5)(candidates({}, {}, session_row=7))) == [0, 0]


@given(fleets, st.floats(0, 1000))
@settings(deadline=None, max_examples=30)
def test_every_term_is_finite_and_not_negative_whatever_engines_report(engines: list[Engine], queue: float) -> None:
    table, query = fleet(engines)
    for name, scorer in make_scorers(PlacementSettings()).items():
        column = scorer(CandidateView(query, table))
        assert column.shape == (len(engines),), name
        assert np.isfinite(column).all(), name
        assert (column >= 0).all(), name


def test_a_reused_row_keeps_no_step_times_of_the_engine_before() -> None:
    table = EngineTable()
    table.set_step_times(table.add("one"), PACE)
    table.remove("one")
    row = table.add("other")
    assert table.measured[row] == 0
    table.set_step_times(row, PACE)
    assert table.measured[row] == 1
    assert table.step_seconds[row] == PACE.step_seconds


def test_only_a_change_of_an_engines_description_makes_a_new_version() -> None:
    table = EngineTable()
    row = table.add("one")
    table.set_step_times(row, PACE)
    known = table.version
    table.set_step_times(row, replace(PACE))
    table.requests[row], table.stepped[row] = 5, 1.0
    assert table.version == known
    table.set_step_times(row, replace(PACE, token_seconds=1.0))
    assert table.version > known
    with pytest.raises(ValueError, match="read-only"):
        table.token_seconds[row] = 2.0


def test_a_term_is_computed_once_however_many_need_it() -> None:
    place = candidates({"pending_tokens": 100}, {})
    assert place.score(waiting) is place.score(waiting)
    assert place.score(memory) is place.zeros
