"""Half-open connections: nothing closes them, and in one direction or in both what is sent is lost, or waits."""

import random
from asyncio import sleep
from collections.abc import Sequence

from tests.chaos.faults import REDIS, WRITTEN_AGAIN, Fault, known_to_routers, one
from tests.chaos.proxy import DOWN, UP, Proxy
from tests.chaos.stack import Stack

_Broken = tuple[Sequence[str], bool]
_UP: _Broken = (UP,), True
_DOWN: _Broken = (DOWN,), True
_BOTH: _Broken = (UP, DOWN), True
_WAITING: _Broken = (UP, DOWN), False


async def half_open_engine_up(stack: Stack, chance: random.Random, pause: float) -> None:
    """One engine hears nothing more from routers, while they hear it."""
    await _break_engine(stack, chance, pause, _UP)


async def half_open_engine_down(stack: Stack, chance: random.Random, pause: float) -> None:
    """Routers hear nothing more from one engine, while it hears them."""
    await _break_engine(stack, chance, pause, _DOWN)


async def half_open_engine_both(stack: Stack, chance: random.Random, pause: float) -> None:
    """One engine and the routers hear nothing more of each other."""
    await _break_engine(stack, chance, pause, _BOTH)


async def stall_engine(stack: Stack, chance: random.Random, pause: float) -> None:
    """Messages between one engine and the routers are delayed."""
    await _break_engine(stack, chance, pause, _WAITING)


async def half_open_redis_up(stack: Stack, _chance: random.Random, pause: float) -> None:
    """Redis hears nothing more from routers, which are still connected."""
    await _break_redis(stack, pause, _UP)


async def half_open_redis_down(stack: Stack, _chance: random.Random, pause: float) -> None:
    """Redis does what routers say, who hear nothing of it."""
    await _break_redis(stack, pause, _DOWN)


async def half_open_redis_both(stack: Stack, _chance: random.Random, pause: float) -> None:
    """Redis and the routers hear nothing more of each other."""
    await _break_redis(stack, pause, _BOTH)


async def stall_redis(stack: Stack, _chance: random.Random, pause: float) -> None:
    """Messages between Redis and the routers are delayed."""
    await _break_redis(stack, pause, _WAITING)


NETWORK_FAULTS: tuple[Fault, ...] = (
    half_open_engine_up, half_open_engine_down, half_open_engine_both, stall_engine,
    half_open_redis_up, half_open_redis_down, half_open_redis_both, stall_redis,
)  # fmt: skip


async def _break_engine(stack: Stack, chance: random.Random, pause: float, broken: _Broken) -> None:
    engine = one(stack.engines, chance)
    async with engine.lock:
        await _break(engine.proxy, pause, broken)
        await engine.ready()


async def _break_redis(stack: Stack, pause: float, broken: _Broken) -> None:
    assert stack.redis_proxy is not None
    async with stack.redis_lock:
        with stack.absent(REDIS, WRITTEN_AGAIN):
            await _break(stack.redis_proxy, pause, broken)
            await known_to_routers(stack)


async def _break(proxy: Proxy, pause: float, broken: _Broken) -> None:
    directions, loses = broken
    proxy.break_silently(directions, loses=loses)
    try:
        await sleep(pause)
    finally:
        proxy.heal()
