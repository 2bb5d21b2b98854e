"""What is left of requests is found, in Redis and in the metrics of routers and engines."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from quire_proto.telemetry import Metric
from redis.asyncio import Redis

from tests.chaos.leftovers import Samples, leftovers, of_engine, of_router
from tests.chaos.stack import Stack
from tests.support.redis_server import RedisServer, redis_server

RECORD, TOKENS, RUNNING = "quire:{a}:record", "quire:{a}:tokens", "quire:limits:{t:guests}:running"


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    with redis_server() as server:
        yield Stack(server, server, [], [])


async def put(server: RedisServer, left: dict[str, Any]) -> None:
    """Writes each of these keys; numbers in them are seconds from now."""
    async with Redis.from_url(server.url) as redis:
        now, _ = await redis.time()
        for key, value in left.items():
            if key == RECORD:
                times = {name: (now + each) * 1000 for name, each in value.items() if not isinstance(each, str)}
                await redis.hset(key, mapping=value | times)
            elif isinstance(value, dict):
                await redis.zadd(key, {name: (now + each) * 1_000_000 for name, each in value.items()})
            else:
                await redis.set(key, value)


@pytest.mark.parametrize(
    "left",
    [
        {RECORD: {"epoch": "1", "lease_expires": 9}},
        {TOKENS: "x"},
        {"quire:background": {"a": -5}},
        {RUNNING: {"a": 60}},
    ],
)
async def test_leftovers_in_redis_are_found(stack: Stack, left: dict[str, Any]) -> None:
    await put(stack.redis, left)
    assert len(await leftovers(stack, patience=0.0)) == 1


async def test_finished_requests_are_no_leftovers(stack: Stack) -> None:
    ended = {"epoch": "1", "reason": "stop", "lease_expires": 60}
    await put(stack.redis, {RECORD: ended, TOKENS: "x", RUNNING: {"a": -5}})
    assert await leftovers(stack, patience=0.0) == []


async def test_a_lease_of_a_former_clock_is_none(stack: Stack) -> None:
    await put(stack.redis, {RECORD: {"epoch": "1", "lease_expires": 300}})
    assert await leftovers(stack, patience=0.0) == []


async def test_keys_that_expire_in_time_are_no_leftovers(stack: Stack) -> None:
    await put(stack.redis, {RECORD: {"epoch": "1", "lease_expires": 2}})
    assert await leftovers(stack, patience=60.0) == []


ROUTER: Samples = {Metric.ENGINES_READY: {"m": 3.0}, Metric.JOURNAL_AVAILABLE: {"": 1.0}, Metric.IN_FLIGHT: {"m": 0.0}}
ENGINE: Samples = {Metric.ENGINE_BLOCKS_TOTAL: {"device": 8.0}, Metric.ENGINE_BLOCKS_FREE: {"device": 8.0}}


@pytest.mark.parametrize(
    "more",
    [
        {Metric.IN_FLIGHT: {"m": 1.0}},
        {Metric.PARKED: {"m": 1.0}},
        {Metric.JOURNAL_PENDING: {"": 1.0}},
        {Metric.ENGINES_READY: {"m": 2.0}},
        {Metric.JOURNAL_AVAILABLE: {"": 0.0}},
    ],
)
def test_leftovers_of_a_router_are_found(more: Samples) -> None:
    assert list(of_router("router", ROUTER, 3)) == []
    assert len(list(of_router("router", ROUTER | more, 3))) == 1
    assert len(list(of_router("router", None, 3))) == 1


@pytest.mark.parametrize(
    "more",
    [
        {Metric.ENGINE_RUNNING: {"m": 1.0}},
        {Metric.ENGINE_WAITING: {"m": 1.0}},
        {Metric.ENGINE_SWAPPED: {"m": 1.0}},
        {Metric.ENGINE_UNREACHABLE_BLOCKS: {"m": 1.0}},
        {Metric.ENGINE_BLOCKS_FREE: {"device": 7.0}},
    ],
)
def test_leftovers_of_an_engine_are_found(more: Samples) -> None:
    assert list(of_engine("engine", ENGINE)) == []
    assert len(list(of_engine("engine", ENGINE | more))) == 1
    assert len(list(of_engine("engine", None))) == 1
