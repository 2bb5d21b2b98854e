"""The simulated autoscaler scales as Kubernetes says that one does."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from tests.support.hpa import Hpa


@given(st.integers(0, 20), st.integers(0, 500), st.integers(1, 50))
def test_it_is_the_ceiling_of_load_over_target_outside_of_the_tolerance(replicas: int, load: int, target: int) -> None:
    hpa = Hpa(target, 0, 1000, down_window=0)
    ratio = load / (target * replicas) if replicas else float("inf")
    wanted = hpa.desired(replicas, load, 0.0)
    assert wanted == (replicas if 0.9 <= ratio <= 1.1 else ceil(load / target))


def test_it_goes_up_at_once_and_down_after_a_window_of_calm() -> None:
    hpa = Hpa(10, 0, 5, down_window=300)
    assert hpa.desired(0, 20, 0.0) == 2
    assert hpa.desired(2, 45, 15.0) == 5
    assert [hpa.desired(5, 0, at) for at in (30.0, 290.0, 315.0)] == [5, 5, 5]
    assert hpa.desired(5, 0, 316.0) == 0


def test_without_a_number_nothing_happens_and_bounds_always_hold() -> None:
    hpa = Hpa(10, 1, 3, down_window=0)
    assert hpa.desired(2, None, 0.0) == 2
    assert hpa.desired(2, 1000, 1.0) == 3
    assert hpa.desired(3, 0, 2.0) == 1


def test_it_takes_so_many_at_once() -> None:
    hpa = Hpa(10, 0, 5, down_window=0, step_down=1)
    assert hpa.desired(5, 0, 0.0) == 4
