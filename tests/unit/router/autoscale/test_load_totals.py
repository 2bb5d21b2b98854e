"""The total load: routers' parts in Redis are added up while their leases last, and an unknown load is an error."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_router.autoscale.load_totals import (
    MAX_SNAPSHOT_BYTES,
    InvalidSnapshotError,
    LoadPublisher,
    LoadSettings,
    RedisLoad,
    decode,
    encode,
)
from quire_router.autoscale.local_load import LocalLoad
from quire_router.clients.membership import TOTALS_KEYS
from quire_router.clients.redis_client import redis_client

from tests.support.redis_server import RedisServer, redis_server

SETTINGS = LoadSettings(interval=0.01, heartbeat=0.05, lease=0.6, age=0.01, settle=0.15, timeout=0.5)
MODELS = ("a", "b")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Router:
    """One that publishes a load, which a test sets."""

    def __init__(self, url: str, settings: LoadSettings = SETTINGS, **snapshot: int) -> None:
        self.snapshot = Counter(snapshot)
        self.publisher = LoadPublisher(url, lambda: self.snapshot, settings)
        self.publisher.start()

    def set(self, model: str, count: int) -> None:
        self.snapshot[model] = count
        self.publisher.changed()

    async def die(self) -> None:
        """As by SIGKILL: takes nothing back."""
        task = self.publisher._task
        assert task is not None
        await task.stop()


@asynccontextmanager
async def routers(
    url: str, *snapshots: Mapping[str, int], settings: LoadSettings = SETTINGS
) -> AsyncIterator[list[Router]]:
    started = [Router(url, settings, **snapshot) for snapshot in snapshots]
    try:
        yield started
    finally:
        for router in started:
            await router.publisher.close()


@asynccontextmanager
async def reader(url: str, settings: LoadSettings = SETTINGS) -> AsyncIterator[RedisLoad]:
    load = RedisLoad(url, MODELS, settings)
    try:
        yield load
    finally:
        await load.close()


async def comes(load: RedisLoad, wanted: Mapping[str, int] | None) -> None:
    """Waits until the load is this, or is not known."""
    async with asyncio.timeout(10):
        while await now(load) != wanted:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)


async def now(load: RedisLoad) -> Mapping[str, int] | None:
    try:
        return await load.read()
    except QuireError as error:
        if error.code is not ErrorCode.UNAVAILABLE:
            raise
        return None


async def test_the_load_is_the_sum_of_all_routers_and_idle_models_are_0(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2, "other": 9}, {"a": 3}) as (first, second):
        await comes(load, {"a": 5, "b": 0})
        first.set("a", 0)
        second.set("b", 7)
        await comes(load, {"a": 3, "b": 7})


async def test_a_change_is_published_before_the_next_heartbeat(redis: RedisServer) -> None:
    settings = replace(SETTINGS, heartbeat=60, lease=120)
    async with reader(redis.url, settings) as load, routers(redis.url, {}, settings=settings) as (router,):
        await comes(load, {"a": 0, "b": 0})
        router.set("a", 4)
        await comes(load, {"a": 4, "b": 0})


async def test_the_part_of_a_router_that_died_vanishes_with_its_lease(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}, {"a": 3}) as (first, _):
        await comes(load, {"a": 5, "b": 0})
        await first.die()
        assert await now(load) == {"a": 5, "b": 0}
        await comes(load, {"a": 3, "b": 0})


async def test_an_expired_lease_counts_as_expired_before_the_clean_up(redis: RedisServer) -> None:
    rare = replace(SETTINGS, heartbeat=60, lease=120)
    async with reader(redis.url) as load, routers(redis.url, {"a": 3}, settings=rare):
        await comes(load, {"a": 3, "b": 0})
        async with routers(redis.url, {"a": 2}) as (brief,):
            await comes(load, {"a": 5, "b": 0})
            await brief.die()
            await comes(load, {"a": 3, "b": 0})


async def test_a_router_that_ends_takes_its_part_with_it(redis: RedisServer) -> None:
    settings = replace(SETTINGS, lease=120)
    async with (
        reader(redis.url, settings) as load,
        routers(redis.url, {"a": 2}, {"a": 3}, settings=settings) as (first, _),
    ):
        await comes(load, {"a": 5, "b": 0})
        await first.publisher.close()
        await comes(load, {"a": 3, "b": 0})


async def test_without_any_router_the_load_is_not_known(redis: RedisServer) -> None:
    async with reader(redis.url) as load:
        assert await now(load) is None
        async with routers(redis.url, {"a": 2}) as (router,):
            await comes(load, {"a": 2, "b": 0})
            await router.die()
            await comes(load, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_redis_the_load_is_not_known_and_is_again_afterwards(
    redis: RedisServer, number: signal.Signals
) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}, {"a": 3}):
        await comes(load, {"a": 5, "b": 0})
        redis.signal(number)
        await comes(load, None)
        if number is signal.SIGKILL:
            redis.restart()
        else:
            redis.signal(signal.SIGCONT)
        seen = set()
        async with asyncio.timeout(10):
            while (known := await now(load)) != {"a": 5, "b": 0}:
                seen.add(None if known is None else known["a"])
                await asyncio.sleep(0.002)
        assert seen <= {None}, "a part of the sum is not the sum"


async def test_an_empty_redis_is_not_trusted_before_all_routers_could_publish(redis: RedisServer) -> None:
    settings = replace(SETTINGS, settle=120)
    async with reader(redis.url, settings) as load, routers(redis.url, {"a": 2}) as (_,):
        async with asyncio.timeout(10):
            while not await keys(redis):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.005)
        with pytest.raises(QuireError, match="only now being heard"):
            await load.read()


async def test_a_clock_that_goes_back_keeps_no_dead_router_and_the_load_is_soon_known_again(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}, {"a": 3}) as (first, _):
        await comes(load, {"a": 5, "b": 0})
        await first.die()
        await set_clock_back(redis, hours=1)
        await comes(load, None)
        await comes(load, {"a": 3, "b": 0})


async def set_clock_back(redis: RedisServer, hours: int) -> None:
    """As Redis sees it: all that was published is so much later."""
    later = hours * 3_600_000
    client = redis_client(redis.url, timeout=5)
    for router, until in await client.zrange(TOTALS_KEYS[0], 0, -1, withscores=True):
        await client.zadd(TOTALS_KEYS[0], {router: until + later})
    await client.incrby(TOTALS_KEYS[2], later)
    for key in TOTALS_KEYS:
        await client.pexpire(key, later)
    await client.aclose()


@pytest.mark.parametrize("lost", [TOTALS_KEYS, TOTALS_KEYS[:1]])
async def test_what_redis_lost_is_published_again_and_never_a_part_of_it(
    lost: tuple[str, ...], redis: RedisServer
) -> None:
    settled, calm = replace(SETTINGS, settle=0.6), replace(SETTINGS, heartbeat=0.3)
    async with (
        reader(redis.url, settled) as load,
        routers(redis.url, {"a": 2}),
        routers(redis.url, {"a": 3}, settings=calm),
    ):
        await comes(load, {"a": 5, "b": 0})
        client = redis_client(redis.url, timeout=5)
        await client.delete(*lost)
        await client.aclose()
        known = None
        async with asyncio.timeout(10):
            while known is None:
                await asyncio.sleep(2 * SETTINGS.age)
                known = await now(load)
        assert known == {"a": 5, "b": 0}


async def test_concurrent_readers_of_a_slow_redis_share_one_query(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}):
        await comes(load, {"a": 2, "b": 0})
        redis.signal(signal.SIGSTOP)
        await asyncio.sleep(2 * SETTINGS.age)
        async with asyncio.timeout(10):  # each with an answer of its own would take a minute
            assert await asyncio.gather(*(now(load) for _ in range(200))) == [None] * 200
        redis.signal(signal.SIGCONT)
        await comes(load, {"a": 2, "b": 0})


async def test_a_cancelled_reader_takes_the_result_from_no_other(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}):
        await comes(load, {"a": 2, "b": 0})
        for _ in range(50):
            gone, *others = [asyncio.create_task(now(load)) for _ in range(3)]
            await asyncio.sleep(0.0005)
            gone.cancel()
            assert await asyncio.gather(*others) == [{"a": 2, "b": 0}] * 2
            await asyncio.sleep(SETTINGS.age)


async def test_a_damaged_part_is_an_error_and_not_left_out(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, {"a": 2}):
        await comes(load, {"a": 2, "b": 0})
        client = redis_client(redis.url, timeout=5)
        await client.zadd(TOTALS_KEYS[0], {"x": 10**15})
        for damaged in (b"", b"[]", b'{"a":-1}', None):
            if damaged is not None:
                await client.hset(TOTALS_KEYS[1], "x", damaged)
            else:
                await client.hdel(TOTALS_KEYS[1], "x")
            await asyncio.sleep(2 * SETTINGS.age)
            with pytest.raises(QuireError, match="cannot be read"):
                await load.read()
        await client.aclose()


async def test_keys_of_dead_routers_are_deleted(redis: RedisServer) -> None:
    async with reader(redis.url) as load, routers(redis.url, *[{"a": 1}] * 20) as some:
        await comes(load, {"a": 20, "b": 0})
        for router in some[1:]:
            await router.die()
        await comes(load, {"a": 1, "b": 0})
        client = redis_client(redis.url, timeout=5)
        async with asyncio.timeout(10):
            while await client.hlen(TOTALS_KEYS[1]) > 1 or await client.zcard(TOTALS_KEYS[0]) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await client.aclose()
        await some[0].die()
        async with asyncio.timeout(10):
            while await keys(redis):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.005)


async def keys(redis: RedisServer) -> list[bytes]:
    client = redis_client(redis.url, timeout=5)
    found: list[bytes] = await client.keys("*")
    await client.aclose()
    return found


async def test_concurrent_readers_share_one_result_even_an_error(redis: RedisServer) -> None:
    settings = replace(SETTINGS, age=120)
    async with reader(redis.url, settings) as load, routers(redis.url, {"a": 2}) as (router,):
        await asyncio.sleep(0)
        first = await asyncio.gather(*(now(load) for _ in range(50)))
        assert len({json.dumps(each) for each in first}) == 1
        await asyncio.sleep(2 * SETTINGS.settle)
        router.set("a", 3)
        assert await now(load) == first[0]


async def test_without_redis_the_load_is_this_routers_own() -> None:
    assert await LocalLoad(MODELS, {"a": 3, "b": 0, "c": 4}.__getitem__).read() == {"a": 3, "b": 0}


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 2**31)))
def test_a_snapshot_is_read_as_it_was_written(snapshot: dict[str, int]) -> None:
    assert decode(encode(snapshot)) == {model: count for model, count in snapshot.items() if count}


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(
    st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 200_000) | st.none()
)
def test_whatever_the_bytes_are_a_part_is_counts_or_damaged(payload: bytes | None) -> None:
    try:
        snapshot = decode(payload)
    except InvalidSnapshotError:
        return
    assert all(type(count) is int and count >= 0 for count in snapshot.values())


def test_a_part_is_bounded() -> None:
    with pytest.raises(InvalidSnapshotError, match="too long"):
        decode(b" " * MAX_SNAPSHOT_BYTES + b"{}")
