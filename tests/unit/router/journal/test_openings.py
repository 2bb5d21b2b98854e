"""A router that cancels or dies while it opens a record: no lease is left, and another router finds the record."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import BACKGROUND, keys

from tests.support.byte_tokenizer import tokens
from tests.support.redis_journals import expire, flushed, journal_at, redis_at, small_request, taken
from tests.support.redis_server import RedisServer, redis_server
from tests.support.runner_harness import open_runner
from tests.support.waiting import until

STEPS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.mark.parametrize("background", [False, True])
async def test_a_cancelled_open_leaves_no_lease(server: RedisServer, *, background: bool) -> None:
    """Cancelled after any number of steps of the loop, of which opening has fewer."""
    async with journal_at(server) as journal, journal_at(server, owner="you") as other:
        opened = 0
        for step in range(STEPS):
            name = f"{background}-{step}"
            opening = asyncio.create_task(journal.open_if_absent(replace(small_request(name), background=background)))
            for _ in range(step):
                await asyncio.sleep(0 if step < STEPS // 2 else 0.0003)
            opening.cancel()
            (lease,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(lease, BaseException):
                assert lease is not None
                journal.release(lease)
                opened += 1
            while journal._openings:
                await asyncio.wait(journal._openings)
            await asyncio.sleep(0)
            await flushed(journal)
            assert journal._buffer.get(name) is None
            record = await other.read(name)
            assert record is None or not record.leased
            if record is not None and background:
                assert name in await other.orphans()
                journal.finish((await taken(journal, name))[1], FinishReason.STOP)
                await flushed(journal)
        assert opened < STEPS


async def test_a_background_request_is_found_although_its_router_died_before_writing_anything(
    server: RedisServer,
) -> None:
    async with journal_at(server, settings=JournalSettings(lease=9, settle=0)) as dying, redis_at(server) as redis:
        lease = await dying.open_if_absent(replace(small_request("dead"), background=True))
        assert lease is not None
        entry = dying._buffer.get("dead")
        assert entry is not None
        dying._buffer.remove(entry)  # as if it had died in this moment
        async with journal_at(server, owner="you") as journal:
            assert await journal.orphans() == []
            await expire(server, "dead")
            await redis.zadd(BACKGROUND, {"dead": 0}, xx=True)
            assert await journal.orphans() == ["dead"]
            assert (await taken(journal, "dead"))[1].epoch == 2


@pytest.mark.parametrize("epoch", ["x", "inf", "1e308", "0x10", "-1", "9" * 16])
async def test_a_record_that_can_never_be_claimed_leaves_the_index(server: RedisServer, epoch: str) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        for name in ("bad", "good"):
            journal.release(journal.open(replace(small_request(name), background=True)))
        await flushed(journal)
        await redis.hset(keys("bad")[0], "epoch", epoch)
        assert await journal.orphans() == ["good"]
        assert await redis.zscore(BACKGROUND, "bad") is None
        await redis.delete(*keys("bad"), *keys("good"), BACKGROUND)


async def test_a_repeated_background_request_is_adopted_where_its_router_left_it() -> None:
    async with open_runner() as place:
        left = GenerationRequest(
            "r", "m", tokens("x"), SamplingParams(seed=1, max_tokens=5), background=True, digest="ab"
        )
        place.journal.release(place.journal.open(left))
        assert not await place.lifecycle.start(left)
        assert (await place.engine.submit()).request_id.startswith("r")
        assert not await place.lifecycle.start(left)  # it runs here now
        assert place.lifecycle.in_flight == 1
        waiting = replace(left, request_id="w", background=False)
        place.journal.release(place.journal.open(waiting))
        assert not await place.lifecycle.start(waiting)  # it is no background request: its client may come back
        assert place.lifecycle.in_flight == 1
        assert await place.lifecycle.cancel("r")
        await until(lambda: place.lifecycle.in_flight == 0)
