"""What clients are told to wait: long enough, and not all of them the same time."""

import math

from hypothesis import given
from hypothesis import strategies as st
from quire_router.core.retry import retry_after, spread

MANY = 200
"""Clients that were refused at one moment. That all get one wait of two has a probability of 2^-199."""


@given(st.integers(1, 10**6))
def test_waits_lie_between_one_and_a_half_times_and_differ(least: int) -> None:
    waits = [spread(least) for _ in range(MANY)]
    assert least <= min(waits) < max(waits) <= least + max(1, least // 2)


@given(st.floats(0.01, 10**5))
def test_a_retry_after_is_whole_long_enough_and_spread_where_clients_heed_it(seconds: float) -> None:
    waits = [retry_after(seconds) for _ in range(MANY)]
    assert min(waits) >= seconds
    assert max(waits) <= max(math.ceil(seconds) * 1.5, math.ceil(seconds) + 1)
    if seconds <= 60:
        assert max(waits) <= 60, "official clients ignore a longer one"
    if seconds <= 59:
        assert len(set(waits)) > 1
