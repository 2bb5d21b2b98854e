"""A record that was deleted is gone at once, at every router, and nothing that is still written brings it back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import time

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.core.generation import Usage
from quire_router.journal.base import Lease
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import keys, tombstone
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.chaos.proxy import DOWN, UP, Proxy
from tests.support.journal_kinds import ALONE, KINDS, AnyJournal, Databases, journal_of
from tests.support.journals import Heard, append_tokens
from tests.support.redis_journals import (
    expire,
    flushed,
    journal_at,
    out_of_memory,
    redis_at,
    small_request,
    taken,
)
from tests.support.redis_server import RedisServer, redis_server

USED = Usage(2, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with redis_at(server) as client:
        await client.flushall()
        yield client


@pytest.fixture(params=KINDS)
async def journal(
    request: pytest.FixtureRequest, server: RedisServer, redis: Redis, tmp_path: Path
) -> AsyncIterator[AnyJournal]:
    async with journal_of(request.param, Databases(server, tmp_path / "journal")) as journal:
        yield journal


async def assert_gone(journal: AnyJournal) -> None:
    """No call finds the record."""
    assert await journal.read("r") is None
    assert await journal.statuses(["r"]) == [None]
    assert await journal.follow("r").poll() is None
    assert await journal.claim("r") is None
    assert not await journal.cancel("r")
    assert not await journal.delete("r")


def begun(journal: AnyJournal) -> Lease:
    lease = journal.open(small_request())
    append_tokens(journal, lease, 0, [1, 2])
    return lease


async def opened(journal: AnyJournal) -> Lease:
    """Nothing of it is written yet."""
    return begun(journal)


async def running(journal: AnyJournal) -> Lease:
    lease = begun(journal)
    await journal.flush()
    append_tokens(journal, lease, 2, [3])  # is not written yet
    return lease


async def ended(journal: AnyJournal) -> Lease:
    """Its end is not written yet."""
    lease = await running(journal)
    journal.finish(lease, FinishReason.STOP, usage=USED)
    return lease


async def ended_and_written(journal: AnyJournal) -> Lease:
    lease = await ended(journal)
    await journal.flush()
    return lease


async def claimed_again(journal: AnyJournal) -> Lease:
    """It was released, which is counted, and runs once more."""
    lease = begun(journal)
    journal.release(lease, Usage(2, 2))
    await journal.flush()
    claimed = await journal.claim("r")
    assert claimed is not None
    append_tokens(journal, claimed[1], 2, [3])
    return claimed[1]


STAGES = [opened, running, ended, ended_and_written, claimed_again]
Stage = Callable[[AnyJournal], Awaitable[Lease]]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deleted_record_is_gone_at_once_and_for_good(journal: AnyJournal, stage: Stage) -> None:
    heard = Heard()
    journal.set_listener(heard)
    lease = await stage(journal)
    assert await journal.delete("r")
    await assert_gone(journal)
    assert heard.cancelled == ([] if stage in (ended, ended_and_written) else ["r"])
    append_tokens(journal, lease, 3, [4])  # its run has not ended yet
    journal.finish(lease, FinishReason.ABORT, usage=USED)
    await journal.flush()
    await assert_gone(journal)
    rows = await journal.usage(0, time() + 3600)
    assert [(row.requests, row.prompt_tokens, row.completion_tokens) for row in rows] == [(1, 2, 3)]


async def test_a_new_request_may_have_the_id_of_a_deleted_one(journal: AnyJournal) -> None:
    """As one that comes again under its idempotency key."""
    await ended_and_written(journal)
    assert await journal.delete("r")
    again = replace(small_request(), created=6.0)
    lease = await journal.open_if_absent(again)
    assert lease is not None
    journal.finish(lease, FinishReason.LENGTH)
    await journal.flush()
    record = await journal.read("r")
    assert record is not None
    assert record.finish_reason is FinishReason.LENGTH


async def test_who_follows_a_record_that_is_deleted_gets_no_more_of_it(journal: AnyJournal) -> None:
    await running(journal)
    await journal.flush()
    follower = journal.follow("r")
    assert await follower.poll() is not None
    assert await journal.delete("r")
    assert await follower.poll() is None


# By another router


@pytest.fixture
async def routers(server: RedisServer, redis: Redis) -> AsyncIterator[tuple[RedisJournal, RedisJournal]]:
    async with journal_at(server) as journal, journal_at(server, "you") as other:
        yield journal, other


@pytest.mark.parametrize("ends", [False, True], ids=["running", "ended"])
async def test_a_request_that_runs_elsewhere_is_gone_before_its_router_knows(
    routers: tuple[RedisJournal, RedisJournal], *, ends: bool
) -> None:
    owner, other = routers
    heard = Heard()
    owner.set_listener(heard)
    lease = begun(owner)
    await flushed(owner)
    assert await other.delete("r")
    await assert_gone(other)
    append_tokens(owner, lease, 2, [3])
    if ends:
        owner.finish(lease, FinishReason.STOP, usage=USED)
    await flushed(owner)
    await assert_gone(owner)
    await assert_gone(other)
    if not ends:
        assert heard.cancelled == ["r"]
        assert heard.taken == []
        owner.finish(lease, FinishReason.ABORT, usage=USED)
        await flushed(owner)
    (row,) = await other.usage(0, time() + 3600)
    assert row.counts == (1, 2, 0, 3)


async def test_a_router_that_was_frozen_does_not_bring_back_what_another_one_ended(
    server: RedisServer, routers: tuple[RedisJournal, RedisJournal]
) -> None:
    owner, other = routers
    lease = begun(owner)
    await flushed(owner)
    await expire(server, "r")
    _, newer = await taken(other, "r")
    other.finish(newer, FinishReason.STOP)
    await flushed(other)
    assert await other.delete("r")
    append_tokens(owner, lease, 2, [3])
    await flushed(owner)
    await assert_gone(other)


async def test_writes_that_reach_redis_after_the_deletion_change_nothing(server: RedisServer, redis: Redis) -> None:
    """They were on their way when another router, or this one, deleted the record."""
    proxy = Proxy(server.port)
    await proxy.start()
    owner = RedisJournal(f"redis://{proxy.address}", owner="me", settings=ALONE)
    try:
        async with journal_at(server, "you") as other:
            lease = begun(owner)
            await flushed(owner)
            proxy.break_silently([UP], loses=False)
            append_tokens(owner, lease, 2, [3])
            owner.finish(lease, FinishReason.STOP, usage=USED)
            assert not await owner.flush_end(lease)
            assert await other.delete("r")
            proxy.heal()
            await flushed(owner)
            await assert_gone(owner)
            await assert_gone(other)
    finally:
        await owner.close()
        await proxy.stop()


async def test_a_write_that_is_repeated_after_the_deletion_changes_nothing(server: RedisServer, redis: Redis) -> None:
    """Redis has done it, and its router did not hear that."""
    proxy = Proxy(server.port)
    await proxy.start()
    owner = RedisJournal(f"redis://{proxy.address}", owner="me", settings=ALONE)
    try:
        async with journal_at(server, "you") as other:
            lease = begun(owner)
            await flushed(owner)
            proxy.break_silently([DOWN], loses=True)
            owner.finish(lease, FinishReason.STOP, usage=USED)
            async with asyncio.timeout(60):
                while not await redis.hexists(keys("r")[0], "reason"):  # noqa: ASYNC110 - Redis has no event for it
                    await asyncio.sleep(0.002)
            assert await other.delete("r")
            proxy.heal()
            await flushed(owner)
            await assert_gone(other)
            await assert_gone(owner)
    finally:
        await owner.close()
        await proxy.stop()


async def test_a_deleted_record_is_not_expected_to_appear_after_an_outage(server: RedisServer, redis: Redis) -> None:
    """A record that is only missing is: its router may still have to write it."""
    async with journal_at(server, settings=JournalSettings()) as journal:
        lease = begun(journal)
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        assert await journal.delete("r")
        journal._records._health.mark_unavailable()
        assert await journal.read("r") is None
        with pytest.raises(QuireError):
            await journal.read("another")


async def test_a_deletion_that_redis_refuses_changes_nothing(
    routers: tuple[RedisJournal, RedisJournal], redis: Redis
) -> None:
    owner, other = routers
    lease = begun(owner)
    await flushed(owner)
    async with out_of_memory(redis):
        for journal in routers:
            with pytest.raises(QuireError) as refused:
                await journal.delete("r")
            assert refused.value.code is ErrorCode.UNAVAILABLE
    owner.finish(lease, FinishReason.STOP)
    await flushed(owner)
    assert await other.read("r") is not None
    assert await other.delete("r")
    await assert_gone(owner)


async def test_nothing_of_a_deleted_request_stays_but_that_it_was_deleted(
    routers: tuple[RedisJournal, RedisJournal], redis: Redis
) -> None:
    owner, other = routers
    await ended_and_written(owner)
    assert await other.delete("r")
    left = [key.decode() async for key in redis.scan_iter("quire:{r}*")]
    assert left == [tombstone("r")]
    assert await redis.ttl(left[0]) > 0


async def test_who_deletes_twice_at_once_deletes_once(routers: tuple[RedisJournal, RedisJournal]) -> None:
    owner, other = routers
    await ended_and_written(owner)
    assert sorted(await asyncio.gather(owner.delete("r"), other.delete("r"))) == [False, True]


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "running"])
async def test_a_key_that_is_used_again_after_its_request_was_deleted_is_counted_again(
    journal: AnyJournal, ends: bool
) -> None:
    for number in range(3):
        generation = replace(small_request("again"), created=number + 1)
        lease = await journal.open_if_absent(generation)
        assert lease is not None
        append_tokens(journal, lease, 0, [5, 6, 7])
        if ends or number == 2:
            journal.finish(lease, FinishReason.STOP, usage=USED)
            await flushed(journal)
            assert await journal.delete("again")
        else:
            await flushed(journal)
            assert await journal.delete("again")
            journal.finish(lease, FinishReason.ABORT, usage=USED)
        await flushed(journal)
    rows = await journal.usage(0, time() + 3600)
    assert [(row.requests, row.completion_tokens) for row in rows] == [(3, 9)]
