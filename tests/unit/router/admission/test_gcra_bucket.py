"""Limits a minute: never more than was promised, and a wait that is returned is enough and not too long."""

from hypothesis import given
from hypothesis import strategies as st
from quire_router.admission.tenants import WINDOW, GcraBucket

LIMITS = st.one_of(st.integers(1, 100), st.integers(1, 10**9))
STEPS = st.lists(st.tuples(st.integers(0, 2 * WINDOW), st.integers(1, 10**6)), min_size=1, max_size=40)


def admissions(bucket, steps):
    """When what was taken, by a client that asks at any time for any amount."""
    now, taken = 0, []
    for pause, amount in steps:
        now += pause
        if bucket.wait(amount, now) == 0:
            bucket.consume(amount, now)
            taken.append((now, amount))
    return taken


@given(LIMITS, STEPS)
def test_no_window_sees_more_than_the_limit_and_what_was_saved_up(limit, steps):
    taken = admissions(GcraBucket(limit), steps)

    for first, (begin, _) in enumerate(taken):
        total = 0
        for end, amount in taken[first:]:
            total += amount
            assert total * WINDOW <= limit * (WINDOW + end - begin)


@given(LIMITS, STEPS, st.integers(1, 10**6))
def test_the_wait_that_is_returned_is_enough_and_a_moment_less_is_not(limit, steps, amount):
    bucket = GcraBucket(limit)
    taken = admissions(bucket, steps)
    now = taken[-1][0] if taken else 0
    wait = bucket.wait(amount, now)

    if wait is None:
        assert amount > limit
    else:
        assert bucket.wait(amount, now + wait) == 0
        if wait:
            assert bucket.wait(amount, now + wait - 1) == 1


@given(LIMITS, STEPS)
def test_what_remains_can_be_taken_at_once_and_not_one_more(limit, steps):
    bucket = GcraBucket(limit)
    taken = admissions(bucket, steps)
    now = taken[-1][0] if taken else 0
    remaining = bucket.remaining(now)

    assert remaining <= limit
    assert remaining == 0 or bucket.wait(remaining, now) == 0
    assert bucket.wait(remaining + 1, now) != 0
    assert bucket.remaining(now + bucket.debt(now)) == limit


@given(LIMITS, st.lists(st.tuples(st.integers(0, WINDOW), st.integers(1, 10**6), st.floats(0, 1)), max_size=30))
def test_refunds_in_a_window_are_all_that_exceeds_the_limit(limit, steps):
    bucket, now, events = GcraBucket(limit), 0, []
    for pause, amount, part in steps:
        now += pause
        if bucket.wait(amount, now) == 0:
            bucket.consume(amount, now)
            events.append((now, amount))
            unused = int(amount * part)
            bucket.refund(unused)
            events.append((now, -unused))

    for first, (begin, _) in enumerate(events):
        total = 0
        for end, amount in events[first:]:
            total += amount
            assert total * WINDOW <= limit * (WINDOW + end - begin)


def test_refunds_can_be_taken_again_and_never_overfill_the_bucket():
    bucket = GcraBucket(60)
    bucket.consume(60, 0)
    assert bucket.wait(10, 0) == 10_000_000

    bucket.refund(10)
    assert bucket.wait(10, 0) == 0

    bucket.refund(60)
    assert bucket.remaining(0) == 60
