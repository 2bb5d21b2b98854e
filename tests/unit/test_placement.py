"""The choice of an engine: where the least work is in flight."""

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import SamplingParams
from quire_router.generation import Generation
from quire_router.placement.choose import choose
from quire_router.placement.view import EngineView

REQUEST = Generation("request", "m", [1, 2, 3], SamplingParams())

views = st.lists(
    st.builds(
        EngineView,
        engine_id=st.uuids().map(str),
        in_flight=st.integers(0, 5),
        in_flight_tokens=st.integers(0, 5),
        running=st.integers(0, 9),
        waiting=st.integers(0, 9),
    ),
    unique_by=lambda view: view.engine_id,
    max_size=8,
)


@given(views)
@settings(deadline=None)
def test_no_engine_has_less_in_flight_than_the_chosen_one(engines: list[EngineView]) -> None:
    chosen = choose(REQUEST, engines)
    if chosen is None:
        assert not engines
        return
    work = (chosen.in_flight_tokens, chosen.in_flight)
    assert all(work <= (engine.in_flight_tokens, engine.in_flight) for engine in engines)


@given(views, st.data())
@settings(deadline=None)
def test_engines_with_more_in_flight_do_not_change_the_choice(engines: list[EngineView], data: st.DataObject) -> None:
    chosen = choose(REQUEST, engines)
    if chosen is not None:
        place = data.draw(st.integers(0, len(engines)))
        busier = EngineView("busier", chosen.in_flight, chosen.in_flight_tokens + 1)
        assert choose(REQUEST, [*engines[:place], busier, *engines[place:]]) == chosen


def test_among_equals_the_first_is_chosen() -> None:
    equals = [EngineView(name, 1, 10) for name in "abc"]
    chosen = choose(REQUEST, equals)
    assert chosen is not None
    assert chosen.engine_id == "a"


def test_one_long_request_weighs_more_than_two_short_ones() -> None:
    chosen = choose(REQUEST, [EngineView("one long", 1, 4000), EngineView("two short", 2, 200)])
    assert chosen is not None
    assert chosen.engine_id == "two short"
