"""Tenants' limits: at one router, at several through a real Redis, and while Redis is away."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.limits import RateLimiter, ReserveRequest
from quire_router.admission.redis_rate_limit import RedisRateLimiter
from quire_router.admission.tenants import MICROSECONDS, WINDOW, Tenant, Tenants, TenantUsage

from tests.support.redis_server import redis_server, settable_clock


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


def limits_of(clock=None, shared=None, **limits):
    tenants = Tenants([Tenant("t", **limits)])
    return RateLimiter(tenants, shared, clock=clock) if clock else RateLimiter(tenants, shared)


async def refusal_of(limits, request_id="x", tokens=1):
    with pytest.raises(QuireError) as refusal, await limits.reserve("t", request_id, tokens):
        pass
    return refusal.value


async def spend(limits, request_id, tokens, used):
    with await limits.reserve("t", request_id, tokens) as reservation:
        reservation.used = used


# One router


async def test_a_tenant_without_limits_is_not_counted():
    limits = limits_of()
    for number in range(100):
        await spend(limits, str(number), 10**9, 10**9)
    assert limits.status("t") is None


async def test_requests_a_minute_end_with_a_wait_that_is_enough():
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=3)
    for number in range(3):
        await spend(limits, str(number), 5, 5)
    error = await refusal_of(limits)

    assert (error.code, error.reason) == (ErrorCode.OVERLOADED, "requests_per_minute")
    assert error.retry_after == 20
    clock.now += int(error.retry_after * MICROSECONDS)
    await spend(limits, "y", 5, 5)
    assert (await refusal_of(limits)).reason == "requests_per_minute"


async def test_tokens_are_charged_as_most_and_corrected_to_what_was_used():
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=1000)
    with await limits.reserve("t", "a", 900) as reservation:
        assert limits.status("t").tokens.remaining == 100
        error = await refusal_of(limits, tokens=200)
        assert error.reason == "tokens_per_minute"
        assert error.retry_after == 6
        reservation.used = 300
    assert limits.status("t").tokens.remaining == 700
    await spend(limits, "b", 700, 700)
    assert limits.status("t").tokens.remaining == 0


async def test_a_request_that_can_never_be_admitted_is_invalid_and_has_no_retry_time():
    error = await refusal_of(limits_of(tokens_per_minute=100), tokens=101)
    assert (error.code, error.param, error.retry_after) == (ErrorCode.INVALID, "max_tokens", None)


def test_requests_that_can_never_run_together_are_invalid():
    for limit, tokens, param in (
        ({"tokens_per_minute": 100}, [40, 40, 40], "max_tokens"),
        ({"requests_per_minute": 2, "max_concurrent": 9}, [1, 1, 1], "prompt"),
        ({"requests_per_minute": 9, "max_concurrent": 2}, [1, 1, 1], "prompt"),
    ):
        limits_of(**limit).check_size("t", tokens[:2])
        with pytest.raises(QuireError) as refusal:
            limits_of(**limit).check_size("t", tokens)
        assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


async def test_a_request_that_never_ran_costs_nothing():
    limits = limits_of(Clock(), requests_per_minute=5, tokens_per_minute=100)
    (await limits.reserve("t", "a", 60)).cancel()
    assert (limits.status("t").requests.remaining, limits.status("t").tokens.remaining) == (5, 100)


@pytest.mark.parametrize("failure", [None, RuntimeError, asyncio.CancelledError])
async def test_a_request_is_no_longer_in_progress_on_every_way_out(failure):
    limits = limits_of(max_concurrent=1)
    for _ in range(3):
        try:
            with await limits.reserve("t", "a", 1):
                assert (await refusal_of(limits)).reason == "max_concurrent"
                if failure is not None:
                    raise failure
        except (RuntimeError, asyncio.CancelledError):
            pass


async def test_what_is_refused_costs_nothing():
    limits = limits_of(Clock(), requests_per_minute=5, tokens_per_minute=100, max_concurrent=1)
    with await limits.reserve("t", "a", 10) as reservation:
        reservation.used = 10
        for _ in range(10):
            await refusal_of(limits)
    assert (limits.status("t").requests.remaining, limits.status("t").tokens.remaining) == (4, 90)


async def test_refusals_are_counted_by_reason():
    def count():
        return REGISTRY.get_sample_value("quire_admission_refusals_total", {"reason": "max_concurrent"}) or 0

    limits, before = limits_of(max_concurrent=1), count()
    with await limits.reserve("t", "a", 1):
        await refusal_of(limits)
    assert count() == before + 1


# What goes on, and what is asked for twice


async def test_a_resumed_request_counts_and_is_neither_refused_nor_charged():
    limits = limits_of(Clock(), max_concurrent=1, requests_per_minute=5, tokens_per_minute=100)
    with limits.adopt("t", "a"), limits.adopt("t", "b"):
        assert (await refusal_of(limits)).reason == "max_concurrent"
        assert (limits.status("t").requests.remaining, limits.status("t").tokens.remaining) == (5, 100)
    await spend(limits, "c", 1, 1)
    assert (limits.status("t").requests.remaining, limits.status("t").tokens.remaining) == (4, 99)


MOST = 2
ACTIONS = st.lists(st.tuples(st.sampled_from(["enter", "hold", "close"]), st.integers(0, 3), st.integers(0, 1)))


@given(ACTIONS)
@settings(deadline=None)
def test_one_router_counts_each_request_once_until_its_last_holder_releases_it(actions):
    asyncio.run(count_alone(actions))


async def count_alone(actions):
    limits, reservations, num_charged = limits_of(Clock(), max_concurrent=MOST, tokens_per_minute=1000), [], 0
    for action, number, _ in actions:
        request_id, open_ids = str(number), {each for each, _ in reservations}
        if action == "close" and reservations:
            reservations.pop(number % len(reservations))[1].commit_all()
        elif action == "hold":
            reservations.append((request_id, limits.adopt("t", request_id)))
        elif action == "enter" and (request_id in open_ids or len(open_ids) < MOST):
            reservations.append((request_id, await limits.reserve("t", request_id, 1)))
            num_charged += 1
        elif action == "enter":
            assert (await refusal_of(limits, request_id)).reason == "max_concurrent"
        assert limits.status("t").tokens.remaining == 1000 - num_charged


# Through Redis


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@asynccontextmanager
async def routers(server, number, *, lease=30.0, patience=5.0, **limits):
    async with AsyncExitStack() as stack:
        limiters = [RedisRateLimiter(server.url, lease=lease, timeout=patience) for _ in range(number)]
        for limiter in limiters:
            stack.push_async_callback(limiter.close)
        await limiters[0]._client.flushall()
        yield [limits_of(shared=limiter, **limits) for limiter in limiters]


async def until(holds):
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def admitted(limits, request_id="probe"):
    async def holds():
        try:
            await spend(limits, request_id, 1, 0)
        except QuireError:
            return False
        return True

    return holds


async def test_routers_share_what_a_tenant_may_use(redis):
    async with routers(redis, 3, requests_per_minute=10, tokens_per_minute=100_000) as three:
        taken = 0
        for number in range(30):
            taken += await admitted(three[number % 3], str(number))()
        error = await refusal_of(three[0], tokens=100)
        assert error.reason == "requests_per_minute"
        assert 0 < error.retry_after <= 6
        assert 10 <= taken <= 11  # a slow machine may see one more refilled
        assert three[0].status("t").tokens.remaining >= 99_990


async def test_a_request_that_no_engine_gets_is_charged_at_all_routers_and_is_not_in_progress(redis):
    async with routers(redis, 2, requests_per_minute=3, max_concurrent=1) as (one, other):
        with await one.reserve("t", "a", 1):
            await other.consume_request("t")
            await one.consume_request("t")
            for limits in (other, one):
                with pytest.raises(QuireError) as refusal:
                    await limits.consume_request("t")
                assert (refusal.value.code, refusal.value.reason) == (ErrorCode.OVERLOADED, "requests_per_minute")
                with pytest.raises(QuireError, match="requests a minute"):
                    limits.check_rate("t")


async def test_a_request_at_one_router_is_in_progress_at_all_until_it_ends(redis):
    async with routers(redis, 2, max_concurrent=1) as (one, other):
        with await one.reserve("t", "a", 1):
            assert (await refusal_of(other)).reason == "max_concurrent"
        await until(admitted(other))


async def test_tokens_that_were_not_used_are_given_back_to_all(redis):
    async with routers(redis, 2, tokens_per_minute=1000) as (one, other):
        with await one.reserve("t", "a", 1000) as reservation:
            assert (await refusal_of(other, tokens=900)).reason == "tokens_per_minute"
            reservation.used = 10
        await until(admitted(other))
        await spend(other, "b", 900, 900)


async def test_the_requests_of_a_router_that_died_are_forgotten_and_those_of_a_living_one_are_not(redis):
    async with routers(redis, 3, lease=0.3, max_concurrent=2) as (dead, alive, third):
        with await dead.reserve("t", "dead", 1), await alive.reserve("t", "alive", 1):
            assert (await refusal_of(third)).reason == "max_concurrent"
            dead._shared._publisher.cancel()
            await until(admitted(third))
            await asyncio.sleep(0.7)
            with await third.reserve("t", "c", 1):
                assert (await refusal_of(dead)).reason == "max_concurrent"


# Few ids, so that some are charged while they are in progress, and some again after their end.
ENDS = st.sampled_from(["stays", "ends", "never ran"])
COSTS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40), ENDS), max_size=25)


@given(COSTS, st.integers(1, 6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_script_decides_as_one_router_alone_would(redis, costs, most):
    """The pure limiter is the oracle. Limits are so low that what is refilled meanwhile is less than any request."""
    asyncio.run(compare(redis, costs, most))


async def compare(server, costs, most):
    oracle = TenantUsage(Tenant("t", requests_per_minute=12, tokens_per_minute=100, max_concurrent=most))
    limiter = RedisRateLimiter(server.url, timeout=5)
    try:
        await limiter._client.flushall()
        for number, tokens, end in costs:
            request_id, costs_of = str(number), oracle.costs(tokens)
            running, running_before = oracle.running, oracle.num_running_before(request_id)
            result = await limiter.reserve(ReserveRequest("t", request_id, *costs_of, most))
            refusal = oracle.refusal(tokens, 0, running_before)
            # Redis' time goes on while the oracle's stands still.
            close = abs(WINDOW - result.token_debt - costs_of[1]) < MICROSECONDS / 2
            close |= abs(WINDOW - result.request_debt - costs_of[0]) < MICROSECONDS / 2
            if close and result.admitted != (refusal is None):
                return
            assert result.admitted == (refusal is None)
            assert result.newly_running == (result.admitted and running_before == running)
            if result.admitted:
                oracle.consume(request_id, tokens, 0)
            assert result.running == oracle.running
            status = oracle.status(0)
            assert result.request_debt / MICROSECONDS == pytest.approx(status.requests.reset, abs=2)
            assert result.token_debt / MICROSECONDS == pytest.approx(status.tokens.reset, abs=2)
            if result.admitted and end != "stays":
                unused = (1, tokens) if end == "never ran" else (0, 0)
                request_refund, token_refund = oracle.refunds(*unused)
                oracle.release(request_id, *unused)
                limiter.release(
                    "t",
                    request_id,
                    newly_running=result.newly_running,
                    request_refund=request_refund,
                    token_refund=token_refund,
                )
                await until_released(limiter)
    finally:
        await limiter.close()


@given(ACTIONS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_routers_count_each_request_once_and_none_too_few_that_they_have(redis, actions):
    asyncio.run(count_together(redis, actions))


async def count_together(server, actions):
    """A request may stay in progress for a lease if the last to settle it is not the router that reserved it."""
    async with routers(server, 2, max_concurrent=MOST) as two:
        client, reservations, left = two[0]._shared._client, [], set()
        for action, number, which in actions:
            request_id, places = str(number), await places_in(client)
            if action == "close" and reservations:
                left.add(reservations[number % len(reservations)][0])
                reservations.pop(number % len(reservations))[1].settle()
            elif action == "hold":
                reservations.append((request_id, two[which].adopt("t", request_id)))
            elif action == "enter" and (request_id in places or len(places) < MOST):
                reservations.append((request_id, await two[which].reserve("t", request_id, 1)))
            elif action == "enter":
                assert (await refusal_of(two[which], request_id)).reason == "max_concurrent"
            for limits in two:
                await send_all(limits._shared)
            open_ids = {each for each, _ in reservations}
            assert open_ids <= await places_in(client) <= open_ids | left


async def places_in(client):
    return {name.decode() for name in await client.zrange("quire:limits:{t:t}:running", 0, -1)}


async def send_all(limiter):
    await limiter._send_releases()
    await limiter._send_adopted()
    await limiter._renew_all()


async def test_a_request_resumed_at_another_router_counts_once(redis):
    async with routers(redis, 3, lease=0.5, max_concurrent=1) as (dead, heir, third):
        with await dead.reserve("t", "a", 1):
            dead._shared._publisher.cancel()
            with heir.adopt("t", "a"):
                await until(lambda: is_held_by(heir, "a"))
                await asyncio.sleep(1)  # the lease of the dead router is over
                assert await places_in(heir._shared._client) == {"a"}
                assert (await refusal_of(third)).reason == "max_concurrent"
            await until(admitted(third))


async def is_held_by(limits, request_id):
    return not limits._shared._adopted and request_id in await places_in(limits._shared._client)


async def test_a_repeated_request_neither_counts_again_nor_ends_the_first(redis):
    async with routers(redis, 2, max_concurrent=1) as (one, other):
        with await one.reserve("t", "a", 1):
            await spend(other, "a", 1, 0)
            await spend(one, "a", 1, 0)
            for limits in (one, other):
                await limits._shared._send_releases()
            assert (await refusal_of(other)).reason == "max_concurrent"
        await until(admitted(other))


async def until_released(limiter):
    """Until Redis knows of every end."""
    await until(lambda: _is_released(limiter))


async def _is_released(limiter):
    await limiter._publisher.stop()
    await limiter._send_releases()
    limiter._publisher = None
    return not limiter._releases


async def test_limits_are_shared_until_redis_is_unavailable():
    with redis_server() as server:
        async with routers(server, 1, lease=0.1, requests_per_minute=1000) as (one,):
            assert shared() == 1
            await spend(one, "a", 1, 1)
            server.kill()
            await spend(one, "b", 1, 1)
            assert shared() == 0
            server.start()
            await until(is_shared)  # though nobody asks


async def is_shared():
    return shared() == 1


def shared():
    return REGISTRY.get_sample_value("quire_limits_shared")


async def test_without_redis_each_router_counts_on_from_the_tenants_last_state():
    with redis_server() as server:
        async with routers(server, 2, requests_per_minute=4) as (one, other):
            await spend(one, "a", 1, 1)
            await spend(other, "b", 1, 1)
            await spend(one, "c", 1, 1)
            assert shared() == 1
            server.kill()
            await spend(one, "d", 1, 1)
            assert shared() == 0
            assert (await refusal_of(one)).reason == "requests_per_minute"
            await spend(other, "e", 1, 1)  # it saw two
            server.start()
            await until(lambda: comes_back(one))


async def test_a_redis_that_failed_is_retried_only_after_a_pause():
    asked = []

    async def fail(**_):
        asked.append(True)
        raise ConnectionError

    limiter = RedisRateLimiter("redis://127.0.0.1:1/0")
    limiter._reserve_script = fail
    for number in range(5):
        assert await limiter.reserve(ReserveRequest("t", str(number), 1, 1, None)) is None
    await limiter.close()
    assert len(asked) == 1


@pytest.mark.parametrize("reply", [[1, 2], b"OK", None, [1, 1, b"0", 0, 0]])
async def test_a_malformed_reply_counts_as_an_unavailable_redis(reply):
    async def answer(**_):
        return reply

    limiter = RedisRateLimiter("redis://127.0.0.1:1/0")
    limiter._reserve_script = answer
    assert await limiter.reserve(ReserveRequest("t", "r", 1, 1, None)) is None
    await limiter.close()


async def test_requests_in_progress_when_redis_failed_still_count_here():
    with redis_server() as server:
        async with routers(server, 1, max_concurrent=1) as (one,):
            with await one.reserve("t", "a", 1):
                server.kill()
                assert (await refusal_of(one)).reason == "max_concurrent"
            await spend(one, "b", 1, 1)


async def comes_back(limits):
    await admitted(limits)()
    return shared() == 1


async def test_a_redis_that_hangs_is_waited_for_only_a_moment():
    with redis_server() as server:
        async with routers(server, 1, patience=0.3, max_concurrent=1) as (one,):
            await until(lambda: comes_back(one))
            await until(lambda: has_no_places(one))
            server.signal(signal.SIGSTOP)
            with await asyncio.wait_for(one.reserve("t", "a", 1), 20):
                for _ in range(2):
                    assert (await asyncio.wait_for(refusal_of(one), 20)).reason == "max_concurrent"
                assert shared() == 0
                assert (await refusal_of(one)).reason == "max_concurrent"
            server.signal(signal.SIGCONT)
            await until(lambda: comes_back(one))
            await until(admitted(one))


async def test_the_keys_of_a_tenant_that_was_idle_for_a_minute_expire(redis):
    async with routers(redis, 1, lease=0.05, requests_per_minute=6000, tokens_per_minute=600_000, max_concurrent=5) as (
        one,
    ):
        await spend(one, "a", 1, 1)
        await until(lambda: _is_empty(one._shared._client))


async def _is_empty(client):
    return await client.dbsize() == 0


@pytest.fixture
def settable(tmp_path):
    with redis_server(clock=settable_clock(tmp_path)) as server:
        yield server


@pytest.mark.parametrize("seconds", [20, 300])
async def test_a_clock_of_redis_that_goes_back_changes_no_debt_and_no_lease(settable, seconds):
    async with routers(settable, 2, lease=20.0, requests_per_minute=60, max_concurrent=3) as (one, other):
        with await one.reserve("t", "lives", 1):
            dead = await other.reserve("t", "dead", 1)
            settable.clock.move(-seconds)
            with await one.reserve("t", "comes", 1):
                assert one.status("t").requests.remaining >= 57
                assert (await refusal_of(one)).reason == "max_concurrent"
            client = one._shared._client
            for _ in range(2):
                settable.clock.move(-seconds)
                await send_all(one._shared)
                assert await places_in(client) == {"lives", "dead"}
                ends = await client.zrange("quire:limits:{t:t}:running", 0, -1, withscores=True)
                now = (await client.time())[0]
                assert all(now < end / MICROSECONDS < now + 22 for _, end in ends)
            for number in range(50):
                await spend(one, str(number), 1, 0)
                await send_all(one._shared)
            assert one.status("t").requests.remaining < 30
            del dead


async def test_a_bucket_that_is_ahead_for_an_unknown_reason_is_cut_to_a_window_once(redis):
    async with routers(redis, 1, requests_per_minute=6000) as (one,):
        client, name = one._shared._client, "quire:limits:{t:t}:requests"
        await client.set(name, (await client.time())[0] * MICROSECONDS + 600 * MICROSECONDS)
        await refusal_of(one)
        full = int(await client.get(name))
        await until(admitted(one))
        assert int(await client.get(name)) == full + 10_000


async def test_a_redis_clock_that_goes_back_makes_no_tenant_wait_longer_than_a_window(redis):
    async with routers(redis, 1, lease=1.0, requests_per_minute=6, max_concurrent=2) as (one,):
        client = one._shared._client
        running_before = (await client.time())[0] * MICROSECONDS + 600 * MICROSECONDS
        await client.set("quire:limits:{t:t}:requests", running_before)
        await client.zadd("quire:limits:{t:t}:running", {"dead": running_before})
        error = await refusal_of(one)
        assert error.reason == "requests_per_minute"
        assert error.retry_after <= WINDOW / MICROSECONDS
        assert one.status("t").requests.reset <= WINDOW / MICROSECONDS
        await until(lambda: is_place_free(one))


async def is_place_free(limits):
    with suppress(QuireError):
        await limits.reserve("t", "asks", 1)
    return "dead" not in await places_in(limits._shared._client)


async def test_an_overwritten_limit_counts_from_the_beginning(redis):
    async with routers(redis, 1, requests_per_minute=6) as (one,):
        await one._shared._client.set("quire:limits:{t:t}:requests", "text")
        await spend(one, "a", 1, 0)
        assert one.status("t").requests.remaining == 5


async def test_a_blocked_loop_reads_its_reply_before_it_counts_redis_as_slow(redis):
    async with routers(redis, 1, patience=0.5, requests_per_minute=1000) as (one,):
        await spend(one, "first", 1, 0)
        asking = [asyncio.create_task(spend(one, str(number), 1, 0)) for number in range(3)]
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - as a long computation does
        await asyncio.gather(*asking)
        assert one._shared._failures == 0


async def test_a_herd_of_requests_waits_for_each_other_and_is_counted_at_all_routers(redis):
    async with routers(redis, 2, requests_per_minute=2000) as (one, other):
        await asyncio.gather(*(spend(one, str(number), 1, 0) for number in range(500)))
        await spend(other, "last", 1, 0)
        assert other.status("t").requests.remaining < 1600


BUSY = "local t = redis.call('TIME'); local till = t[1] * 1000 + t[2] / 1000 + 60; " + (
    "repeat t = redis.call('TIME') until t[1] * 1000 + t[2] / 1000 > till"
)


async def test_a_burst_that_makes_redis_slow_never_makes_limits_local(redis):
    """Each answer takes longer than a request used to wait, and many more requests come than may be admitted."""
    async with AsyncExitStack() as stack:
        limiters = [RedisRateLimiter(redis.url) for _ in range(2)]
        for limiter in limiters:
            stack.push_async_callback(limiter.close)
        await limiters[0]._client.flushall()
        fleet = [limits_of(shared=limiter, requests_per_minute=5) for limiter in limiters]
        hogs = [asyncio.create_task(keep_busy(limiters[0]._client)) for _ in range(2)]
        await asyncio.sleep(0.05)
        asking = [admitted(fleet[number % 2], str(number))() for number in range(40)]
        let_in = sum(await asyncio.gather(*asking))
        for hog in hogs:
            hog.cancel()
    assert (let_in, shared()) == (5, 1)


async def keep_busy(client):
    while True:
        await client.eval(BUSY, 0)


async def test_one_answer_that_is_late_makes_one_request_local_and_several_make_all_so():
    with redis_server() as server:
        async with routers(server, 1, patience=0.05, requests_per_minute=1000) as (one,):
            await spend(one, "a", 1, 0)
            server.signal(signal.SIGSTOP)
            try:
                await spend(one, "b", 1, 0)
                assert shared() == 1
                for number in range(4):
                    await spend(one, str(number), 1, 0)
                assert shared() == 0
            finally:
                server.signal(signal.SIGCONT)
            await until(lambda: comes_back(one))


async def test_requests_that_ended_while_redis_was_unavailable_are_released_when_it_returns():
    with redis_server(persistent=True) as server:
        async with routers(server, 2, max_concurrent=1) as (one, other):
            with await one.reserve("t", "a", 1):
                assert (await refusal_of(other)).reason == "max_concurrent"
                server.kill()
            await asyncio.sleep(0.1)  # it tries in vain
            server.start()
            await until(is_shared)
            await until(lambda: has_no_places(other))  # long before the lease of the place is over


async def has_no_places(limits):
    return not await places_in(limits._shared._client)
