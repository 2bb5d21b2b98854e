"""What the Redis journal promises beyond the protocol: nothing waits for Redis, and what Redis lost it gets again."""

import asyncio
import logging
import signal
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.generation import Generation
from quire_router.journal.base import Delivered, Lease, Record, Told
from quire_router.journal.codec import encode_request, pack_tokens
from quire_router.journal.redis import RedisJournal
from quire_router.journal.store import RedisStore
from quire_router.journal.writer import BACKGROUND, WriterSettings, keys
from redis.asyncio import Redis

from tests.support.journals import Heard, Seen, seen, tell
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@asynccontextmanager
async def journal_at(server: RedisServer, owner: str = "me", **options: Any) -> AsyncIterator[RedisJournal]:
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


def request(request_id: str = "r", prompt: list[int] | None = None) -> Generation:
    return Generation(
        request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3), created=5.0
    )


async def flushed(journal: RedisJournal) -> None:
    await asyncio.wait_for(journal.flush(), 15)


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0


# Redis goes away


async def test_without_redis_everything_goes_on_and_is_written_when_it_comes() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as journal:
            lease = journal.open(request())
            tell(journal, lease, 0, [1, 2, 3])
            await asyncio.sleep(0.1)
            assert not journal.available
            with pytest.raises(QuireError) as caught:
                await journal.read("r")
            assert caught.value.code is ErrorCode.UNAVAILABLE
            tell(journal, lease, 3, [4])
            server.start()
            await flushed(journal)
            assert journal.available
            record = await journal.read("r")
            assert record is not None
            assert record.choices[0].token_ids == [1, 2, 3, 4]


REFUSALS = {"out of memory": "maxmemory", "too few replicas": "min-replicas-to-write"}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_redis_that_answers_but_does_not_write_is_one_outage(
    kind: str, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WriterSettings(lease=0.03)  # so that Redis is asked, and answers, many times
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        await flushed(journal)
        await redis.config_set(REFUSALS[kind], 1)
        before = await script_loads(redis)
        tell(journal, lease, 0, [1])
        await until(lambda: not journal.available)
        for _ in range(100):
            await asyncio.sleep(0.01)
            assert not journal.available
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert await script_loads(redis) == before
        assert await rejected(redis) < 20
        await redis.config_set(REFUSALS[kind], 0)
        await flushed(journal)
        assert journal.available
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [1]


async def script_loads(redis: Redis) -> int:
    return (await calls(redis, "script|load"))["calls"]


async def rejected(redis: Redis) -> int:
    """How often scripts were tried in vain."""
    stats = await calls(redis, "evalsha")
    return stats["failed_calls"] + stats["rejected_calls"]


async def calls(redis: Redis, command: str) -> dict[str, int]:
    return (await redis.info("commandstats"))[f"cmdstat_{command}"]


async def test_what_a_redis_without_memory_lost_it_gets_again(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        generation = request()
        lease = journal.open(generation)
        tell(journal, lease, 0, [1, 2])
        await flushed(journal)
        server.restart()
        tell(journal, lease, 2, [3])
        await flushed(journal)
        assert seen(await journal.read("r")) == Seen(generation, "me", 1, [Delivered([1, 2, 3])])


async def test_tokens_that_were_lost_alone_are_written_again(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        tell(journal, lease, 0, [1, 2])
        await flushed(journal)
        await redis.delete(keys("r")[1])
        tell(journal, lease, 2, [3])
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([1, 2, 3], FinishReason.STOP)


async def test_scripts_that_redis_forgot_are_taught_again_without_a_pause(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        await flushed(journal)
        await redis.script_flush()
        tell(journal, lease, 0, [1])
        await flushed(journal)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [1]


async def test_redis_that_hangs_holds_up_nobody(server: RedisServer) -> None:
    journal = RedisJournal(server.url, owner="me", timeout=0.1)
    lease = journal.open(request())
    await flushed(journal)
    server.signal(signal.SIGSTOP)
    try:
        for position in range(100):
            tell(journal, lease, position, [position])
        await until(lambda: not journal.available)
        async with asyncio.timeout(10):
            await journal.close()
    finally:
        server.signal(signal.SIGCONT)


async def test_closing_writes_what_is_pending(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(request())
        tell(journal, lease, 0, [1])
        journal.finish(lease, FinishReason.STOP)
    async with journal_at(server) as other:
        record = await other.read("r")
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([1], FinishReason.STOP)


# Bounds


async def test_what_waits_is_bounded_in_requests_and_in_tokens() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server, max_requests=2, max_tokens=100) as journal:
            before = counted("quire_journal_dropped_writes_total")
            first = journal.open(request("first"))
            second = journal.open(request("second"))
            third = journal.open(request("third"))
            assert counted("quire_journal_dropped_writes_total") == before + 1
            tell(journal, third, 0, [1])
            tell(journal, first, 0, [1] * 90)
            tell(journal, second, 0, [1] * 90)
            assert counted("quire_journal_dropped_writes_total") == before + 2
            tell(journal, first, 90, [2])
            server.start()
            await flushed(journal)
            record = await journal.read("first")
            assert record is not None
            assert record.choices[0].token_ids == [1] * 90 + [2]
            assert await journal.read("second") is None
            assert await journal.read("third") is None
            tell(journal, journal.open(request("fourth")), 0, [1] * 97)  # there is room again
            await flushed(journal)
            assert await journal.read("fourth") is not None


async def test_long_outputs_are_written_in_pieces(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(request())
        tell(journal, lease, 0, list(range(200_000)))
        journal.finish(lease, FinishReason.LENGTH)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == list(range(200_000))
        assert record.finish_reason is FinishReason.LENGTH


# Who may write


@pytest.mark.parametrize("tokens", [[], [[9]]], ids=["the end", "tokens and the end"])
async def test_a_router_that_lost_its_lease_changes_nothing_and_is_counted(
    server: RedisServer, tokens: list[list[int]]
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        tell(journal, lease, 0, [1])
        await flushed(journal)
        await redis.hset(keys("r")[0], mapping={"owner": "other", "epoch": 2})
        before = counted("quire_stale_epoch_rejections_total")
        for token_ids in tokens:
            tell(journal, lease, 1, token_ids)
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
        generation = request()
        lease = mine.open(generation)
        tell(mine, lease, 0, [1])
        await flushed(mine)
        stolen = yours.open(generation)
        tell(yours, stolen, 0, [8, 9])
        await flushed(yours)
        assert seen(await yours.read("r")) == Seen(generation, "me", 1, [Delivered([1])])


async def test_a_lease_is_renewed_while_nothing_is_written_and_let_go_at_the_end(server: RedisServer) -> None:
    async with journal_at(server, settings=WriterSettings(lease=0.3)) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        await flushed(journal)

        async def expires() -> float:
            return float(await redis.hget(keys("r")[0], "lease_expires") or 0)

        first = await expires()
        seconds, microseconds = await redis.time()
        assert 0 < first - (seconds * 1000 + microseconds / 1000) <= 300
        async with asyncio.timeout(10):
            while await expires() == first:  # noqa: ASYNC110 - only Redis knows
                await asyncio.sleep(0.01)
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        assert await expires() == 0


async def test_a_router_learns_by_its_next_beat_that_another_one_took_its_record(server: RedisServer) -> None:
    quick = WriterSettings(lease=0.4)
    async with journal_at(server, settings=quick) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.report_to(heard)
        tell(mine, mine.open(request()), 0, [1])
        await flushed(mine)
        await expire(server, "r")
        claimed = await taken(yours, "r")
        assert (claimed[0].pieces, claimed[1].epoch) == ([Told(0, [1])], 2)
        await until(lambda: bool(heard.taken))
        assert heard == Heard([], ["r"])


async def test_a_router_hears_at_its_next_beat_that_its_request_was_cancelled_at_another(server: RedisServer) -> None:
    quick = WriterSettings(lease=0.4)
    async with journal_at(server, settings=quick) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.report_to(heard)
        lease = mine.open(request())
        await flushed(mine)
        assert await yours.cancel("r")
        await until(lambda: bool(heard.cancelled))
        tell(mine, lease, 0, [1])
        await flushed(mine)
        assert heard == Heard(["r"], [])
        mine.release(lease)
        await flushed(mine)
        record = await yours.read("r")
        assert record is not None
        assert record.finish_reason is FinishReason.ABORT


async def test_a_request_that_is_let_go_of_before_its_router_hears_that_it_was_cancelled_has_ended(
    server: RedisServer,
) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        lease = mine.open(request())
        await flushed(mine)
        assert await yours.cancel("r")
        mine.release(lease)
        await flushed(mine)
        record = await yours.read("r")
        assert record is not None
        assert record.finish_reason is FinishReason.ABORT


async def test_what_a_router_that_died_left_is_ended_when_it_is_cancelled_and_the_router_hears_when_it_is_back(
    server: RedisServer,
) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        heard = Heard()
        mine.report_to(heard)
        lease = mine.open(request())
        await flushed(mine)
        assert await yours.cancel("r")
        await expire(server, "r")
        assert await yours.claim("r") is None
        tell(mine, lease, 0, [1])
        await flushed(mine)
        assert heard == Heard([], ["r"])
        record = await yours.read("r")
        assert record is not None
        assert (record.pieces, record.finish_reason) == ([], FinishReason.ABORT)


async def test_a_claim_whose_answer_was_lost_can_be_repeated(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        generation = request()
        journal.release(journal.open(generation))
        await flushed(journal)
        async with store_at(server) as store:
            first = await store.claim("r", "you", "name")
            assert first is not None
            assert await store.claim("r", "you", "name") == first
            assert await store.claim("r", "you", "other") is None
            new = request("new")
            for _ in range(2):
                assert await store.open(new, Lease("new", "you", 1))
            assert not await store.open(replace(new, created=1.0), Lease("new", "you", 1))


async def test_what_has_ended_is_not_opened_again(server: RedisServer) -> None:
    """A writer that does not know whether Redis saw its last words says them again."""
    settings = WriterSettings(retention=60)
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis, store_at(server) as store:
        journal.finish(journal.open(request()), FinishReason.STOP)
        await flushed(journal)
        before = await redis.hgetall(keys("r")[0])
        assert await store.open(request(), Lease("r", "me", 1))
        assert not await store.open(request(), Lease("r", "you", 2))
        assert await redis.hgetall(keys("r")[0]) == before
        assert await redis.ttl(keys("r")[0]) <= 60


@pytest.mark.parametrize("before", [[], [4]], ids=["at the beginning", "later"])
async def test_a_piece_that_was_cut_off_is_not_there_for_whoever_goes_on(
    before: list[int], server: RedisServer
) -> None:
    piece = Told(0, [5, 6], None, [TokenLogprobs(-0.5, ((7, -0.5),))] * 2)
    told = [Told(0, before)] if before else []
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours, redis_at(server) as redis:
        lease = mine.open(request())
        tell(mine, lease, 0, before)
        mine.append(lease, len(before), piece)
        await flushed(mine)
        stored = await redis.get(keys("r")[1])
        await redis.set(keys("r")[1], stored[:-8])
        follower = yours.follow("r")
        first = await follower.look()
        assert first is not None
        assert first.pieces == told
        await expire(server, "r")
        record, new = await taken(yours, "r")
        assert record.pieces == told
        tell(yours, new, len(before), [5])
        await flushed(yours)
        assert await redis.get(keys("r")[1]) == pack_tokens([*before, 5])
        second = await follower.look()
        assert second is not None
        assert second.pieces == [Told(0, [5])]


async def test_a_cancellation_that_crosses_a_release_counts(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(request())
        await flushed(journal)
        server.signal(signal.SIGSTOP)  # so that the release is on its way for as long as we like
        journal.release(lease)
        await asyncio.sleep(0.1)
        assert await journal.cancel("r")
        server.signal(signal.SIGCONT)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.finish_reason, record.held) == (FinishReason.ABORT, False)


async def test_an_older_state_of_redis_does_not_undo_a_claim(server: RedisServer) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours, redis_at(server) as redis:
        heard = Heard()
        mine.report_to(heard)
        lease = mine.open(request())
        tell(mine, lease, 0, [1])
        await flushed(mine)
        older = [await redis.dump(key) for key in keys("r")]
        await expire(server, "r")
        _, new = await taken(yours, "r")
        tell(yours, new, 1, [2])
        await flushed(yours)
        for key, value in zip(keys("r"), older, strict=True):
            await redis.restore(key, 0, value, replace=True)
        tell(mine, lease, 1, [8, 9])
        await flushed(mine)
        tell(yours, new, 2, [3])
        await flushed(yours)
        assert seen(await yours.read("r")) == Seen(request(), "you", 2, [Delivered([1, 2, 3])])
        tell(mine, lease, 3, [9])
        await flushed(mine)
        assert heard == Heard([], ["r"])
        assert seen(await yours.read("r")) == Seen(request(), "you", 2, [Delivered([1, 2, 3])])


# Without Redis


async def test_without_redis_a_request_is_opened_once_at_each_router() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as journal:
            lease = await journal.open_once(request())
            assert lease is not None
            assert await journal.open_once(replace(request(), created=1.0)) is None
            tell(journal, lease, 0, [1])
            for call in (
                journal.claim("other"),
                journal.cancel("other"),
                journal.orphans(),
                journal.follow("r").look(),
            ):
                with pytest.raises(QuireError) as caught:
                    await call
                assert caught.value.code is ErrorCode.UNAVAILABLE
            server.start()
            await flushed(journal)
            assert seen(await journal.read("r")) == Seen(request(), "me", 1, [Delivered([1])])


async def test_of_two_that_opened_a_request_without_redis_one_hears_that_it_is_not_its_own() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
            heard = {owner: Heard() for owner in ("me", "you")}
            for journal, owner, created in ((mine, "me", 1.0), (yours, "you", 2.0)):
                journal.report_to(heard[owner])
                lease = await journal.open_once(replace(request(), created=created))
                assert lease is not None
                tell(journal, lease, 0, [1])
            server.start()
            await flushed(mine)
            await flushed(yours)
            record = await mine.read("r")
            assert record is not None
            assert {owner: each.taken for owner, each in heard.items()} == {
                owner: [] if owner == record.owner else ["r"] for owner in heard
            }


async def test_a_redis_that_hangs_holds_up_a_new_request_for_a_moment_only(server: RedisServer) -> None:
    async with journal_at(server, timeout=60) as journal:
        server.signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):  # less than the client would wait
                assert await journal.open_once(request()) is not None
        finally:
            server.signal(signal.SIGCONT)
        await flushed(journal)
        assert await journal.read("r") is not None


async def test_a_follower_has_no_news_until_what_was_lost_is_written_again(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        tell(journal, lease, 0, [1, 2, 3])
        await flushed(journal)
        follower = journal.follow("r")
        await follower.look()
        await redis.delete(keys("r")[1])
        tail = await follower.look()
        assert tail is not None
        assert (tail.pieces, tail.held) == ([], True)
        server.restart()
        tail = await follower.look()
        assert tail is not None
        assert (tail.pieces, tail.held) == ([], True)
        tell(journal, lease, 3, [4])
        await flushed(journal)
        tail = await follower.look()
        assert tail is not None
        assert tail.pieces == [Told(0, [4])]


async def test_what_redis_may_have_lost_is_not_unknown_before_routers_could_write_it_again(server: RedisServer) -> None:
    async with (
        journal_at(server) as journal,
        journal_at(server, owner="you", settings=WriterSettings(lease=1.0, settle=1.0)) as yours,
    ):
        lease = journal.open(request())
        yours.start()
        await flushed(journal)
        await until(lambda: yours.available)
        assert await yours.read("unknown") is None
        follower = yours.follow("unknown")
        server.restart()
        with pytest.raises(QuireError) as caught:
            await yours.read("unknown")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        tail = await follower.look()
        assert tail is not None
        assert (tail.pieces, tail.finish_reason, tail.held) == ([], None, True)
        tell(journal, lease, 0, [1])
        await flushed(journal)
        assert await yours.read("r") is not None
        await asyncio.sleep(1.0)
        assert await yours.read("unknown") is None
        assert await follower.look() is None


async def test_what_is_not_there_after_redis_hung_is_not_unknown_yet(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        journal.start()
        await until(lambda: journal.available)
        assert await journal.read("unknown") is None
        server.signal(signal.SIGSTOP)
        reading = asyncio.create_task(journal.read("unknown"))
        await asyncio.sleep(0.6)
        server.signal(signal.SIGCONT)
        with pytest.raises(QuireError) as caught:
            await reading
        assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("other", [[7], [7, 8, 9, 10]], ids=["shorter and ended", "longer"])
async def test_a_follower_is_never_told_of_another_request(server: RedisServer, other: list[int]) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        tell(mine, mine.open(request()), 0, [1, 2, 3])
        await flushed(mine)
        follower = yours.follow("r")
        await follower.look()
        server.restart()
        lease = yours.open(replace(request(), created=1.0))
        tell(yours, lease, 0, other)
        yours.finish(lease, FinishReason.STOP)
        await flushed(yours)
        with pytest.raises(QuireError) as caught:
            await follower.look()
        assert caught.value.code is ErrorCode.INTERNAL


async def taken(journal: RedisJournal, request_id: str) -> tuple[Record, Lease]:
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
    async with redis_at(server) as client:
        yield RedisStore(client, WriterSettings())


# How long it is kept


async def test_a_record_is_kept_long_while_it_runs_and_for_the_retention_time_afterwards(server: RedisServer) -> None:
    settings = WriterSettings(retention=60, running_ttl=5000)
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        tell(journal, lease, 0, [1])
        await flushed(journal)
        for key in keys("r"):
            assert 4990 <= await redis.ttl(key) <= 5000
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        for key in keys("r"):
            assert 50 <= await redis.ttl(key) <= 60


async def test_every_key_of_a_request_is_in_one_slot_and_expires(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        tell(journal, journal.open(request("abc")), 0, [1])
        await flushed(journal)
        names = [name if isinstance(name, str) else name.decode() for name in await redis.keys("*")]
        assert names
        for name in names:
            assert "{abc}" in name
            assert await redis.ttl(name) > 0


# What others did to the database


async def test_a_key_of_something_else_costs_only_its_own_request(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        await redis.set(keys("bad")[0], "not a hash")
        tell(journal, journal.open(request("bad")), 0, [1])
        tell(journal, journal.open(request("good")), 0, [1])
        await flushed(journal)
        assert await journal.read("good") is not None
        assert await redis.get(keys("bad")[0]) == b"not a hash"


async def test_a_damaged_record_is_our_fault(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.open(request())
        await flushed(journal)
        stored = await redis.hget(keys("r")[0], "request")
        for damaged in (b"{}", b"[]", b'"x"', b"[" * 100_000, stored.replace(b'"n":1', b'"n":0')):
            await redis.hset(keys("r")[0], "request", damaged)
            for call in (journal.read("r"), journal.follow("r").look()):
                with pytest.raises(QuireError) as caught:
                    await call
                assert caught.value.code is ErrorCode.INTERNAL


BREAKAGE = {
    "the record is something else": (0, "rpush", "x"),
    "the tokens are something else": (1, "rpush", "x"),
    "the epoch is no number": (0, "hset", "epoch"),
}


@pytest.mark.parametrize("kind", BREAKAGE)
async def test_a_damaged_record_is_given_up_and_the_others_go_on(kind: str, server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        leases = [journal.open(request(name)) for name in ("bad", "good")]
        await flushed(journal)
        await break_record(redis, kind)
        before = counted("quire_journal_dropped_writes_total")
        for token_id in range(3):
            for lease in leases:
                tell(journal, lease, token_id, [token_id])
            await flushed(journal)
            assert journal.available
        assert counted("quire_journal_dropped_writes_total") == before + 1
        assert seen(await journal.read("good")) == Seen(request("good"), "me", 1, [Delivered([0, 1, 2])])
        for call in (journal.read("bad"), journal.claim("bad")):
            with pytest.raises(QuireError) as caught:
                await call
            assert caught.value.code is ErrorCode.INTERNAL


async def break_record(redis: Redis, kind: str) -> None:
    index, command, argument = BREAKAGE[kind]
    key = keys("bad")[index]
    if command == "rpush":
        await redis.delete(key)
        await redis.rpush(key, argument)
    else:
        await redis.hset(key, mapping={argument: "x", "lease_expires": 0})
    if index:
        await redis.hset(keys("bad")[0], "lease_expires", 0)


async def test_a_record_that_is_claimed_and_cannot_be_read_ends_with_an_error(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.release(journal.open(request()))
        await flushed(journal)
        await redis.set(keys("r")[1], pack_tokens([-100]))
        for _ in range(2):
            with pytest.raises(QuireError) as caught:
                await journal.read("r")
            assert caught.value.code is ErrorCode.INTERNAL
        with pytest.raises(QuireError) as caught:
            await journal.claim("r")
        assert caught.value.code is ErrorCode.INTERNAL
        assert await redis.hget(keys("r")[0], "reason") == b"error"
        assert await journal.claim("r") is None


async def test_a_finished_record_that_lost_tokens_is_damaged(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        tell(journal, lease, 0, [1, 2])
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        await redis.set(keys("r")[1], pack_tokens([1]))
        for call in (journal.read("r"), journal.follow("r").look()):
            with pytest.raises(QuireError) as caught:
                await call
            assert caught.value.code is ErrorCode.INTERNAL


async def test_the_index_of_background_requests_is_put_right(server: RedisServer) -> None:
    async with journal_at(server, settings=WriterSettings(lease=600)) as journal, redis_at(server) as redis:
        lost, held, ended = (replace(request(name), background=True) for name in ("lost", "held", "ended"))
        leases = {each.request_id: journal.open(each) for each in (lost, held, ended)}
        await flushed(journal)
        assert await redis.zcard(BACKGROUND) == 3
        assert await redis.ttl(BACKGROUND) > 0
        assert await redis.zscore(BACKGROUND, "held") > (await redis.time())[0] * 1000 + 60_000
        journal.finish(leases["ended"], FinishReason.STOP)
        await flushed(journal)
        assert await redis.zcard(BACKGROUND) == 2
        await redis.zadd(BACKGROUND, dict.fromkeys(("held", "ended", "never", "strange"), 0))
        await redis.set(keys("strange")[0], "x")
        await expire(server, "lost")
        await redis.zadd(BACKGROUND, {"lost": 0})
        assert await journal.orphans() == ["lost"]
        assert sorted(await redis.zrange(BACKGROUND, 0, -1)) == [b"held", b"lost"]


# Secrets


async def test_a_password_is_used_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire_router")
    with redis_server(password="correct-horse") as server:
        async with journal_at(server) as journal:
            journal.open(request(prompt=[424242]))
            await flushed(journal)
            assert journal.available
        wrong = RedisJournal(server.url.replace("correct", "wrong"), owner="me", timeout=0.1)
        wrong.open(request(prompt=[424242]))
        await asyncio.sleep(0.1)
        assert not wrong.available
        await wrong.close()
    assert caplog.records
    assert not [text for text in ("horse", "424242") if text in caplog.text]


@pytest.mark.parametrize("url", ["http://:horse@host", "redis://:horse/2@host:6379", "horse"])
def test_a_malformed_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="the Redis URL is not") as caught:
        RedisJournal(url)
    assert "horse" not in str(caught.value)


def test_equal_requests_are_stored_as_equal_bytes() -> None:
    generation = request()
    assert encode_request(generation) == encode_request(replace(generation))
    assert encode_request(generation) != encode_request(replace(generation, created=generation.created + 1))
