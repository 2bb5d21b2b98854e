"""The queue before the engines: turns are given one at a time, none is lost, and every wait ends."""

import asyncio
import random
from contextlib import suppress
from time import monotonic

import pytest
from prometheus_client import REGISTRY
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.priority import BEST_EFFORT
from quire_router.admission.fair_queue import CREDIT, QueueBounds, QueuedRequest
from quire_router.admission.queue import AdmissionQueue, QueueSettings
from quire_router.admission.tenants import Tenant, Tenants

MODEL = "m"


class FakeCapacity:
    """``Capacity`` for ``slots`` requests at once, all but ``reserved`` of them spare, which notifies the queue when a
    request ends. What is best effort has all but ``best_effort_reserve``.
    """

    def __init__(self, slots=1, engines=1, reserved=0, best_effort_reserve=0):
        self.slots = slots
        self.reserved = reserved
        self.best_effort_reserve = best_effort_reserve
        self.engines = engines
        self.sleeping = 0
        self.running = []
        self.most = 0
        self.queue = None

    def has_capacity(self, model):
        return self.engines > 0 and len(self.running) < self.slots

    def has_spare_capacity(self, model):
        return self.engines > 0 and len(self.running) < self.slots - self.reserved

    def has_best_effort_capacity(self, model):
        return self.engines > 0 and len(self.running) < self.slots - self.best_effort_reserve

    def ready(self, model):
        return self.engines

    def num_sleeping(self, model):
        return self.sleeping

    def dispatch(self, request_id):
        self.running.append(request_id)
        self.most = max(self.most, len(self.running))

    def end(self, request_id):
        self.running.remove(request_id)
        self.queue.notify_capacity()


def parked(model):
    return REGISTRY.get_sample_value("quire_parked_requests", {"model": model}) or 0


def open_queue(capacity, tenants=(), **settings):
    capacity.queue = AdmissionQueue([MODEL, "other"], capacity, Tenants(tenants), QueueSettings(**settings))
    return capacity.queue


def waiting(name, tenant="t", **fields):
    return QueuedRequest(name, MODEL, tenant, fields.pop("tokens", 10), fields.pop("size", 10), **fields)


async def run(capacity, one, order=None, steps=1):
    """What the lifecycle does: its turn, dispatch, and an answer that takes a while."""
    await capacity.queue.acquire(one)
    capacity.dispatch(one.request_id)
    if order is not None:
        order.append(one.request_id)
    try:
        for _ in range(steps):
            await asyncio.sleep(0)
    finally:
        capacity.end(one.request_id)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def refused(queue, one):
    with pytest.raises(QuireError) as refusal:
        async with asyncio.timeout(20):
            await queue.acquire(one)
    return refusal.value.code, refusal.value.reason


async def test_a_request_that_finds_capacity_does_not_wait():
    capacity = FakeCapacity(slots=1)
    queue = open_queue(capacity)
    acquiring = queue.acquire(waiting("a"))
    with pytest.raises(StopIteration):
        acquiring.send(None)


@pytest.mark.parametrize("slots", [1, 3])
async def test_no_more_run_than_capacity_allows_and_all_are_admitted_in_order(slots):
    capacity, order = FakeCapacity(slots), []
    open_queue(capacity)
    names = [f"r{number}" for number in range(50)]
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(run(capacity, waiting(name), order, steps=random.Random(name).randrange(4)))

    assert order == names
    assert capacity.most == slots
    assert parked(MODEL) == 0


@pytest.mark.parametrize("seed", range(30))
async def test_no_admission_is_lost_and_no_capacity_is_given_twice_whichever_requests_are_cancelled(seed):
    chance = random.Random(seed)
    capacity = FakeCapacity(slots=chance.randint(1, 3))
    open_queue(capacity)
    tasks = []
    for number in range(60):
        tasks.append(asyncio.create_task(run(capacity, waiting(f"r{number}"), steps=chance.randrange(4))))
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    await settle()

    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert capacity.most <= capacity.slots
    assert capacity.running == []
    assert parked(MODEL) == 0
    await run(capacity, waiting("last"))


async def test_an_admission_that_came_together_with_a_cancellation_goes_to_the_next():
    capacity = FakeCapacity(slots=1)
    open_queue(capacity)
    capacity.dispatch("first")
    one, other = (asyncio.create_task(run(capacity, waiting(name), steps=1000)) for name in ("one", "other"))
    await settle()

    capacity.end("first")  # gives the turn to "one", whose task has not run yet
    one.cancel()
    await settle()

    assert one.cancelled()
    assert capacity.running == ["other"]
    other.cancel()


async def test_a_cancelled_waiter_that_has_not_run_since_is_skipped():
    capacity = FakeCapacity(slots=1)
    open_queue(capacity)
    capacity.dispatch("first")
    one, other = (asyncio.create_task(run(capacity, waiting(name), steps=1000)) for name in ("one", "other"))
    await settle()

    one.cancel()
    capacity.end("first")
    await settle()

    assert capacity.running == ["other"]
    other.cancel()


@pytest.mark.parametrize("given", [True, False])
async def test_an_admission_that_was_not_used_costs_its_tenant_nothing(given):
    capacity, order = FakeCapacity(slots=1), []
    open_queue(capacity)
    capacity.dispatch("first")
    one = asyncio.create_task(run(capacity, waiting("one", tokens=100_000)))
    await settle()
    if given:
        capacity.end("first")
        one.cancel()
    else:
        one.cancel()
        capacity.end("first")
    capacity.dispatch("second")
    others = [asyncio.create_task(run(capacity, waiting(tenant, tenant), order)) for tenant in ("t", "u")]
    await settle()
    capacity.end("second")
    await asyncio.gather(*others)

    assert order == ["t", "u"]


async def test_no_request_overtakes_those_that_wait_though_there_is_capacity_for_a_moment():
    capacity, order = FakeCapacity(slots=1), []
    open_queue(capacity)
    capacity.dispatch("first")
    one = asyncio.create_task(run(capacity, waiting("one"), order))
    await settle()
    capacity.end("first")
    other = asyncio.create_task(run(capacity, waiting("other"), order))
    await asyncio.gather(one, other)

    assert order == ["one", "other"]


async def test_a_tenant_that_is_ahead_gets_spare_capacity_only_unless_it_is_alone():
    capacity = FakeCapacity(slots=3, reserved=2)
    queue = open_queue(capacity)
    for number in range(3):
        await queue.acquire(waiting(f"alone{number}", tokens=2 * CREDIT))
        capacity.dispatch(f"alone{number}")
    for number in range(3):
        capacity.end(f"alone{number}")

    await queue.acquire(waiting("b", "other"))
    await queue.acquire(waiting("a", tokens=2 * CREDIT))
    capacity.dispatch("a")
    ahead = asyncio.create_task(run(capacity, waiting("a2")))
    await settle()
    assert parked(MODEL) == 1
    await asyncio.wait_for(run(capacity, waiting("b2", "other"), steps=0), 20)
    assert parked(MODEL) == 1

    capacity.end("a")
    await asyncio.wait_for(ahead, 20)


async def test_models_wait_apart():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity)
    task = asyncio.create_task(queue.acquire(waiting("a")))
    await settle()

    assert (parked(MODEL), parked("other")) == (1, 0)
    capacity.slots = 1
    await queue.acquire(QueuedRequest("b", "other", "t", 1, 1))
    queue.notify_capacity()
    await task
    assert parked(MODEL) == 0


@pytest.mark.parametrize("waiters", [1, 2, 3, 8])
@pytest.mark.parametrize("best_effort", [False, True])
async def test_a_question_for_capacity_may_find_that_there_is_some(waiters, best_effort):
    class FindsWhenAsked(FakeCapacity):
        """As engines that describe themselves in one moment: each question for one finds that another one has room."""

        found = 0

        def _ask(self):
            if self.found < 3 * self.slots:
                self.found += 1
                self.queue.notify_capacity()

        def has_capacity(self, model):
            self._ask()
            return super().has_capacity(model)

        def has_best_effort_capacity(self, model):
            self._ask()
            return super().has_best_effort_capacity(model)

        def ready(self, model):
            self._ask()
            return super().ready(model)

    capacity, order = FindsWhenAsked(slots=0), []
    queue = open_queue(capacity)
    names = [f"r{number}" for number in range(waiters)]
    priority = BEST_EFFORT if best_effort else 0
    tasks = [asyncio.create_task(run(capacity, waiting(name, priority=priority), order, steps=3)) for name in names]
    await settle()
    capacity.slots = 2
    queue.notify_capacity()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)

    assert order == names
    assert capacity.most <= 2
    assert parked(MODEL) == 0


async def test_while_no_engine_is_ready_a_request_waits_and_runs_when_one_comes():
    capacity = FakeCapacity(engines=0)
    queue = open_queue(capacity)
    task = asyncio.create_task(queue.acquire(waiting("a")))
    await settle()
    assert not task.done()

    capacity.engines = 1
    queue.notify_capacity()
    await asyncio.wait_for(task, 20)


async def test_a_hold_ends_with_unavailable():
    queue = open_queue(FakeCapacity(engines=0), hold_timeout=0.02)
    assert await refused(queue, waiting("a")) == (ErrorCode.UNAVAILABLE, "none_ready")
    assert parked(MODEL) == 0


async def test_a_full_fleet_is_waited_for_beyond_the_hold_and_not_for_ever():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity, hold_timeout=0.01, max_seconds=0.2)
    assert await refused(queue, waiting("a")) == (ErrorCode.OVERLOADED, "queue_seconds")


async def test_an_engine_that_sleeps_is_waited_for_as_a_full_one_is():
    capacity = FakeCapacity(engines=0)
    capacity.sleeping = 1
    queue = open_queue(capacity, hold_timeout=0.01, max_seconds=0.2)
    assert await refused(queue, waiting("a")) == (ErrorCode.OVERLOADED, "queue_seconds")


async def test_the_hold_begins_when_the_last_engine_went():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity, hold_timeout=0.1, max_seconds=100)
    task = asyncio.create_task(refused(queue, waiting("a")))
    await asyncio.sleep(0.15)
    assert not task.done()
    capacity.engines = 0
    queue.notify_capacity()
    assert await task == (ErrorCode.UNAVAILABLE, "none_ready")


async def test_a_deadline_ends_a_wait():
    queue = open_queue(FakeCapacity(slots=0))
    deadline = asyncio.get_running_loop().time() + 0.02
    assert await refused(queue, waiting("a", deadline=deadline)) == (ErrorCode.DEADLINE, "deadline")


async def test_a_request_that_is_dropped_from_a_full_queue_gets_overloaded():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity, bounds=QueueBounds(2, 1000))
    flood = [asyncio.create_task(refused(queue, waiting(f"a{number}", "a"))) for number in range(3)]
    await settle()
    other = asyncio.create_task(queue.acquire(waiting("b", "b")))
    await settle()

    assert [task.done() for task in flood] == [False, True, True]
    assert [await task for task in flood[1:]] == [(ErrorCode.OVERLOADED, "queue_full")] * 2
    assert parked(MODEL) == 2
    for task in (flood[0], other):
        task.cancel()


async def test_bytes_are_bounded_and_a_tenants_requests_too():
    queue = open_queue(FakeCapacity(slots=0), [Tenant("few", max_queued=1)], bounds=QueueBounds(10, 100))
    tasks = [asyncio.create_task(queue.acquire(waiting(name, name, size=50))) for name in ("few", "b")]
    await settle()

    assert await refused(queue, waiting("c", "few")) == (ErrorCode.OVERLOADED, "max_queued")
    assert await refused(queue, waiting("d", "d", size=51)) == (ErrorCode.OVERLOADED, "queue_bytes")
    assert await refused(queue, waiting("e", "b")) == (ErrorCode.OVERLOADED, "queue_bytes")
    for task in tasks:
        task.cancel()


async def test_a_closing_queue_releases_all_waiters_and_admits_no_request():
    queue = open_queue(FakeCapacity(slots=0))
    tasks = [asyncio.create_task(refused(queue, waiting(name))) for name in "abc"]
    await settle()
    queue.close()

    assert await asyncio.gather(*tasks) == [(ErrorCode.UNAVAILABLE, "stopping")] * 3
    assert await refused(queue, waiting("d")) == (ErrorCode.UNAVAILABLE, "stopping")


async def test_an_abandoned_request_returns_without_an_admission():
    capacity = FakeCapacity(slots=1)
    queue = open_queue(capacity)
    capacity.dispatch("first")
    one = asyncio.create_task(queue.acquire(waiting("one")))
    await settle()

    assert queue.abandon("one")
    assert not queue.abandon("one")
    assert not queue.abandon("unknown")
    await asyncio.wait_for(one, 20)
    assert parked(MODEL) == 0

    capacity.end("first")
    await run(capacity, waiting("two"))


async def test_an_unretrieved_error_is_not_logged():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    queue = open_queue(FakeCapacity(slots=0))
    task = asyncio.create_task(queue.acquire(waiting("a")))
    await settle()
    queue.close()
    task.cancel()
    with suppress(asyncio.CancelledError, QuireError):
        await task
    del task
    await settle()
    assert complaints == []


# What is best effort


def line(name, tenant="t", **fields):
    return waiting(name, tenant, priority=BEST_EFFORT, **fields)


@pytest.mark.parametrize("seed", range(10))
async def test_what_is_best_effort_has_its_turn_only_while_nothing_else_waits(seed):
    chance, order = random.Random(seed), []
    capacity = FakeCapacity(slots=2)
    open_queue(capacity)
    names = [f"{'line' if chance.random() < 0.5 else 'other'} {number}" for number in range(40)]
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for name in names:
            request = line(name) if name.startswith("line") else waiting(name)
            tasks.create_task(run(capacity, request, order, steps=1 + chance.randrange(4)))
    at_once = [name for name in names if name in order[:2]]
    others = [name for name in names if name.startswith("other")]
    lines = [name for name in names if name.startswith("line")]
    assert [name for name in order if name not in at_once] == [
        name for name in (*others, *lines) if name not in at_once
    ]


async def test_what_is_best_effort_leaves_its_reserve_to_others():
    capacity = FakeCapacity(slots=3, best_effort_reserve=2)
    queue = open_queue(capacity)
    await queue.acquire(line("a"))
    capacity.dispatch("a")
    second = asyncio.create_task(queue.acquire(line("b")))
    await settle()
    assert not second.done()
    assert (queue.waiting(MODEL), parked(MODEL)) == (0, 0), "nobody has to be told of it"
    for name in ("c", "d"):
        await queue.acquire(waiting(name))
        capacity.dispatch(name)
    for name in ("c", "d", "a"):
        assert not second.done()
        capacity.end(name)
        await settle()
    assert second.done()


async def test_what_is_best_effort_waits_longer_than_others_may_and_until_its_deadline():
    capacity = FakeCapacity(engines=0)
    queue = open_queue(capacity, hold_timeout=0.01, max_seconds=0.02)
    patient = asyncio.create_task(queue.acquire(line("a")))
    late = asyncio.create_task(refused(queue, line("b", deadline=monotonic() + 0.03)))
    assert await refused(queue, waiting("c")) == (ErrorCode.UNAVAILABLE, "none_ready")
    assert await late == (ErrorCode.DEADLINE, "deadline")
    assert not patient.done()
    capacity.engines = 1
    queue.notify_capacity()
    await patient


async def test_a_full_queue_of_others_and_one_of_best_effort_are_two():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity, bounds=QueueBounds(max_requests=1))
    waits = [asyncio.create_task(queue.acquire(each)) for each in (line("a"), line("b"), waiting("c"))]
    await settle()
    assert await refused(queue, waiting("d")) == (ErrorCode.OVERLOADED, "queue_full")
    assert not any(each.done() for each in waits)
    queue.close()
    assert {type(each) for each in await asyncio.gather(*waits, return_exceptions=True)} == {QuireError}


async def test_tenants_share_turns_of_best_effort_by_what_they_got_of_these_alone():
    capacity, order = FakeCapacity(slots=1), []
    queue = open_queue(capacity)
    await queue.acquire(waiting("first", "busy", tokens=100 * CREDIT))  # which does not count here
    capacity.dispatch("first")
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for number in range(6):
            for tenant in ("busy", "other"):
                request = line(f"{tenant} {number}", tenant, tokens=10)
                tasks.create_task(run(capacity, request, order))
        await settle()
        capacity.end("first")
    assert order == [f"{tenant} {number}" for number in range(6) for tenant in ("busy", "other")]


async def test_a_line_whose_request_is_interrupted_waits_no_longer():
    capacity = FakeCapacity(slots=0)
    queue = open_queue(capacity)
    waits = asyncio.create_task(queue.acquire(line("a")))
    await settle()
    assert queue.abandon("a")
    await waits
