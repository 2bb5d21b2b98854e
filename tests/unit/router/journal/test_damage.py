"""What others did to the records in Redis costs only these records, and is never taken for what was sent."""

from collections.abc import Iterator

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.journal.base import DeliveredChoice
from quire_router.journal.codec import pack_tokens
from quire_router.journal.redis.redis_connection import keys
from redis.asyncio import Redis

from tests.support.journals import Seen, append_tokens, seen
from tests.support.redis_journals import counted, flushed, journal_at, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_a_key_of_something_else_costs_only_its_own_request(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        await redis.set(keys("bad")[0], "not a hash")
        append_tokens(journal, journal.open(small_request("bad")), 0, [1])
        append_tokens(journal, journal.open(small_request("good")), 0, [1])
        await flushed(journal)
        assert await journal.read("good") is not None
        assert await redis.get(keys("bad")[0]) == b"not a hash"


async def test_a_damaged_record_is_an_internal_error(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.open(small_request())
        await flushed(journal)
        stored = await redis.hget(keys("r")[0], "request")
        for damaged in (b"{}", b"[]", b'"x"', b"[" * 100_000, stored.replace(b'"n":1', b'"n":0')):
            await redis.hset(keys("r")[0], "request", damaged)
            for call in (journal.read("r"), journal.follow("r").poll()):
                with pytest.raises(QuireError) as caught:
                    await call
                assert caught.value.code is ErrorCode.INTERNAL


BREAKAGE = {
    "the record is something else": (0, "rpush", "x"),
    "the tokens are something else": (1, "rpush", "x"),
    "the epoch is no number": (0, "hset", "epoch"),
}


@pytest.mark.parametrize("kind", BREAKAGE)
async def test_a_damaged_record_is_skipped_and_the_others_continue(kind: str, server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        leases = [journal.open(small_request(name)) for name in ("bad", "good")]
        await flushed(journal)
        await break_record(redis, kind)
        before = counted("quire_journal_dropped_writes_total")
        for token_id in range(3):
            for lease in leases:
                append_tokens(journal, lease, token_id, [token_id])
            await flushed(journal)
            assert journal.available
        assert counted("quire_journal_dropped_writes_total") == before + 1
        assert seen(await journal.read("good")) == Seen(small_request("good"), "me", 1, [DeliveredChoice([0, 1, 2])])
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
        journal.release(journal.open(small_request()))
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
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1, 2])
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        await redis.set(keys("r")[1], pack_tokens([1]))
        for call in (journal.read("r"), journal.follow("r").poll()):
            with pytest.raises(QuireError) as caught:
                await call
            assert caught.value.code is ErrorCode.INTERNAL
