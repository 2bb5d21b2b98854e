"""Journals on a real Redis, and what tests do there behind their backs."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from zlib import crc32

from prometheus_client import REGISTRY
from quire_proto.sampling import SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import Lease, RequestRecord
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import BACKGROUND, RedisHealth, keys
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.redis.store import RedisStore
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.support.redis_server import RedisServer


@asynccontextmanager
async def journal_at(server: RedisServer, owner: str = "me", **options: Any) -> AsyncIterator[RedisJournal]:
    """One that does not wait for what others might have held when the server started, unless it is told to."""
    options.setdefault("settings", JournalSettings(settle=0))
    journal = RedisJournal(server.url, owner=owner, **options)
    try:
        yield journal
    finally:
        await journal.close()


@asynccontextmanager
async def redis_at(server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url)
    try:
        yield client
    finally:
        await client.aclose()


def small_request(request_id: str = "r", prompt: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3), created=5.0
    )


async def flushed(journal: RedisJournal) -> None:
    await asyncio.wait_for(journal.flush(), 15)


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0


async def taken(journal: RedisJournal, request_id: str) -> tuple[RequestRecord, Lease]:
    """What was claimed."""
    claimed = await journal.claim(request_id)
    assert claimed is not None
    return claimed


async def expire(server: RedisServer, request_id: str) -> None:
    """As if the lease had not been renewed for long."""
    async with redis_at(server) as redis:
        assert await redis.hset(keys(request_id)[0], "lease_expires", 1) == 0


@asynccontextmanager
async def store_at(server: RedisServer) -> AsyncIterator[RedisStore]:
    settings = JournalSettings()
    async with redis_at(server) as client:
        yield RedisStore(client, settings, RedisHealth(client, settings.settle))


async def store_row(redis: Redis, request_id: str, row: bytes) -> None:
    """As if a record's writer had written this row."""
    record, tokens = keys(request_id)
    await redis.set(tokens, row)
    await redis.hset(record, "sum", crc32(row))


@asynccontextmanager
async def out_of_memory(redis: Redis) -> AsyncIterator[None]:
    """Redis refuses what may need memory, and carries out the rest, for the length of a block."""
    await redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@asynccontextmanager
async def busy_with_a_script(redis: Redis) -> AsyncIterator[None]:
    """Redis refuses every command as it is busy, for the length of a block, which is some minutes at most."""
    await redis.config_set("busy-reply-threshold", 1)
    script = asyncio.create_task(redis.eval("for _ = 1, 1e10 do end", 0))
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        await redis.script_kill()
        with suppress(ResponseError):
            await script
        await redis.config_set("busy-reply-threshold", 5000)


async def turn_clock_back(server: RedisServer, seconds: float) -> None:
    """As if the clock of Redis' machine had gone back: every moment that is written down is so much further ahead."""
    milliseconds = round(seconds * 1000)
    async with redis_at(server) as redis:
        async for record in redis.scan_iter("quire:*:record"):
            if await redis.hexists(record, "lease_expires"):
                await redis.hincrby(record, "lease_expires", milliseconds)
        for name in await redis.zrange(BACKGROUND, 0, -1):
            await redis.zincrby(BACKGROUND, milliseconds, name)
