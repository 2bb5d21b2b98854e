"""Background requests without a lease are found in Redis, whatever else its index names."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from quire_proto.sampling import FinishReason
from quire_router.journal.base import Lease
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_connection import BACKGROUND, keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.support.redis_journals import (
    expire,
    flushed,
    journal_at,
    out_of_memory,
    redis_at,
    small_request,
    taken,
    turn_clock_back,
)
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until

UNLISTED = """
local unlisted = {}
for _, name in ipairs(ARGV) do
  local epoch, reason = unpack(redis.call('HMGET', 'quire:{' .. name .. '}:record', 'epoch', 'reason'))
  if epoch and not reason and not redis.call('ZSCORE', KEYS[1], name) then
    unlisted[#unlisted + 1] = name
  end
end
return unlisted
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_the_index_of_background_requests_is_put_right(server: RedisServer) -> None:
    async with journal_at(server, settings=JournalSettings(lease=9, settle=0)) as journal, redis_at(server) as redis:
        lost, held, ended = (replace(small_request(name), background=True) for name in ("lost", "held", "ended"))
        leases = {each.request_id: journal.open(each) for each in (lost, held, ended)}
        await flushed(journal)
        assert await redis.zcard(BACKGROUND) == 3
        assert await redis.ttl(BACKGROUND) > 0
        assert await redis.zscore(BACKGROUND, "held") > (await redis.time())[0] * 1000
        journal.finish(leases["ended"], FinishReason.STOP)
        await flushed(journal)
        assert await redis.zcard(BACKGROUND) == 2
        await redis.zadd(BACKGROUND, dict.fromkeys(("held", "ended", "never", "strange"), 0))
        await redis.set(keys("strange")[0], "x")
        await expire(server, "lost")
        await redis.zadd(BACKGROUND, {"lost": 0})
        assert await journal.orphans() == ["lost"]
        assert sorted(await redis.zrange(BACKGROUND, 0, -1)) == [b"held", b"lost"]


async def test_an_index_entry_without_a_record_delays_no_other(server: RedisServer) -> None:
    """However many before it have ended, are held again or were never there."""
    async with journal_at(server) as journal, redis_at(server) as redis:
        leases = {name: journal.open(replace(small_request(name), background=True)) for name in ("mine", "held")}
        journal.release(leases["mine"])
        await flushed(journal)
        vain = [f"vain-{number:03}" for number in range(500)]
        await redis.zadd(BACKGROUND, dict.fromkeys(["held", *vain, b"\xff"], -1))
        found = [await journal.orphans() for _ in range(9)]
        assert ["mine"] in found
        assert sorted(await redis.zrange(BACKGROUND, 0, -1)) == [b"held", b"mine"]


async def test_orphans_that_no_router_adopts_do_not_hide_later_ones(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        for number in range(100):
            journal.release(journal.open(replace(small_request(f"foreign-{number}"), background=True)))
        await flushed(journal)
        await journal.orphans()
        for number in range(20):
            journal.release(journal.open(replace(small_request(f"mine-{number}"), background=True)))
        await flushed(journal)
        found = {name for _ in range(16) for name in await journal.orphans()}
        assert {f"mine-{number}" for number in range(20)} <= found


async def begun(journal: RedisJournal, name: str) -> Lease:
    """A background request that is written down."""
    lease = await journal.open_if_absent(replace(small_request(name), background=True))
    assert lease is not None
    await flushed(journal)
    return lease


async def unlisted(redis: Redis, *names: str) -> list[bytes]:
    """Those that have begun and not ended and are not in the index: whoever looks for orphans never finds them."""
    found: list[bytes] = await redis.eval(UNLISTED, 1, BACKGROUND, *names)
    return found


async def test_a_background_request_whose_end_redis_refuses_stays_in_the_index(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = await begun(journal, "r")
        async with out_of_memory(redis):
            journal.finish(lease, FinishReason.STOP)
            await until(lambda: not journal.available)
            assert await unlisted(redis, "r") == []
            assert await redis.zscore(BACKGROUND, "r") is not None
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.finish_reason, await redis.zscore(BACKGROUND, "r")) == (FinishReason.STOP, None)


async def test_a_background_request_that_begins_while_redis_is_out_of_memory_is_there_whole_or_not_at_all(
    server: RedisServer,
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.start()
        await until(lambda: journal.available)
        async with out_of_memory(redis):
            journal.open(replace(small_request(), background=True))
            await until(lambda: not journal.available)
            assert await redis.exists(*keys("r"), BACKGROUND) == 0
        await flushed(journal)
        assert await redis.exists(keys("r")[0], BACKGROUND) == 2


async def test_no_moment_of_a_redis_that_forgets_its_scripts_leaves_a_background_request_out_of_the_index(
    server: RedisServer,
) -> None:
    names = [f"r-{number}" for number in range(60)]
    async with (
        journal_at(server, settings=JournalSettings(settle=0, pause=0.001)) as journal,
        redis_at(server) as redis,
    ):
        violations: set[bytes] = set()
        watches = True

        async def watch() -> None:
            pause = 0.002
            while watches:  # a client may swallow a cancellation that comes with an answer
                await redis.script_flush()
                violations.update(await unlisted(redis, *names))
                await asyncio.sleep(pause)
                pause *= 1.02  # on a busy machine nothing would ever be written between two of them

        watching = asyncio.create_task(watch())
        leases = [journal.open(replace(small_request(name), background=True)) for name in names]
        for lease in leases:
            await asyncio.sleep(0.002)
            journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        watches = False
        await watching
        assert violations == set()
        assert await redis.zcard(BACKGROUND) == 0


async def test_a_former_owner_that_ends_a_record_leased_by_another_leaves_it_in_the_index(server: RedisServer) -> None:
    async with journal_at(server) as former, journal_at(server, "you") as journal, redis_at(server) as redis:
        lease = await begun(former, "r")
        await expire(server, "r")
        await taken(journal, "r")
        await flushed(journal)
        former.finish(lease, FinishReason.STOP)
        await flushed(former)
        assert await unlisted(redis, "r") == []
        assert await redis.zscore(BACKGROUND, "r") is not None


async def test_a_redis_clock_that_goes_back_hides_no_orphan_and_expires_no_live_lease(
    server: RedisServer,
) -> None:
    """Who holds a record says so again within a lease; who is dead does not."""
    settings = JournalSettings(lease=1.0, settle=0)
    async with (
        journal_at(server, settings=settings) as living,
        journal_at(server, "dead", settings=settings) as dead,
        journal_at(server, "you", settings=settings) as journal,
    ):
        await begun(living, "held")
        await begun(dead, "left")
        dead._buffer.remove(dead._buffer.get("left"))  # as if its router had died in this moment
        await turn_clock_back(server, 600.0)
        assert await journal.claim("held") is None
        found: set[str] = set()
        async with asyncio.timeout(30):
            while "left" not in found:
                for name in await journal.orphans():
                    if await journal.claim(name) is not None:
                        found.add(name)
                await asyncio.sleep(0.05)
        assert found == {"left"}
        assert await journal.claim("held") is None
