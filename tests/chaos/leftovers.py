"""What is there when all clients have gone and all is well again: nothing of any request may be."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from quire_proto.telemetry import Metric
from quire_router.journal.codec import MAX_LEASE
from redis.asyncio import Redis

from tests.chaos.stack import Stack
from tests.support.processes import fetch

PATIENCE = 90.0  # seconds: three times as long as the place of a request whose router died is kept
_LOOK = 0.5
_ROUTER_IDLE = (Metric.IN_FLIGHT, Metric.PARKED, Metric.JOURNAL_PENDING)
_ENGINE_IDLE = (
    Metric.ENGINE_RUNNING, Metric.ENGINE_WAITING, Metric.ENGINE_SWAPPED, Metric.ENGINE_UNREACHABLE_BLOCKS,
)  # fmt: skip


async def leftovers(stack: Stack, patience: float = PATIENCE) -> list[str]:
    """What is still left after ``patience`` seconds, one sentence each."""
    deadline = monotonic() + patience
    while True:
        left = await _look(stack)
        if not left or monotonic() > deadline:
            return left
        await asyncio.sleep(_LOOK)


async def _look(stack: Stack) -> list[str]:
    async with Redis.from_url(stack.redis.url) as redis:
        found = [each async for each in _in_redis(redis)]
    ports = {router.name: router.process.metrics_port for router in stack.routers}
    for name, port in ports.items():
        found += of_router(name, await _samples(port), len(stack.engines))
    for engine in stack.engines:
        found += of_engine(engine.name, await _samples(engine.process.metrics_port))
    return found


async def _in_redis(redis: Redis) -> AsyncIterator[str]:
    seconds, micros = await redis.time()
    now = seconds * 1000 + micros // 1000
    async for key in redis.scan_iter("quire:{*}:record", count=1000):
        reason, expires = await redis.hmget(key, "reason", "lease_expires")
        if (
            reason is None and 0 < int(expires or 0) - now <= MAX_LEASE
        ):  # a longer one was given before the clock went back
            yield f"{key.decode()} is held"
    async for key in redis.scan_iter("quire:{*}:tokens", count=1000):
        if not await redis.exists(key.removesuffix(b"tokens") + b"record"):
            yield f"{key.decode()} has no record"
    batches: Any = await redis.zrange("quire:collection:batches", 0, -1)
    for batch_id in batches:
        yield f"{batch_id.decode()} is among the batches that have not ended"
    background: Any = await redis.zrange("quire:background", 0, -1)
    for request_id in background:
        yield f"{request_id.decode()} is in the index of background requests that have not ended"
    async for key in redis.scan_iter("quire:limits:*:running", count=1000):
        running: Any = await redis.zrangebyscore(key, now * 1000, "+inf")
        for request_id in running:
            yield f"{request_id.decode()} has a place in {key.decode()}"


Samples = dict[str, dict[str, float]]


def of_router(name: str, samples: Samples | None, engines: int) -> Iterator[str]:
    """What a router has left, by its metrics."""
    if samples is None:
        yield f"{name} serves no metrics"
        return
    for metric in _ROUTER_IDLE:
        if total := sum(samples.get(metric, {}).values()):
            yield f"{name}: {metric} is {total}"
    if sum(samples.get(Metric.ENGINES_READY, {}).values()) != engines:
        yield f"{name} knows of {samples.get(Metric.ENGINES_READY)}, not of {engines} engines"
    if sum(samples.get(Metric.JOURNAL_AVAILABLE, {}).values()) != 1:
        yield f"{name} does not reach Redis"


def of_engine(name: str, samples: Samples | None) -> Iterator[str]:
    """What an engine has left, by its metrics."""
    if samples is None:
        yield f"{name} serves no metrics"
        return
    for metric in _ENGINE_IDLE:
        if total := sum(samples.get(metric, {}).values()):
            yield f"{name}: {metric} is {total}"
    blocks, free = samples.get(Metric.ENGINE_BLOCKS_TOTAL, {}), samples.get(Metric.ENGINE_BLOCKS_FREE, {})
    if blocks != free:
        yield f"{name} has {blocks} blocks, of which {free} are free"


async def _samples(port: int) -> Samples | None:
    """Each metric's samples by their labels; None when the port does not answer."""
    status, text = await asyncio.to_thread(fetch, port, "/metrics")
    if status != 200:
        return None
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[str(sorted(sample.labels.items()))] = sample.value
    return samples
