"""A tenant that floods, in virtual time: the queue in front of servers that take a while for each request."""

from heapq import heappop, heappush, merge
from random import Random

import pytest
from quire_proto.errors import QuireError
from quire_router.admission.fair import Bounds, FairQueue
from quire_router.admission.tenant import Tenant, Tenants
from quire_router.admission.turn import Waiting

SECONDS = 200
SEEDS = range(6)
SERVERS = 16
TOKENS_A_SECOND = 1000  # of one server
MEAN_TOKENS = 1000


def arrivals(tenant, rate, seed):
    """A Poisson process of requests whose sizes vary."""
    chance, at, number = Random(seed), 0.0, 0
    while (at := at + chance.expovariate(rate)) < SECONDS:
        tokens = 100 + int(chance.expovariate(1 / (MEAN_TOKENS - 100)))
        yield at, Waiting(f"{tenant}{number}", "m", tenant, min(tokens, 4000), 1000)
        number += 1


def waits_of(tenant, *streams, weights=(1.0, 1.0)):
    """How long each request of a tenant waited; none of its requests may be refused."""
    tenants = Tenants(Tenant(name, weight=weight) for name, weight in zip("ab", weights, strict=True))
    queue, waits, since = FairQueue(tenants, Bounds(512, 10**9)), [], {}
    events = [(at, order, each) for order, (at, each) in enumerate(merge(*streams, key=when))]
    ends, free = [], SERVERS
    while events or ends:
        if ends and (not events or ends[0] <= events[0][0]):
            now, free = heappop(ends), free + 1
        else:
            now, _, waiting = heappop(events)
            since[waiting.request_id] = now
            taken = is_taken(queue, waiting, tenant)
            assert taken or waiting.tenant != tenant
        while free and queue:
            served, free = queue.next(), free - 1
            heappush(ends, now + served.tokens / TOKENS_A_SECOND)
            if served.tenant == tenant:
                waits.append(now - since[served.request_id])
        if free:
            queue.rest()
    return sorted(waits)


def when(arrival):
    return arrival[0]


def is_taken(queue, waiting, tenant):
    try:
        return all(gone.tenant != tenant for gone in queue.add(waiting))
    except QuireError:
        return False


def p95(waits):
    return waits[int(len(waits) * 0.95)]


def waits_beside(load, others):
    """Of a tenant that asks for ``load`` of all servers, beside another one that asks for ``others``."""
    capacity = SERVERS * TOKENS_A_SECOND / MEAN_TOKENS
    waits = []
    for seed in SEEDS:
        waits += waits_of("b", arrivals("b", load * capacity, seed), arrivals("a", others * capacity, seed + 100))
    return sorted(waits)


@pytest.mark.parametrize("load", [0.3, 0.45])
def test_a_flood_raises_the_p95_wait_of_another_tenant_by_less_than_a_fifth(load):
    """Beside a tenant that asks for ten times its half, and beside one that asks for its half, or for all that is left:
    its fair share as those define it who share what others leave.
    """
    flooded = waits_beside(load, 5)
    for fair_share in (0.5, 1 - load):
        fair = waits_beside(load, fair_share)
        assert len(flooded) == len(fair)
        assert p95(flooded) <= 1.2 * p95(fair)
