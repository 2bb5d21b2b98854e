"""Which engines go to sleep and which wake up, for whatever fleet there is."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_router.engines.sleep_plan import (
    TURN_SECONDS,
    Demand,
    SleepCandidate,
    SleepPlan,
    SleepSettings,
    plan,
)

STARVED = Demand(is_starved=True, load=1)
BY_NEED = SleepSettings()


def awake(id: str, idle: float = 0.0, *, model: str = "m", since: float = 0.0, device: str = "") -> SleepCandidate:
    return SleepCandidate(id, model, is_sleeping=False, idle_seconds=idle, awake_seconds=since, shared_device=device)


def asleep(id: str, *, model: str = "m", device: str = "") -> SleepCandidate:
    return SleepCandidate(id, model, is_sleeping=True, shared_device=device)


def test_who_sleeps_is_left_alone_while_others_have_room() -> None:
    assert plan([awake("a"), asleep("b")], {"m": Demand(load=5)}, BY_NEED) == SleepPlan()


def test_requests_without_room_wake_the_first_sleeper_of_their_model() -> None:
    fleet = [awake("a"), asleep("z"), asleep("c"), asleep("b", model="other")]
    assert plan(fleet, {"m": STARVED}, BY_NEED) == SleepPlan(wake_up=("c",))


def test_while_one_wakes_up_no_other_is_woken() -> None:
    fleet = [replace(asleep("a"), is_changing=True), asleep("b")]
    assert plan(fleet, {"m": STARVED}, BY_NEED) == SleepPlan()


def test_one_that_could_not_wake_up_leaves_it_to_another() -> None:
    fleet = [replace(asleep("a"), has_refused=True), asleep("b")]
    assert plan(fleet, {"m": STARVED}, BY_NEED) == SleepPlan(wake_up=("b",))


@pytest.mark.parametrize(("load", "woken"), [(16, ()), (17, ("b",)), (1000, ("b",))])
def test_the_number_that_autoscalers_compute_is_met_with_sleepers_first(load: int, woken: tuple[str, ...]) -> None:
    fleet = [awake("a"), asleep("b"), asleep("c")]
    settings = SleepSettings(target_load=16)
    assert plan(fleet, {"m": Demand(load=load)}, settings).wake_up == woken


@pytest.mark.parametrize(("idle", "sleeps"), [(59.0, ()), (60.0, ("c", "b"))])
def test_the_last_ones_sleep_when_they_were_idle_for_long(idle: float, sleeps: tuple[str, ...]) -> None:
    fleet = [awake(id, idle) for id in "abc"]
    assert plan(fleet, {}, SleepSettings(sleep_after=60.0, min_awake=1)) == SleepPlan(sleep=sleeps)


@pytest.mark.parametrize(("load", "sleeps"), [(0, ("c", "b", "a")), (10, ("c", "b")), (30, ())])
def test_as_many_stay_awake_as_the_load_asks_for(load: int, sleeps: tuple[str, ...]) -> None:
    settings = SleepSettings(sleep_after=60.0, min_awake=0, target_load=10)
    assert plan([awake(id, 100.0) for id in "abc"], {"m": Demand(load=load)}, settings).sleep == sleeps


def test_without_the_setting_nobody_sleeps_for_being_idle() -> None:
    assert plan([awake("a", 1e9), awake("b", 1e9)], {}, BY_NEED) == SleepPlan()


@pytest.mark.parametrize(
    ("holder", "gives_way"),
    [
        (awake("a", idle=5.0, model="other", device="gpu"), True),
        (awake("a", idle=0.1, model="other", device="gpu"), False),  # what it woke up for may be on its way
        (awake("a", since=TURN_SECONDS - 1, model="other", device="gpu"), False),
        (awake("a", since=TURN_SECONDS, model="other", device="gpu"), True),  # it has requests, and had its turn
        (replace(awake("a", idle=5.0, model="other", device="gpu"), is_changing=True), False),
        (replace(awake("a", since=99.0, model="other", device="gpu"), has_refused=True), False),
        (replace(asleep("a", model="other", device="gpu"), is_changing=True), False),  # it takes the memory just now
    ],
)
def test_who_has_the_memory_of_a_device_gives_way_before_another_wakes(holder: SleepCandidate, gives_way: bool) -> None:
    fleet = [holder, asleep("b", device="gpu")]
    assert plan(fleet, {"m": STARVED}, BY_NEED) == SleepPlan(drain=("a",) if gives_way else ())


def test_a_device_of_its_own_is_preferred_to_taking_another_ones_turn() -> None:
    fleet = [awake("a", idle=9.0, model="other", device="gpu"), asleep("b", device="gpu"), asleep("c")]
    assert plan(fleet, {"m": STARVED}, BY_NEED) == SleepPlan(wake_up=("c",))


def test_of_two_models_that_want_one_device_one_gets_it() -> None:
    fleet = [asleep("a", model="x", device="gpu"), asleep("b", model="y", device="gpu")]
    assert plan(fleet, {"x": STARVED, "y": STARVED}, BY_NEED) == SleepPlan(wake_up=("a",))


candidates = st.builds(
    SleepCandidate,
    id=st.uuids().map(str),
    model=st.sampled_from("xy"),
    is_sleeping=st.booleans(),
    idle_seconds=st.sampled_from([0.0, 0.5, 2.0, 100.0]),
    awake_seconds=st.sampled_from([0.0, TURN_SECONDS]),
    shared_device=st.sampled_from(["", "gpu-0", "gpu-1"]),
    is_changing=st.booleans(),
    has_refused=st.booleans(),
)
fleets = st.lists(candidates, max_size=8, unique_by=lambda each: each.id)
demands_of_models = st.dictionaries(st.sampled_from("xy"), st.builds(Demand, st.booleans(), st.integers(0, 50)))
some_settings = st.builds(
    SleepSettings, st.sampled_from([None, 1.0, 60.0]), st.integers(0, 3), st.sampled_from([None, 1, 10])
)


@given(fleets, demands_of_models, some_settings)
def test_a_plan_asks_only_for_what_can_be(
    fleet: list[SleepCandidate], demands: Mapping[str, Demand], settings: SleepSettings
) -> None:
    made, by_id = plan(fleet, demands, settings), {each.id: each for each in fleet}
    asked = [*made.sleep, *made.drain, *made.wake_up]
    assert len(set(asked)) == len(asked)
    assert all(by_id[id].may_be_asked for id in asked)
    assert all(by_id[id].is_sleeping for id in made.wake_up)
    assert not any(by_id[id].is_sleeping for id in (*made.sleep, *made.drain))
    assert all(by_id[id].idle_seconds > 0 for id in made.sleep)  # nobody who has requests


@given(fleets, demands_of_models, some_settings)
def test_a_device_never_has_two_that_are_awake(
    fleet: list[SleepCandidate], demands: Mapping[str, Demand], settings: SleepSettings
) -> None:
    made = plan(fleet, demands, settings)
    woken = [each.shared_device for each in fleet if each.id in made.wake_up and each.shared_device]
    assert max(Counter(woken).values(), default=0) <= 1
    assert not {each.shared_device for each in fleet if each.holds_memory} & set(woken)


@given(fleets, demands_of_models, some_settings)
def test_idleness_leaves_so_many_awake(
    fleet: list[SleepCandidate], demands: Mapping[str, Demand], settings: SleepSettings
) -> None:
    made = plan(fleet, demands, settings)
    for model in "xy":
        if any(each.id in made.sleep and each.model == model for each in fleet):
            left = [e for e in fleet if e.model == model and not (e.is_sleeping or e.id in (*made.sleep, *made.drain))]
            assert len(left) >= max(settings.min_awake, settings.wanted(demands.get(model, Demand()).load))


@given(fleets, st.sampled_from("xy"), st.randoms())
def test_routers_that_know_the_fleet_in_another_order_decide_alike(
    fleet: list[SleepCandidate], model: str, random: st.DrawFn
) -> None:
    shuffled = random.sample(fleet, len(fleet))
    settings, demands = SleepSettings(1.0, 1, 10), {model: STARVED}
    assert plan(shuffled, demands, settings) == plan(fleet, demands, settings)


@given(fleets, st.sampled_from("xy"))
def test_requests_without_room_wake_somebody_wherever_somebody_can(fleet: list[SleepCandidate], model: str) -> None:
    held = {each.shared_device for each in fleet if each.holds_memory and each.shared_device}
    sleepers = [each for each in fleet if each.model == model and each.is_sleeping]
    free = [each for each in sleepers if each.may_be_asked and each.shared_device not in held]
    woken = plan(fleet, {model: STARVED}, BY_NEED).wake_up
    assert len(woken) == (1 if free and not any(each.is_changing for each in sleepers) else 0)
