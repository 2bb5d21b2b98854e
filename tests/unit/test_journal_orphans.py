"""Background requests that nobody holds are found in Redis, whatever else its index names."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from quire_proto.sampling import FinishReason
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.settings import JournalSettings

from tests.support.redis_journals import expire, flushed, journal_at, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_the_index_of_background_requests_is_put_right(server: RedisServer) -> None:
    async with journal_at(server, settings=JournalSettings(lease=600, settle=0)) as journal, redis_at(server) as redis:
        lost, held, ended = (replace(small_request(name), background=True) for name in ("lost", "held", "ended"))
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


async def test_what_the_index_names_in_vain_holds_up_nobody(server: RedisServer) -> None:
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


async def test_orphans_that_nobody_takes_up_do_not_hide_those_that_come_later(server: RedisServer) -> None:
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
