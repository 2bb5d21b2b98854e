"""Ownership of a record in Redis: which router may write it, and how a former owner learns that it lost it."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from time import time

import pytest
from quire_proto.sampling import FinishReason, TokenLogprobs
from quire_router.core.generation import Usage
from quire_router.journal import journal_writer
from quire_router.journal.base import DeliveredChoice, Lease, RecordedDelta
from quire_router.journal.codec import JournalSettings, pack_tokens
from quire_router.journal.redis.redis_connection import keys

from tests.support.journals import Heard, Seen, append_tokens, seen
from tests.support.redis_journals import (
    counted,
    expire,
    flushed,
    journal_at,
    out_of_memory,
    redis_at,
    small_request,
    store_at,
    store_row,
    taken,
)
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until

LEASE = 10  # seconds, the longest one


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.mark.parametrize("tokens", [[], [[9]]], ids=["the end", "tokens and the end"])
async def test_a_router_that_lost_its_lease_changes_nothing_and_is_counted(
    server: RedisServer, tokens: list[list[int]]
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1])
        await flushed(journal)
        await redis.hset(keys("r")[0], mapping={"owner": "other", "epoch": 2})
        before = counted("quire_stale_epoch_rejections_total")
        for token_ids in tokens:
            append_tokens(journal, lease, 1, token_ids)
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.owner, record.epoch, record.choices[0].token_ids, record.finish_reason) == (
            "other",
            2,
            [1],
            None,
        )
        assert counted("quire_stale_epoch_rejections_total") == before + 1


async def test_two_routers_cannot_write_one_record(server: RedisServer) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        generation = small_request()
        lease = mine.open(generation)
        append_tokens(mine, lease, 0, [1])
        await flushed(mine)
        stolen = yours.open(generation)
        append_tokens(yours, stolen, 0, [8, 9])
        await flushed(yours)
        assert seen(await yours.read("r")) == Seen(generation, "me", 1, [DeliveredChoice([1])])


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> JournalSettings:
    """A heartbeat each tenth of a second, of leases that do not end while a loaded machine is late."""
    monkeypatch.setattr(journal_writer, "HEARTBEATS_PER_LEASE", 10 * LEASE)
    return JournalSettings(lease=LEASE, settle=0)


async def test_a_lease_is_renewed_while_nothing_is_written_and_released_at_the_end(
    server: RedisServer, lively: JournalSettings
) -> None:
    async with journal_at(server, settings=lively) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        await flushed(journal)

        async def expires() -> float:
            return float(await redis.hget(keys("r")[0], "lease_expires") or 0)

        first = await expires()
        seconds, microseconds = await redis.time()
        assert 0 < first - (seconds * 1000 + microseconds / 1000) <= LEASE * 1000
        async with asyncio.timeout(10):
            while await expires() == first:  # noqa: ASYNC110 - only Redis knows
                await asyncio.sleep(0.01)
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        assert await expires() == 0


async def test_a_router_learns_with_its_next_heartbeat_that_another_one_claimed_its_record(
    server: RedisServer, lively: JournalSettings
) -> None:
    async with journal_at(server, settings=lively) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.set_listener(heard)
        append_tokens(mine, mine.open(small_request()), 0, [1])
        await flushed(mine)
        claimed = None
        async with asyncio.timeout(20):
            while claimed is None:  # a heartbeat in between renews the lease
                await expire(server, "r")
                claimed = await yours.claim("r")
        assert (claimed[0].deltas, claimed[1].epoch) == ([RecordedDelta(0, [1])], 2)
        await until(lambda: bool(heard.taken))
        assert heard == Heard([], ["r"])


async def test_a_router_learns_with_its_next_heartbeat_that_its_request_was_cancelled_at_another(
    server: RedisServer, lively: JournalSettings
) -> None:
    async with journal_at(server, settings=lively) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.set_listener(heard)
        lease = mine.open(small_request())
        await flushed(mine)
        assert await yours.cancel("r")
        await until(lambda: bool(heard.cancelled))
        append_tokens(mine, lease, 0, [1])
        await flushed(mine)
        assert heard == Heard(["r"], [])
        mine.release(lease)
        await flushed(mine)
        record = await yours.read("r")
        assert record is not None
        assert record.finish_reason is FinishReason.ABORT


async def test_a_request_released_before_its_router_learns_of_the_cancellation_has_ended(
    server: RedisServer,
) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        lease = mine.open(small_request())
        await flushed(mine)
        assert await yours.cancel("r")
        mine.release(lease)
        await flushed(mine)
        record = await yours.read("r")
        assert record is not None
        assert record.finish_reason is FinishReason.ABORT


async def test_cancelling_a_dead_routers_request_ends_it_and_the_router_learns_it_on_return(
    server: RedisServer,
) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.set_listener(heard)
        lease = mine.open(small_request())
        await flushed(mine)
        assert await yours.cancel("r")
        await expire(server, "r")
        assert await yours.claim("r") is None
        append_tokens(mine, lease, 0, [1])
        await flushed(mine)
        assert heard == Heard([], ["r"])
        record = await yours.read("r")
        assert record is not None
        assert (record.deltas, record.finish_reason) == ([], FinishReason.ABORT)


async def test_a_claim_whose_answer_was_lost_can_be_repeated(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        generation = small_request()
        journal.release(journal.open(generation))
        await flushed(journal)
        async with store_at(server) as store:
            first = await store.claim("r", "you", "name")
            assert first is not None
            again = await store.claim("r", "you", "name")
            assert again is not None
            assert again[:2] == first[:2], "all but Redis' time is as it was"
            assert await store.claim("r", "you", "other") is None
            new = small_request("new")
            for _ in range(2):
                assert await store.open(new, Lease("new", "you", 1))
            assert not await store.open(replace(new, created=1.0), Lease("new", "you", 1))


async def test_a_finished_request_is_not_opened_again(server: RedisServer) -> None:
    """A writer that does not know whether Redis saw its last words says them again."""
    settings = JournalSettings(retention=60)
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis, store_at(server) as store:
        journal.finish(journal.open(small_request()), FinishReason.STOP)
        await flushed(journal)
        before = await redis.hgetall(keys("r")[0])
        assert await store.open(small_request(), Lease("r", "me", 1))
        assert not await store.open(small_request(), Lease("r", "you", 2))
        assert await redis.hgetall(keys("r")[0]) == before
        assert await redis.ttl(keys("r")[0]) <= 60


@pytest.mark.parametrize("before", [[], [4]], ids=["at the beginning", "later"])
async def test_a_delta_that_was_cut_off_is_dropped_by_the_next_owner(before: list[int], server: RedisServer) -> None:
    delta = RecordedDelta(0, [5, 6], None, [TokenLogprobs(-0.5, ((7, -0.5),))] * 2)
    sent = [RecordedDelta(0, before)] if before else []
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours, redis_at(server) as redis:
        lease = mine.open(small_request())
        append_tokens(mine, lease, 0, before)
        mine.append(lease, len(before), delta)
        await flushed(mine)
        stored = await redis.get(keys("r")[1])
        await store_row(redis, "r", stored[:-8])
        follower = yours.follow("r")
        first = await follower.poll()
        assert first is not None
        assert first.deltas == sent
        await expire(server, "r")
        record, new = await taken(yours, "r")
        assert record.deltas == sent
        append_tokens(yours, new, len(before), [5])
        await flushed(yours)
        assert await redis.get(keys("r")[1]) == pack_tokens([*before, 5])
        second = await follower.poll()
        assert second is not None
        assert second.deltas == [RecordedDelta(0, [5])]


async def test_a_cancellation_that_crosses_a_release_counts(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(small_request())
        await flushed(journal)
        server.signal(signal.SIGSTOP)  # so that the release is on its way for as long as we like
        journal.release(lease)
        await asyncio.sleep(0.1)
        assert await journal.cancel("r")
        server.signal(signal.SIGCONT)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.finish_reason, record.leased) == (FinishReason.ABORT, False)


async def test_an_older_state_of_redis_does_not_undo_a_claim(server: RedisServer) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours, redis_at(server) as redis:
        heard = Heard()
        mine.set_listener(heard)
        lease = mine.open(small_request())
        append_tokens(mine, lease, 0, [1])
        await flushed(mine)
        older = [await redis.dump(key) for key in keys("r")]
        await expire(server, "r")
        _, new = await taken(yours, "r")
        append_tokens(yours, new, 1, [2])
        await flushed(yours)
        for key, value in zip(keys("r"), older, strict=True):
            await redis.restore(key, 0, value, replace=True)
        append_tokens(mine, lease, 1, [8, 9])
        await flushed(mine)
        append_tokens(yours, new, 2, [3])
        await flushed(yours)
        assert seen(await yours.read("r")) == Seen(small_request(), "you", 2, [DeliveredChoice([1, 2, 3])])
        append_tokens(mine, lease, 3, [9])
        await flushed(mine)
        assert heard == Heard([], ["r"])
        assert seen(await yours.read("r")) == Seen(small_request(), "you", 2, [DeliveredChoice([1, 2, 3])])


async def test_a_request_that_ended_here_and_is_not_written_yet_reads_as_finished_and_is_not_cancelled() -> None:
    with redis_server() as server:
        async with journal_at(server) as journal, redis_at(server) as redis:
            lease = journal.open(small_request())
            await flushed(journal)
            async with out_of_memory(redis):
                journal.finish(lease, FinishReason.STOP, "", Usage(2, 5))
                assert not await journal.cancel("r")
                (status,) = await journal.statuses(["r"])
                assert status is not None
                assert (status.finish_reason, status.usage, status.leased) == (FinishReason.STOP, Usage(2, 5), False)
            await flushed(journal)
            record = await journal.read("r")
            assert record is not None
            assert record.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
async def test_an_adopted_request_keeps_its_remaining_time_whatever_the_former_routers_clock(
    skew: float,
) -> None:
    with redis_server() as server:
        async with journal_at(server) as former, journal_at(server, "you") as journal, redis_at(server) as redis:
            created = time() + skew
            generation = replace(small_request(), created=created, deadline=created + 600)
            former.release(former.open(generation))
            await flushed(former)
            await redis.hincrby(keys("r")[0], "opened", -100_000)  # a hundred seconds are over
            record, _ = await taken(journal, "r")
            assert record.generation.seconds_left is not None
            assert 400 < record.generation.seconds_left <= 500.5
            former_again = await former.read("r")
            assert former_again is not None
            assert former_again.generation == generation
