"""What else can be wrong with Redis than that it is away: it refuses, is slow, or comes back with older data."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.faults import REDIS, WRITTEN_AGAIN, Fault, known_to_routers
from tests.chaos.stack import Stack

_SLOW = 2000  # milliseconds
_LOOP = "while true do end"

Refusal = Callable[[Redis, float], Awaitable[None]]


async def refuse_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis answers, and does not do what it is told: it has no memory, is a replica, or busy with a script."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            async with Redis.from_url(stack.redis.url) as redis:
                await chance.choice(_REFUSALS)(redis, pause)
            await known_to_routers(stack)


async def slow_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis answers after two seconds, or writes so late while it reads at once; again and again."""
    everything = chance.random() < 0.5
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            end = monotonic() + pause
            async with Redis.from_url(stack.redis.url) as redis:
                while monotonic() < end:
                    await redis.client_pause(_SLOW, all=everything)
                    await asyncio.sleep(1.1 * _SLOW / 1000)
            await known_to_routers(stack)


async def rewind_redis(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGKILL of Redis, which comes back with what it had some time ago."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN, empty=True):
            stack.redis.kill()
            stack.redis.rewind(chance.uniform(0.5, 1.0))
            await asyncio.to_thread(stack.redis.start)
            await known_to_routers(stack)


async def _without_memory(redis: Redis, pause: float) -> None:
    await redis.config_set("maxmemory", 1)
    await asyncio.sleep(pause)
    await redis.config_set("maxmemory", 0)


async def _as_replica(redis: Redis, pause: float) -> None:
    await redis.replicaof("127.0.0.1", 1)
    await asyncio.sleep(pause)
    await redis.replicaof("NO", "ONE")


async def _busy(redis: Redis, pause: float) -> None:
    await redis.config_set("busy-reply-threshold", 100)
    looping = asyncio.create_task(_loop(redis))
    await asyncio.sleep(pause)
    await redis.script_kill()
    await looping


async def _loop(redis: Redis) -> None:
    with suppress(RedisError):
        await redis.eval(_LOOP, 0)


_REFUSALS: tuple[Refusal, ...] = (_without_memory, _as_replica, _busy)
REDIS_FAULTS: tuple[Fault, ...] = (refuse_redis, slow_redis, rewind_redis)
