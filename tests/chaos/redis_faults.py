"""What else can be wrong with Redis than that it is away: it refuses, forgets scripts, is slow, comes back with older
data, or its clock goes back.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.faults import REDIS, WRITTEN_AGAIN, Fault, known_to_routers, one, revive
from tests.chaos.stack import KEYS, MODEL, Part, Stack
from tests.support.processes import Router

_SLOW = 2000  # milliseconds
_LOOP = "while true do end"
_BEGUN, _GROWTH = 6, 50  # background requests, and by how many tokens each is longer than the one before
_ENDED = 120.0  # seconds in which a request ends whose router died
_NOT_WRITTEN = "x-quire-journal"  # the header of an answer that may not survive its router
_BACK = (20, 600)  # seconds, at least and at most, that a clock goes back

NO_CLOCK = "no C compiler makes a clock that can be set"
Refusal = Callable[[Redis, float], Awaitable[None]]


async def refuse_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis answers and refuses writes: it is out of memory, a replica, or busy with a script."""
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
            async with stack.dead_redis():
                stack.redis.rewind(chance.uniform(0.5, 1.0))
            await known_to_routers(stack)


async def full_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis is out of memory while background requests begin and others end. Their router dies before it has memory
    again; yet no one is left that runs for ever.
    """
    router = one(stack.routers, chance)
    async with stack.redis_lock, Redis.from_url(stack.redis.url) as redis:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            started = await _begin(router)
            await redis.config_set("maxmemory", 1)
            try:
                started |= await _begin(router)
                await asyncio.sleep(pause)
                await revive(stack, router)
            finally:
                await redis.config_set("maxmemory", 0)
            await known_to_routers(stack)
        await _expect_ends(stack, started)


async def forget_scripts(stack: Stack, chance: random.Random, pause: float) -> None:
    """SCRIPT FLUSH, again and again without a rest, while background requests begin and end, and their router dies."""
    router = one(stack.routers, chance)
    async with stack.redis_lock, Redis.from_url(stack.redis.url) as redis:
        over = asyncio.Event()
        flushing = asyncio.create_task(_flush_scripts(redis, over))
        try:
            started = await _begin(router)
            await asyncio.sleep(min(2.0, pause))
            started |= await _begin(router)
            await revive(stack, router)
        finally:
            over.set()
            await flushing
        await _expect_ends(stack, started)


async def set_back_redis(stack: Stack, chance: random.Random, _pause: float) -> None:
    """The clock of Redis goes back, by up to ten minutes, and stays so. A router dies."""
    assert stack.redis.clock is not None, NO_CLOCK
    async with stack.redis_lock:
        stack.redis.clock.move(-chance.randint(*_BACK))
        router = one(stack.routers, chance)
        started = await _begin(router)
        await revive(stack, router)
        await _expect_ends(stack, started)


async def _begin(router: Part[Router]) -> dict[str, bool]:
    """Begins background requests at a router, each longer than the one before; whether it is written down, by id."""
    body = {"model": MODEL, "prompt": "Once", "ignore_eos": True, "background": True}
    headers = {"Authorization": f"Bearer {KEYS['house']}"}
    async with httpx.AsyncClient(timeout=10) as http:
        url, lengths = f"{router.process.url}/v1/completions", range(_GROWTH, _GROWTH * (_BEGUN + 1), _GROWTH)
        asked = (http.post(url, json=body | {"max_tokens": length}, headers=headers) for length in lengths)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    taken = [answer for answer in answers if isinstance(answer, httpx.Response) and answer.status_code == 202]
    return {answer.json()["id"]: _NOT_WRITTEN not in answer.headers for answer in taken}


async def _expect_ends(stack: Stack, started: dict[str, bool]) -> None:
    """Raises ``AssertionError`` unless each completes, or is unknown and was never reported as durable. Does not
    ask routers before it has ended: they take up what is asked for, and have to do so unasked.
    """
    deadline = monotonic() + _ENDED
    async with Redis.from_url(stack.redis.url) as redis:
        for request_id in started:
            while not await _has_ended(redis, request_id):
                assert monotonic() < deadline, f"background request {request_id} does not end"
                await asyncio.sleep(0.2)
    async with httpx.AsyncClient(timeout=5, headers={"Authorization": f"Bearer {KEYS['house']}"}) as http:
        for request_id, is_written in started.items():
            while (status := await _status(stack, http, request_id)) not in ("completed", "unknown"):
                assert monotonic() < deadline, f"background request {request_id} is still {status}"
                await asyncio.sleep(0.2)
            assert status == "completed" or not is_written, f"background request {request_id} is {status}"


async def _has_ended(redis: Redis, request_id: str) -> bool:
    """Whether Redis has its end, or nothing of it."""
    record = f"quire:{{{request_id}}}:record"
    return not await redis.exists(record) or bool(await redis.hexists(record, "reason"))


async def _status(stack: Stack, http: httpx.AsyncClient, request_id: str) -> str:
    """As the last router says; any failure is one that may pass."""
    with suppress(httpx.HTTPError):
        answer = await http.get(f"{stack.urls[-1]}/v1/requests/{request_id}")
        if answer.status_code == 200:
            return str(answer.json()["status"])
        return "unknown" if answer.status_code == 404 else str(answer.status_code)
    return "out of reach"


async def _flush_scripts(redis: Redis, over: asyncio.Event) -> None:
    while not over.is_set():
        await redis.script_flush()


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
REDIS_FAULTS: tuple[Fault, ...] = (
    refuse_redis, slow_redis, rewind_redis, full_redis, forget_scripts, set_back_redis,
)  # fmt: skip
