"""What goes wrong: each fault is one coroutine that does its harm and leaves everything to come back."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import monotonic, sleep
from typing import Any, TypeVar

from quire_proto.telemetry import Metric

from tests.chaos.stack import Part, Stack
from tests.support.processes import Router, fetch, metric

AnyPart = TypeVar("AnyPart", bound=Part[Any])
Fault = Callable[[Stack, random.Random, float], Awaitable[None]]
REDIS, ROUTER = "redis", "router"
WRITTEN_AGAIN = 4.0  # seconds in which routers find out that Redis was away, and tell it all again
NOTICED = 20.0  # seconds in which even slow routers find out that it is back
GIVEN_UP = 8.0  # seconds after which somebody else goes on with what a router had: its lease, and who looks for orphans


async def kill_engine(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGKILL of one engine."""
    await _revive(stack, one(stack.engines, chance))


async def kill_router(stack: Stack, chance: random.Random, _pause: float) -> None:
    """SIGKILL of one router."""
    await _revive(stack, one(stack.routers, chance))


async def kill_redis(stack: Stack, _chance: random.Random, pause: float) -> None:
    """SIGKILL of Redis, which keeps its data."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            stack.redis.kill()
            await asyncio.sleep(min(1.0, pause))
            await asyncio.to_thread(stack.redis.start)
            await known_to_routers(stack)


async def empty_redis(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGKILL of Redis, which comes back empty."""
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN, empty=True):
            stack.redis.kill()
            stack.redis.forget()
            await asyncio.to_thread(stack.redis.start)
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
    await asyncio.gather(*(_revive(stack, engine) for engine in stack.engines))


async def stop_all_engines(stack: Stack, _chance: random.Random, pause: float) -> None:
    """SIGSTOP of all engines at once for a while."""
    await asyncio.gather(*(_freeze(stack, engine, pause) for engine in stack.engines))


async def drain_all_engines(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGTERM of all engines at once."""
    await asyncio.gather(*(_drain(stack, engine) for engine in stack.engines))


async def kill_all_routers(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """SIGKILL of both routers at once: only Redis remembers."""
    await asyncio.gather(*(_revive(stack, router) for router in stack.routers))


FAULTS: tuple[Fault, ...] = (
    kill_engine, kill_router, cut_connections, drain_engine, drain_router, kill_redis, stop_engine, stop_router,
    stop_redis, kill_all_engines, stop_all_engines, drain_all_engines, kill_all_routers, empty_redis,
)  # fmt: skip


def one(parts: Sequence[AnyPart], chance: random.Random) -> AnyPart:
    """One of them, one that is well if there is such."""
    well = [part for part in parts if not part.lock.locked()]
    return chance.choice(well or list(parts))


async def _revive(stack: Stack, part: Part[Any]) -> None:
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
