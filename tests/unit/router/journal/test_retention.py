"""How long a record is kept: the retention of its request counts, whichever router ends it and however."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from quire_proto.sampling import FinishReason
from quire_router.journal.base import Lease
from quire_router.journal.codec import MIN_RETENTION, MIN_RUNNING_TTL, JournalSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.support.journals import append_tokens
from tests.support.redis_journals import flushed, journal_at, redis_at, small_request, taken
from tests.support.redis_server import RedisServer, redis_server

SETTINGS = JournalSettings(settle=0, retention=3600)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with redis_at(server) as client:
        await client.flushall()
        yield client


async def most_kept(redis: Redis) -> int:
    """For how many seconds the keys of the one request are kept."""
    times = [await redis.ttl(key) for key in keys("r") if await redis.exists(key)]
    assert -1 not in times
    return max(times, default=0)


async def finished(journal: RedisJournal, other: RedisJournal, lease: Lease) -> None:
    journal.finish(lease, FinishReason.STOP)
    await flushed(journal)


async def finished_by_another(journal: RedisJournal, other: RedisJournal, lease: Lease) -> None:
    journal.release(lease)
    await flushed(journal)
    other.finish((await taken(other, "r"))[1], FinishReason.STOP)
    await flushed(other)


async def cancelled_by_another(journal: RedisJournal, other: RedisJournal, lease: Lease) -> None:
    journal.release(lease)
    await flushed(journal)
    assert await other.cancel("r")


async def released(journal: RedisJournal, other: RedisJournal, lease: Lease) -> None:
    journal.release(lease)
    await flushed(journal)


ENDS = [finished, finished_by_another, cancelled_by_another, released]
End = Callable[[RedisJournal, RedisJournal, Lease], Awaitable[None]]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("retention", "expected"), [(None, 3600), (0, MIN_RETENTION), (90_000.0, 90_000)])
async def test_a_record_has_its_requests_retention_whichever_router_ends_it(
    server: RedisServer, redis: Redis, retention: float | None, expected: int, end: End
) -> None:
    async with journal_at(server, settings=SETTINGS) as journal, journal_at(server, "you", settings=SETTINGS) as other:
        lease = journal.open(replace(small_request(), retention=retention))
        append_tokens(journal, lease, 0, [1, 2])
        await flushed(journal)
        await end(journal, other, lease)
        assert expected - 300 < await most_kept(redis) <= expected


async def test_a_record_without_retention_soon_expires_after_its_router_died(server: RedisServer, redis: Redis) -> None:
    async with journal_at(server, settings=SETTINGS) as journal:
        append_tokens(journal, journal.open(replace(small_request(), retention=0)), 0, [1])
        await flushed(journal)
        assert await most_kept(redis) <= MIN_RUNNING_TTL


async def test_a_request_keeps_its_retention_where_another_router_writes_it_again(
    server: RedisServer, redis: Redis
) -> None:
    """Also where Redis has lost what it had."""
    async with journal_at(server, settings=SETTINGS) as journal, journal_at(server, "you", settings=SETTINGS) as other:
        journal.release(journal.open(replace(small_request(), retention=0)))
        await flushed(journal)
        _, lease = await taken(other, "r")
        await redis.flushall()
        append_tokens(other, lease, 0, [1])
        await flushed(other)
        assert await redis.exists(keys("r")[0])
        other.finish(lease, FinishReason.STOP)
        await flushed(other)
        assert await most_kept(redis) <= MIN_RETENTION


@pytest.mark.parametrize("damage", [b"", b"-1", b"x", b"9" * 30, b"1e9"])
async def test_a_retention_that_is_no_number_counts_as_none(server: RedisServer, redis: Redis, damage: bytes) -> None:
    async with journal_at(server, settings=SETTINGS) as journal:
        lease = journal.open(replace(small_request(), retention=0))
        await flushed(journal)
        await redis.hset(keys("r")[0], "retention", damage)
        record = await journal.read("r")
        assert record is not None
        assert record.generation == small_request()
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        assert await redis.hget(keys("r")[0], "reason") == b"stop"


async def test_memory_forgets_each_record_when_its_own_time_is_over() -> None:
    now = [0.0]
    journal = MemoryJournal(retention=100.0, clock=lambda: now[0])
    times = {"late": 1000.0, "usual": None, "soon": 0}
    for name, retention in times.items():
        journal.finish(journal.open(replace(small_request(name), retention=retention)), FinishReason.STOP)
    for at, left in ((9.0, {"usual", "soon", "late"}), (10.0, {"usual", "late"}), (100.0, {"late"}), (1000.0, set())):
        now[0] = at
        assert {name for name in times if await journal.read(name) is not None} == left
