"""What has ended has ended: who reads a record after its end was announced sees that, whether or not it is written."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from quire_proto.sampling import FinishReason
from quire_router.core.generation import Usage
from quire_router.journal.base import Lease, RequestRecord, unrecorded
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.chaos.proxy import DOWN, UP, Proxy
from tests.support.journal_kinds import ALONE, KINDS, AnyJournal, Databases, journal_of
from tests.support.journals import append_tokens
from tests.support.ports import free_port
from tests.support.redis_journals import expire, flushed, journal_at, redis_at, small_request, taken
from tests.support.redis_server import RedisServer, redis_server

PATIENT = JournalSettings(settle=0, end_timeout=60)
SELDOM = JournalSettings(settle=0, end_timeout=60, pause=3600)  # between two flushes that nobody waits for
USED = Usage(2, 3)
READS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with redis_at(server) as client:
        await client.flushall()
        yield client


def end(journal: AnyJournal, request_id: str = "r") -> Lease:
    lease = journal.open(small_request(request_id))
    append_tokens(journal, lease, 0, [1, 2, 3])
    journal.finish(lease, FinishReason.LENGTH, usage=USED)
    return lease


async def assert_ended(journal: AnyJournal, request_id: str = "r") -> None:
    """Each kind of read sees the end, and the whole answer."""
    (status,) = await journal.statuses([request_id])
    record = await journal.read(request_id)
    for each in (status, record):
        assert each is not None
        assert (each.finish_reason, each.usage, each.leased) == (FinishReason.LENGTH, USED, False)
    assert isinstance(record, RequestRecord)
    assert record.choices[0].token_ids == [1, 2, 3]
    update = await journal.follow(request_id).poll()
    assert update is not None
    assert (update.finish_reason, update.usage, update.pending) == (FinishReason.LENGTH, USED, False)
    assert [each.token_ids for each in update.deltas] == [[1, 2, 3]]
    assert await journal.claim(request_id) is None
    assert not await journal.cancel(request_id)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_end_is_written_at_once_for_who_waits_for_it(
    server: RedisServer, redis: Redis, tmp_path: Path, kind: str
) -> None:
    async with journal_of(kind, Databases(server, tmp_path / "journal"), SELDOM) as journal:
        journal.open(small_request("another"))  # has begun the pause
        for number in range(READS):
            assert await journal.flush_end(end(journal, f"r{number}"))
            await assert_ended(journal, f"r{number}")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_has_an_end_written_that_nobody_waited_for(
    server: RedisServer, redis: Redis, tmp_path: Path, kind: str
) -> None:
    async with journal_of(kind, Databases(server, tmp_path / "journal"), SELDOM) as journal:
        for number in range(READS):
            end(journal, f"r{number}")
            await assert_ended(journal, f"r{number}")


@asynccontextmanager
async def behind_a_proxy(
    server: RedisServer, settings: JournalSettings = ALONE
) -> AsyncIterator[tuple[RedisJournal, Proxy]]:
    proxy = Proxy(server.port)
    await proxy.start()
    journal = RedisJournal(f"redis://{proxy.address}", owner="me", settings=settings)
    try:
        yield journal, proxy
    finally:
        proxy.heal()
        await journal.close()
        await proxy.stop()


@pytest.mark.parametrize("direction", [UP, DOWN])
async def test_an_end_that_is_not_confirmed_in_time_is_seen_at_its_router_all_the_same(
    server: RedisServer, redis: Redis, direction: str
) -> None:
    async with behind_a_proxy(server) as (journal, proxy), journal_at(server, "you") as other:
        end(journal, "first")
        await flushed(journal)
        proxy.break_silently([direction], loses=False)
        lease = end(journal)
        assert not await journal.flush_end(lease)
        record = await journal.read("r")
        assert record is not None
        assert (record.finish_reason, record.usage) == (FinishReason.LENGTH, USED)
        assert record.choices[0].token_ids == [1, 2, 3]
        (status,) = await journal.statuses(["r"])
        assert status is not None
        assert status.finish_reason is FinishReason.LENGTH
        update = await journal.follow("r").poll()
        assert update is not None
        assert (update.finish_reason, update.pending) == (FinishReason.LENGTH, True)
        assert [each.token_ids for each in update.deltas] == [[1, 2, 3]]
        assert await journal.open_if_absent(small_request()) is None
        proxy.heal()
        await flushed(journal)
        await assert_ended(journal)
        await assert_ended(other)


async def test_an_end_does_not_wait_for_what_it_used_to_be_counted(server: RedisServer, redis: Redis) -> None:
    """The record says what that is, and whoever finds it counts."""
    async with behind_a_proxy(server, PATIENT) as (journal, _):
        await journal.flush_end(end(journal, "first"))
        await redis.delete("quire:{usage}:open")
        await redis.set("quire:{usage}:open", "no ledger")
        assert await journal.flush_end(end(journal))
        assert await redis.hget(keys("r")[0], "reason") == b"length"
        await redis.delete("quire:{usage}:open")


async def test_an_end_is_not_flushed_where_another_router_has_the_record(server: RedisServer, redis: Redis) -> None:
    async with journal_at(server) as journal, journal_at(server, "you") as other:
        lease = journal.open(small_request())
        await flushed(journal)
        await expire(server, "r")
        await taken(other, "r")
        journal.finish(lease, FinishReason.LENGTH, usage=USED)
        assert not await journal.flush_end(lease)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_no_record_is_never_flushed(
    server: RedisServer, redis: Redis, tmp_path: Path, kind: str
) -> None:
    async with journal_of(kind, Databases(server, tmp_path / "journal")) as journal:
        assert not await journal.flush_end(unrecorded("r"))
        lease = journal.open(small_request())
        assert not await journal.flush_end(lease), "it has not ended"


async def test_nothing_waits_for_a_redis_that_is_known_to_be_away(server: RedisServer, redis: Redis) -> None:
    async with behind_a_proxy(server) as (journal, proxy):
        await journal.flush_end(end(journal, "first"))
        proxy.target = free_port()  # where nobody listens
        proxy.cut()
        while journal.available:
            await journal.flush_end(end(journal))
        lease = end(journal, "second")
        flushing = journal.flush_end(lease)
        with pytest.raises(StopIteration) as returned:
            flushing.send(None)
        assert returned.value.value is False
        proxy.target = server.port
