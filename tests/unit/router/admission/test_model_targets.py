"""Which target a request for a name gets: shares by weight, the same one again, and nothing moves that need not."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.admission.model_targets import (
    ModelTarget,
    ModelTargets,
    ShadowTarget,
    TargetGroup,
    TargetReason,
    choose_target,
    is_shadowed,
)

KEYS = [f"request-{number}" for number in range(4000)]
MODELS = ["v1", "v2", "v3", "v4"]
weights = st.lists(st.integers(0, 100), min_size=1, max_size=4).filter(any)
keys = st.text(min_size=1, max_size=20)


def group(*weights: int) -> TargetGroup:
    return TargetGroup(tuple(ModelTarget(*each) for each in zip(MODELS, weights, strict=False)))


def chosen(targets: TargetGroup, key: str, has_engine=tuple(MODELS), before: str = "") -> str:
    return choose_target(targets, key, has_engine, before).model


@given(weights)
@settings(max_examples=15, deadline=None)
def test_each_target_gets_its_part_of_all_requests(drawn: list[int]) -> None:
    counts = Counter(chosen(group(*drawn), key) for key in KEYS)
    for model, weight in zip(MODELS, drawn, strict=False):
        part = weight / sum(drawn)
        deviation = 5 * (part * (1 - part) / len(KEYS)) ** 0.5
        assert abs(counts[model] / len(KEYS) - part) <= deviation


@given(weights, keys, st.integers(0, 3), st.integers(0, 200))
def test_a_weight_that_changes_moves_only_requests_to_or_from_its_target(
    drawn: list[int], key: str, place: int, weight: int
) -> None:
    place %= len(drawn)
    changed = [*drawn[:place], weight, *drawn[place + 1 :]]
    if not any(changed):
        return
    before, after = chosen(group(*drawn), key), chosen(group(*changed), key)
    if weight >= drawn[place]:
        assert after in (before, MODELS[place])
    else:
        assert after == before or before == MODELS[place]


@given(weights, keys)
def test_all_weights_together_and_the_order_of_targets_do_not_matter(drawn: list[int], key: str) -> None:
    first = group(*drawn)
    scaled = group(*(7 * weight for weight in drawn))
    reverse = TargetGroup(first.targets[::-1])
    assert chosen(first, key) == chosen(scaled, key) == chosen(reverse, key)


@given(weights, keys, st.sets(st.sampled_from(MODELS)))
def test_nothing_new_goes_to_a_target_without_weight_or_without_engines_where_others_have_some(
    drawn: list[int], key: str, has_engine: set[str]
) -> None:
    able = {model for model, weight in zip(MODELS, drawn, strict=False) if weight}
    choice = choose_target(group(*drawn), key, has_engine)
    assert choice.model in (able & has_engine or able)
    moved = choice.model != chosen(group(*drawn), key)
    assert (choice.reason is TargetReason.FALLBACK) == moved


@given(weights, keys, st.sampled_from(MODELS))
def test_only_requests_of_the_target_without_engines_go_to_others(drawn: list[int], key: str, lost: str) -> None:
    others = set(MODELS) - {lost}
    before = chosen(group(*drawn), key)
    assert before == lost or chosen(group(*drawn), key, others) == before


@pytest.mark.parametrize(
    ("weights", "has_engine", "stays"),
    [
        ((1, 9), {"v1", "v2"}, True),
        ((0, 9), {"v1", "v2"}, True),  # without a weight it gets nothing new, and keeps what it has
        ((1, 9), {"v2"}, False),
        ((1, 9), set(), True),
        ((0, 9), set(), False),
        ((0, 9), {"v2"}, False),
    ],
)
def test_a_conversation_stays_with_its_target_while_that_can_answer(weights, has_engine, stays) -> None:
    found = {choose_target(group(*weights), key, has_engine, "v1").model for key in KEYS[:100]}
    assert (found == {"v1"}) is stays
    assert stays or found == {"v2"} or "v1" in has_engine


def test_a_target_that_is_gone_from_the_name_is_not_gone_on_from() -> None:
    assert choose_target(group(1), "a", MODELS, "gone").reason is TargetReason.WEIGHT


@given(st.floats(0, 100), st.floats(0, 100), keys)
def test_a_share_that_grows_takes_no_request_out_of_the_shadow(one: float, other: float, key: str) -> None:
    small, large = sorted((one, other))
    assert is_shadowed(ShadowTarget("v3", large), key) >= is_shadowed(ShadowTarget("v3", small), key)


def test_the_shadow_gets_its_percentage_of_each_target() -> None:
    shadow, targets = ShadowTarget("v3", 10), group(3, 1)
    of = {model: [key for key in KEYS if chosen(targets, key) == model] for model in ("v1", "v2")}
    for keys_of_target in of.values():
        part = sum(is_shadowed(shadow, key) for key in keys_of_target) / len(keys_of_target)
        assert 0.07 < part < 0.13
    assert not any(is_shadowed(ShadowTarget("v3", 0), key) for key in KEYS)
    assert all(is_shadowed(ShadowTarget("v3", 100), key) for key in KEYS)


def test_sessions_are_remembered_up_to_a_bound() -> None:
    targets = ModelTargets({"chat": group(1, 1)}, max_remembered=2)
    for session in ("a", "b", "a", "c"):
        targets.remember("chat", session, "v2")
    assert [targets.remembered("chat", session) for session in "abc"] == ["v2", "", "v2"]
    assert targets.remembered("other", "a") == ""
