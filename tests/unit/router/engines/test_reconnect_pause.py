"""An engine that starts is found soon after it listens, and many that start keep to the rate of all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.supervise import Backoff
from quire_router.engines import rates
from quire_router.engines.rates import MAX_RECONNECTS_PER_SECOND, STARTING_PART, ReconnectLimiter
from quire_router.engines.settings import ConnectionSettings

SETTINGS = ConnectionSettings()


def tries(start: float, others: int = 0, *, refused: bool = True) -> list[float]:
    """When an engine is tried whose process listens after ``start`` seconds, up to the try that finds it."""
    limiter, backoff, made = ReconnectLimiter(), Backoff(SETTINGS.backoff, SETTINGS.max_backoff), [0.0]
    limiter._disconnected = others + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "_now", lambda: made[-1])
        while made[-1] < start:
            made.append(made[-1] + limiter.pause(backoff, 0.0 if refused else None))
    return made


@given(st.floats(0.01, 600))
def test_a_start_is_noticed_within_a_sixteenth_of_its_time(start: float) -> None:
    assert tries(start)[-1] - start <= max(SETTINGS.backoff, STARTING_PART * start)


@given(st.floats(10, 60), st.integers(20, 500))
def test_many_that_start_at_once_keep_to_the_rate_of_all(start: float, others: int) -> None:
    spacing = (others + 1) / MAX_RECONNECTS_PER_SECOND
    late = [each for each in tries(start, others) if each > start / 2]
    pauses = [after - before for before, after in itertools.pairwise(late)]
    assert all(pause >= min(spacing, SETTINGS.max_backoff) / 2 for pause in pauses)


def test_an_engine_that_does_not_answer_is_tried_less_often_as_before() -> None:
    late = [each for each in tries(60, refused=False) if each > 5]
    assert min(after - before for before, after in itertools.pairwise(late)) >= SETTINGS.max_backoff / 2
