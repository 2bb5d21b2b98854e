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

from tests.chaos.faults import NOTICED, REDIS, WRITTEN_AGAIN, Fault, known_to_routers, one, revive
from tests.chaos.stack import FEW, KEYS, MODEL, Part, Stack
from tests.support.processes import Router

_SLOW = 2000  # milliseconds
_LOOP = "while true do end"
_BEGUN, _GROWTH = 6, 50  # background requests, and by how many tokens each is longer than the one before
_OWN_PATIENCE = 60.0  # seconds
_ENDED = 120.0  # seconds in which a request ends whose router died, or gets another token: it gives way to all others
_NOT_WRITTEN = "x-quire-journal"  # the header of an answer that may not survive its router
_BACK = (20, 600)  # seconds, at least and at most, that a clock goes back

NO_CLOCK = "no C compiler makes a clock that can be set"
Refusal = Callable[[Redis, float], Awaitable[None]]


def _client(url: str) -> Redis:
    """A client of a fault's own, which waits for a slow Redis: on a busy machine a pause outlasts what Redis was
    asked for.
    """
    return Redis.from_url(url, socket_connect_timeout=_OWN_PATIENCE, socket_timeout=_OWN_PATIENCE)


async def refuse_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis answers and refuses writes: it is out of memory, a replica, or busy with a script."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            async with _client(stack.redis.url) as redis:
                await chance.choice(_REFUSALS)(redis, pause)
            await known_to_routers(stack)


async def slow_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis answers after two seconds, or writes so late while it reads at once; again and again."""
    everything = chance.random() < 0.5
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            end = monotonic() + pause
            async with _client(stack.redis.url) as redis:
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
    async with stack.redis_lock, _client(stack.redis.url) as redis:
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
    async with stack.redis_lock, _client(stack.redis.url) as redis:
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
    """The clock of Redis goes back, by up to ten minutes, and stays so: whoever has limits has them as before. A router
    dies.
    """
    assert stack.redis.clock is not None, NO_CLOCK
    async with stack.redis_lock:
        router = one(stack.routers, chance)
        await _serve_few(router)
        stack.redis.clock.move(-chance.randint(*_BACK))
        await _serve_few(router)
        started = await _begin(router)
        await revive(stack, router)
        await _expect_ends(stack, started)


async def failover_redis(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """Another server becomes the primary, and its address that of Redis. The former one lives on as its replica, and
    closes no connection.
    """
    assert stack.redis_proxy is not None
    async with stack.redis_lock:
        former, latter = stack.redis, stack.standby  # not before: another failover may have had the lock
        if not latter.is_running:
            await asyncio.to_thread(latter.start)
        async with _client(former.url) as old, _client(latter.url) as new:
            await new.replicaof("127.0.0.1", former.port)
            await _until(lambda: _follows(new), "the standby does not follow its primary")
            await _until(lambda: _is_followed(old), "the primary does not know its standby yet")
            with stack.absent(REDIS, WRITTEN_AGAIN):
                await old.execute_command("FAILOVER", "TO", "127.0.0.1", latter.port, "TIMEOUT", 5000)
                await _until(lambda: _follows(old), "the former primary does not follow the new one")
                stack.redis_proxy.target = latter.port
                stack.redis, stack.standby = latter, former
                await known_to_routers(stack)
            await _until(lambda: _is_left(old), "routers still listen at the former primary")


async def cut_idle_redis(stack: Stack, chance: random.Random, pause: float) -> None:
    """Redis closes connections that were idle for a second. Requests after that are written as if it did not."""
    router = one(stack.routers, chance)
    async with stack.redis_lock, router.lock:
        await _close_idle(stack, 1)
        started = dict[str, bool]()
        try:
            for _ in range(2):
                await asyncio.sleep(max(2.5, pause / 2))
                started |= await _begin(router)
        finally:
            await _close_idle(stack, 0)
        unwritten = [request_id for request_id, is_written in started.items() if not is_written]
        assert not unwritten, f"requests that were not written: {unwritten}"
        await _expect_ends(stack, started)


async def _close_idle(stack: Stack, seconds: int) -> None:
    """Over a connection of its own, which would be closed, too."""
    async with _client(stack.redis.url) as redis:
        await redis.config_set("timeout", seconds)


async def _follows(redis: Redis) -> bool:
    """Whether it is a replica that has all that its primary had."""
    state = await redis.info("replication")
    return state["role"] == "slave" and state["master_link_status"] == "up"


async def _is_followed(redis: Redis) -> bool:
    """Whether it is a primary that counts its replica as one that could take over."""
    state = await redis.info("replication")
    return any(state.get(f"slave{number}", {}).get("state") == "online" for number in range(2))


async def _is_left(redis: Redis) -> bool:
    """Whether nobody listens there any more."""
    return not await redis.client_list(_type="pubsub")


async def _until(holds: Callable[[], Awaitable[bool]], problem: str) -> None:
    """Raises ``AssertionError`` when that takes longer than it may."""
    deadline = monotonic() + NOTICED
    while not await holds():
        assert monotonic() < deadline, problem
        await asyncio.sleep(0.1)


async def _serve_few(router: Part[Router]) -> None:
    """A tenant who asks seldom is served, where the router is there."""
    body, headers = {"model": MODEL, "prompt": "Once", "max_tokens": 1}, {"Authorization": f"Bearer {FEW}"}
    async with httpx.AsyncClient(timeout=30) as http:
        for _ in range(3):
            with suppress(httpx.TransportError):
                answer = await http.post(f"{router.process.url}/v1/completions", json=body, headers=headers)
                assert answer.status_code != 429, f"a tenant within its limits is refused: {answer.text}"


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
    async with _client(stack.redis.url) as redis:
        for request_id in started:
            await _expect_end(redis, request_id)
    deadline = monotonic() + _ENDED
    async with httpx.AsyncClient(timeout=5, headers={"Authorization": f"Bearer {KEYS['house']}"}) as http:
        for request_id, is_written in started.items():
            while (status := await _status(stack, http, request_id)) not in ("completed", "unknown"):
                assert monotonic() < deadline, f"background request {request_id} is still {status}"
                await asyncio.sleep(0.2)
            assert status == "completed" or not is_written, f"background request {request_id} is {status}"


async def _expect_end(redis: Redis, request_id: str) -> None:
    """Returns once Redis has its end, or nothing of it. Raises ``AssertionError`` when it stands still."""
    record, told, deadline = f"quire:{{{request_id}}}:record", None, 0.0
    while await redis.exists(record) and not await redis.hexists(record, "reason"):
        if (now := await redis.hget(record, "told")) != told or not deadline:
            told, deadline = now, monotonic() + _ENDED
        assert monotonic() < deadline, await _unended(redis, request_id)
        await asyncio.sleep(0.2)


async def _unended(redis: Redis, request_id: str) -> str:
    """What Redis knows of a request that does not end, but for its prompt."""
    now, record = await redis.time(), await redis.hgetall(f"quire:{{{request_id}}}:record")
    known = {name.decode(): value for name, value in record.items() if name not in (b"request", b"prompt")}
    return f"background request {request_id} does not end: {known}, by a clock of {now}"


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
    refuse_redis, slow_redis, rewind_redis, full_redis, forget_scripts, set_back_redis, failover_redis, cut_idle_redis,
)  # fmt: skip
