"""The fair queue: shares by weight, order within a tenant, bounds, and no starvation."""

import subprocess
import sys
from collections import Counter, defaultdict
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.fair_queue import TURN_TTL, FairQueue, QueueBounds, QueuedRequest
from quire_router.admission.tenants import Tenant, Tenants

NAMES = ("a", "b", "c")
IDS = count()


def waiting(tenant, tokens=100, size=1, priority=0):
    return QueuedRequest(f"r{next(IDS)}", "m", tenant, tokens, size, priority)


def queue_of(weights=(1, 1, 1), *, requests=10_000, size=10**9, max_queued=None, credit=0):
    tenants = [Tenant(name, weight=w, max_queued=max_queued) for name, w in zip(NAMES, weights, strict=True)]
    return FairQueue(Tenants(tenants), QueueBounds(requests, size), credit=credit)


WEIGHTS = st.tuples(*[st.sampled_from([0.5, 1, 2, 7])] * 3)
# A request of some tenant and size comes (a tuple), or the next one goes (None), or one is cancelled (a number).
ARRIVAL = st.tuples(st.sampled_from(NAMES), st.integers(1, 1000), st.integers(-2, 2))
EVENTS = st.lists(st.one_of(ARRIVAL, ARRIVAL, st.none(), st.integers(0, 50)), max_size=120)


def play(queue, events):
    """What went, each with who waited before it went, in order; everything goes in the end."""
    inside, gone = {}, []

    def serve():
        before = Counter(each.tenant for each in inside.values())
        served = queue.pop(0)
        assert inside.pop(served.request_id) is served
        gone.append((served, before))

    for event in events:
        if isinstance(event, tuple):
            tenant, tokens, priority = event
            one = waiting(tenant, tokens, priority=priority)
            assert queue.add(one) == []
            inside[one.request_id] = one
        elif event is None and inside:
            serve()
        elif isinstance(event, int) and inside:
            victim = list(inside)[event % len(inside)]
            assert queue.remove(victim)
            assert not queue.remove(victim)
            del inside[victim]
        assert len(queue) == len(inside)
    while inside:
        serve()
    return gone


@given(WEIGHTS, st.lists(st.one_of(ARRIVAL, ARRIVAL, st.none()), max_size=120), st.sampled_from([0, 300, 5000]))
def test_two_waiting_tenants_never_drift_apart_by_more_than_one_request_each_and_the_credit(weights, events, credit):
    gone = play(queue_of(weights, credit=credit), events)
    weight = dict(zip(NAMES, weights, strict=True))
    largest = defaultdict(int)
    for served, _ in gone:
        largest[served.tenant] = max(largest[served.tenant], served.tokens)

    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        bound = largest[one] / weight[one] + largest[other] / weight[other] + credit
        difference = lowest = highest = 0.0
        for served, before in gone:
            if not (before[one] and before[other]):
                difference = lowest = highest = 0.0
                continue
            sign = {one: 1, other: -1}.get(served.tenant, 0)
            difference += sign * served.tokens / weight[served.tenant]
            lowest, highest = min(lowest, difference), max(highest, difference)
            assert highest - lowest <= bound * (1 + 1e-9)


@given(WEIGHTS, EVENTS)
def test_every_request_is_admitted_once_and_within_a_tenant_by_priority_and_arrival(weights, events):
    queue = queue_of(weights)
    gone = [served for served, _ in play(queue, events)]
    assert len({each.request_id for each in gone}) == len(gone)
    assert len(queue) == queue.bytes == 0


@given(st.lists(ARRIVAL, max_size=60))
def test_a_tenants_waiting_requests_are_ordered_by_priority_then_by_arrival(arrivals):
    gone = [served for served, _ in play(queue_of(), arrivals)]
    for name in NAMES:
        mine = [each for each in gone if each.tenant == name]
        assert mine == sorted(mine, key=lambda each: (each.priority, int(each.request_id[1:])))


@given(WEIGHTS, st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 1000))
def test_a_newcomer_is_next_however_many_requests_of_another_tenant_wait(weights, flood, tokens):
    queue = queue_of(weights)
    for each in flood:
        queue.add(waiting("a", each))
    queue.pop(0)
    queue.add(waiting("b", tokens))

    assert queue.pop(0).tenant == "b"


def attempt(queue, one):
    try:
        return queue.add(one), None
    except QuireError as error:
        return [], error


@given(
    WEIGHTS,
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 40)), max_size=80),
    st.integers(1, 12),
    st.integers(20, 100),
)
def test_bounds_hold_and_only_tenants_with_more_than_the_newcomer_are_dropped_from(weights, arrivals, requests, size):
    queue = queue_of(weights, requests=requests, size=size)
    weight = dict(zip(NAMES, weights, strict=True))
    inside = []

    def shares(measure):
        return {name: sum(measure(each) for each in inside if each.tenant == name) / weight[name] for name in NAMES}

    for tenant, bytes_ in arrivals:
        one = waiting(tenant, size=bytes_)
        before = list(inside)
        evicted, error = attempt(queue, one)
        if error is not None:
            assert error.code == ErrorCode.OVERLOADED
            assert error.reason in {"queue_full", "queue_bytes"}
            assert error.retry_after is not None
            measure = (lambda each: 1) if error.reason == "queue_full" else (lambda each: each.bytes)
            inside.append(one)
            assert len(inside) > requests or sum(each.bytes for each in inside) > size
            # Those that would have given way before it was refused stay, so it is the largest of what they left.
            if len(before) == requests and error.reason == "queue_full":
                assert shares(measure)[tenant] >= max(shares(measure).values())
            inside = before
        else:
            inside.append(one)
            for victim in evicted:
                assert victim.tenant != tenant
                assert victim is [each for each in inside if each.tenant == victim.tenant][-1]
                inside.remove(victim)
        assert len(queue) == len(inside) <= requests
        assert queue.bytes == sum(each.bytes for each in inside) <= size
        assert all(each.request_id in queue for each in inside)


def test_a_floods_requests_are_dropped_for_a_newcomer_until_both_have_the_same():
    queue = queue_of(requests=10)
    flood = [waiting("a") for _ in range(10)]
    for each in flood:
        queue.add(each)

    evicted = [queue.add(waiting("b")) for _ in range(5)]
    assert evicted == [[each] for each in flood[:4:-1]]
    for tenant in ("a", "b"):
        with pytest.raises(QuireError, match="Too many") as refusal:
            queue.add(waiting(tenant))
        assert refusal.value.reason == "queue_full"
    assert len(queue) == 10


def test_no_request_is_dropped_for_a_newcomer_that_is_refused_anyway():
    queue = queue_of(size=100)
    there = [waiting("a", size=10, priority=number % 2) for number in range(9)]
    for each in there:
        queue.add(each)
    with pytest.raises(QuireError) as refusal:
        queue.add(waiting("b", size=60))  # half of what it needs would be more than "a" had then

    assert refusal.value.reason == "queue_bytes"
    assert (len(queue), queue.bytes) == (9, 90)
    assert [queue.pop(0) for _ in there] == there[::2] + there[1::2]


def test_a_tenant_may_let_only_so_many_wait():
    queue = queue_of(max_queued=2)
    queue.add(waiting("a"))
    queue.add(waiting("a"))
    with pytest.raises(QuireError) as refusal:
        queue.add(waiting("a"))
    assert (refusal.value.code, refusal.value.reason) == (ErrorCode.OVERLOADED, "max_queued")
    queue.add(waiting("b"))


def test_weights_are_shares():
    queue = queue_of((3, 1, 1))
    for _ in range(80):
        queue.add(waiting("a"))
        queue.add(waiting("b"))
    served = Counter(queue.pop(0).tenant for _ in range(80))
    assert served == {"a": 60, "b": 20}


@pytest.mark.parametrize(("now", "first"), [(TURN_TTL, "b"), (TURN_TTL + 1, "a")])
def test_a_forgotten_tenants_last_admission_is_no_debt(now, first):
    queue = queue_of()
    queue.charge(waiting("a", 10_000), 0)
    assert not queue.is_ahead("b", now)
    queue.add(waiting("a", 1))
    queue.add(waiting("b", 1))
    assert queue.pop(now).tenant == first


def test_requests_are_charged_whether_or_not_they_waited():
    queue = queue_of()
    for _ in range(3):
        queue.charge(waiting("a"), 0)
    queue.add(waiting("a"))
    queue.add(waiting("b"))
    queue.charge(waiting("b", 10_000), 0)  # as one that was let go at once would
    assert queue.pop(0).tenant == "a"


EXACT_WEIGHTS = st.tuples(*[st.sampled_from([0.5, 1, 2, 4])] * 3)
TURNS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 1000), st.sampled_from([0, 1, 20, 31])), max_size=60)


@given(EXACT_WEIGHTS, TURNS, st.sampled_from([0, 300, 5000]))
def test_a_tenant_is_ahead_when_it_had_more_than_the_credit_above_another_recent_tenant(weights, turns, credit):
    """Held against the tags by their definitions."""
    queue, time, tags, lately, now = queue_of(weights, credit=credit), 0.0, {}, {}, 0
    for tenant, tokens, later in turns:
        now += later
        tags = {name: tag for name, tag in tags.items() if lately[name] >= now - TURN_TTL}
        starts = {name: max(tags.get(name, time - credit), time - credit) for name in NAMES}
        for name, start in starts.items():
            others = [starts[other] for other in tags if other != name]
            assert queue.is_ahead(name, now) == any(other < start - credit for other in others)
        queue.charge(waiting(tenant, tokens), now)
        time = max(time, starts[tenant])
        tags[tenant] = starts[tenant] + tokens / dict(zip(NAMES, weights, strict=True))[tenant]
        lately[tenant] = now


def test_a_tenant_is_never_ahead_of_itself_and_a_flood_is_ahead_of_a_single_request():
    queue = queue_of(credit=250)
    for _ in range(10):
        assert not queue.is_ahead("a", 0)
        queue.charge(waiting("a"), 0)
    queue.charge(waiting("b", 199), 0)
    assert [queue.is_ahead(name, 0) for name in NAMES] == [False, False, False]
    queue.charge(waiting("a"), 0)
    assert [queue.is_ahead(name, 0) for name in NAMES] == [True, False, False]
    assert not queue.is_ahead("a", TURN_TTL + 1)


@pytest.mark.parametrize("credit", [0, 250])
def test_a_tenant_that_comes_back_may_have_its_credit_and_no_more_before_others(credit):
    queue = queue_of(credit=credit)
    for _ in range(20):
        queue.add(waiting("a"))
    for _ in range(10):
        queue.pop(0)
    for _ in range(10):
        queue.add(waiting("b"))
    served = [queue.pop(0).tenant for _ in range(8)]

    assert served == (["b", "a"] * 4 if credit == 0 else ["b"] * 4 + ["a", "b"] * 2)


def test_a_tenant_that_was_just_served_is_behind_a_newcomer():
    queue = queue_of()
    queue.add(waiting("a"))
    queue.pop(0)
    queue.add(waiting("a"))
    queue.add(waiting("b"))
    assert queue.pop(0).tenant == "b"


def test_the_fair_queue_does_no_input_or_output():
    names = ", ".join(f"quire_router.admission.{name}" for name in ("fair_queue", "tenants"))
    code = f"import sys, {names}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & {"grpc", "redis", "asyncio", "prometheus_client", "pydantic"}
