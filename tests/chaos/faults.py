"""What goes wrong: each fault is one coroutine that does its harm and leaves everything to come back."""

import asyncio
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx
import psutil
from quire_proto.telemetry import Metric

from tests.chaos.stack import KEYS, MODEL, Part, Stack
from tests.support.processes import Router, fetch, metric

AnyPart = TypeVar("AnyPart", bound=Part[Any])
Fault = Callable[[Stack, random.Random, float], Awaitable[None]]
REDIS, ROUTER = "redis", "router"
WRITTEN_AGAIN = 4.0  # seconds in which routers find out that Redis was away, and tell it all again
NOTICED = 20.0  # seconds in which even slow routers find out that it is back
_QUIET = 3.0  # seconds after which nothing is on its way between routers and engines, no ping either
_MISSED = 30.0  # seconds in which even slow routers find out that idle engines do not answer, which takes 11
_ENDED = 120.0  # seconds in which all requests that clients started end
GIVEN_UP = 8.0  # seconds after which somebody else goes on with what a router had: its lease, and who looks for orphans


async def kill_engine(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGKILL of one engine."""
    await revive(stack, one(stack.engines, chance))


async def kill_router(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGKILL of one router."""
    await revive(stack, one(stack.routers, chance))


async def kill_redis(stack: Stack, _chance: random.Random, pause: float) -> None:
    """SIGKILL of Redis, which keeps its data."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            async with stack.dead_redis():
                await asyncio.sleep(min(1.0, pause))
            await known_to_routers(stack)


async def empty_redis(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGKILL of Redis, which comes back empty."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN, empty=True):
            async with stack.dead_redis():
                stack.redis.forget()
            await known_to_routers(stack)


async def stop_engine(stack: Stack, chance: random.Random, pause: float) -> None:
    """SIGSTOP of one engine for a while."""
    await _freeze(stack, one(stack.engines, chance), pause)


async def stop_router(stack: Stack, chance: random.Random, pause: float) -> None:
    """SIGSTOP of one router for a while."""
    await _freeze(stack, one(stack.routers, chance), pause)


async def stop_redis(stack: Stack, _chance: random.Random, pause: float) -> None:
    """SIGSTOP of Redis for a while."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            stack.redis.signal(signal.SIGSTOP)
            await asyncio.sleep(pause)
            stack.redis.signal(signal.SIGCONT)
            await known_to_routers(stack)


async def cut_connections(stack: Stack, chance: random.Random, _pause: float) -> None:
    """Every connection to one engine breaks."""
    chance.choice(stack.engines).proxy.cut()


async def drain_engine(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGTERM of one engine."""
    await _drain(stack, one(stack.engines, chance))


async def drain_router(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGTERM of one router."""
    await _drain(stack, one(stack.routers, chance))


async def kill_all_engines(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGKILL of all engines at once."""
    await asyncio.gather(*(revive(stack, engine) for engine in stack.engines))


async def stop_all_engines(stack: Stack, _chance: random.Random, pause: float) -> None:
    """SIGSTOP of all engines at once for a while."""
    await asyncio.gather(*(_freeze(stack, engine, pause) for engine in stack.engines))


async def drain_all_engines(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGTERM of all engines at once."""
    await asyncio.gather(*(_drain(stack, engine) for engine in stack.engines))


async def kill_all_routers(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGKILL of both routers at once: only Redis remembers."""
    await asyncio.gather(*(revive(stack, router) for router in stack.routers))


async def exhaust_descriptors(stack: Stack, chance: random.Random, pause: float) -> None:
    """One router, one engine that has just started, and Redis can open no file and take no connection for a while."""
    engine, router = one(stack.engines, chance), one(stack.routers, chance)
    async with stack.redis_lock, engine.lock, router.lock:
        engine.kill()
        engine.restart()
        await engine.ready()  # what it opens only when it is asked for something, it has yet to open
        await asyncio.to_thread(_wait_for_engines, stack, monotonic() + NOTICED)
        with stack.absent(REDIS, WRITTEN_AGAIN):
            with no_descriptors(engine.process.popen.pid, router.process.popen.pid, stack.redis.pid):
                await asyncio.gather(asyncio.sleep(pause), _ask_for_much(stack))
            await asyncio.gather(engine.ready(), router.ready())
            await known_to_routers(stack)


async def freeze_idle_engines(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGSTOP of all engines while no request runs, until ``/health`` and ``quire_engines_ready`` of routers tell."""
    async with _idle(stack):
        await asyncio.sleep(_QUIET)
        try:
            for engine in stack.engines:
                engine.signal(signal.SIGSTOP)
            await until(lambda: all(_misses_engines(router.process) for router in stack.routers), _MISSED)
        finally:
            for engine in stack.engines:
                engine.signal(signal.SIGCONT)
        await stack.ready()


FAULTS: tuple[Fault, ...] = (
    kill_engine, kill_router, cut_connections, drain_engine, drain_router, kill_redis, stop_engine, stop_router,
    stop_redis, kill_all_engines, stop_all_engines, drain_all_engines, kill_all_routers, empty_redis,
    exhaust_descriptors, freeze_idle_engines,
)  # fmt: skip


def one(parts: Sequence[AnyPart], chance: random.Random) -> AnyPart:
    """One of them, one that is well if there is such."""
    well = [part for part in parts if not part.lock.locked()]
    return chance.choice(well or list(parts))


async def revive(stack: Stack, part: Part[Any]) -> None:
    """SIGKILL, and started again; returns when it is ready."""
    async with part.lock:
        with missed(stack, part):
            part.kill()
            part.restart()
            await part.ready()


async def _drain(stack: Stack, part: Part[Any]) -> None:
    async with part.lock:
        with missed(stack, part):
            status = await part.terminate()
            assert status == 0, f"{part.name} ended with {status}:\n{part.process.text}"
            part.restart()
            await part.ready()


async def _freeze(stack: Stack, part: Part[Any], pause: float) -> None:
    async with part.lock:
        with missed(stack, part):
            part.signal(signal.SIGSTOP)
            await asyncio.sleep(pause)
            part.signal(signal.SIGCONT)
            await part.ready()


@contextmanager
def no_descriptors(*pids: int) -> Iterator[None]:
    """These processes and their children can open nothing within the block. What they have open stays so."""
    everyone = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)] + list(pids)
    kept = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in everyone}
    try:
        for pid, (_, hard) in kept.items():
            taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            free = next(number for number in range(hard) if number not in taken)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        yield
    finally:
        for pid, limits in kept.items():
            if psutil.pid_exists(pid):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@asynccontextmanager
async def _idle(stack: Stack) -> AsyncIterator[None]:
    """No client begins anything within the block, nothing runs, and no other fault meets an engine or a router."""
    async with AsyncExitStack() as locks:
        stack.admits.clear()
        try:
            for part in stack.parts:
                await locks.enter_async_context(part.lock)
            await until(lambda: not any(_runs_requests(router.process) for router in stack.routers), _ENDED)
            yield
        finally:
            stack.admits.set()


async def _ask_for_much(stack: Stack) -> None:
    """Asks for what an engine needs files and modules for. Raises ``AssertionError`` where an answer says that the
    client is wrong, or that something is.
    """
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 8}
    forms = [{"structured_outputs": {"regex": f"[a-z]{{{number}}}"}} for number in range(1, 7)]
    asked = [body | form for form in (*forms, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2})]
    headers = {"Authorization": f"Bearer {KEYS['house']}"}
    async with httpx.AsyncClient(timeout=30, headers=headers) as http:
        sent = (http.post(f"{url}/v1/completions", json=each) for url in stack.urls for each in asked)
        answers = await asyncio.gather(*sent, return_exceptions=True)
    refused = [each.text for each in answers if isinstance(each, httpx.Response) and each.status_code in (400, 500)]
    assert not refused, f"for want of descriptors: {refused[:2]}"


def _wait_for_engines(stack: Stack, deadline: float) -> None:
    """Waits until every router sees all of them, at most until ``deadline``: another fault may keep one away."""
    count = len(stack.engines)
    while monotonic() < deadline and any(ready_engines(router.process) != count for router in stack.routers):
        sleep(0.1)


def ready_engines(router: Router) -> float:
    return metric(router.metrics_port, Metric.ENGINES_READY)


async def until(holds: Callable[[], bool], seconds: float) -> None:
    """Raises ``AssertionError`` when that takes longer."""
    deadline = monotonic() + seconds
    while not await asyncio.to_thread(holds):
        assert monotonic() < deadline, f"not so after {seconds} s"
        await asyncio.sleep(0.2)


def _runs_requests(router: Router) -> bool:
    return metric(router.metrics_port, Metric.IN_FLIGHT) > 0


def _misses_engines(router: Router) -> bool:
    return fetch(router.metrics_port, "/health")[0] == 503 and ready_engines(router) == 0


async def known_to_routers(stack: Stack) -> None:
    """Waits until no router that answers says that it does not reach Redis; not for long, as it may be a slow one."""
    deadline = monotonic() + NOTICED
    await asyncio.gather(*(asyncio.to_thread(_wait_until_known, part.process, deadline) for part in stack.routers))


def _wait_until_known(router: Router, deadline: float) -> None:
    while monotonic() < deadline and _misses_redis(router):
        sleep(0.1)


def _misses_redis(router: Router) -> bool:
    return fetch(router.metrics_port, "/health")[0] != 0 and metric(router.metrics_port, Metric.JOURNAL_AVAILABLE) == 0


@contextmanager
def missed(stack: Stack, part: Part[Any]) -> Iterator[None]:
    """Notes that a router is away within the block. Engines are not missed."""
    with stack.absent(ROUTER, GIVEN_UP) if part in stack.routers else nullcontext():
        yield
