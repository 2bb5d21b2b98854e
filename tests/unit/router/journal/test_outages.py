"""While Redis is away, hangs or has lost what it had: nothing waits for it, and what it lost it gets again."""

import asyncio
import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.journal import journal_writer
from quire_router.journal.base import DeliveredChoice, RecordedDelta
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis import redis_connection
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.support.journals import Heard, Seen, append_tokens, seen
from tests.support.redis_journals import flushed, journal_at, out_of_memory, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server, settable_clock
from tests.support.waiting import until


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_without_redis_everything_goes_on_and_is_written_when_it_comes() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as journal:
            lease = journal.open(small_request())
            append_tokens(journal, lease, 0, [1, 2, 3])
            await asyncio.sleep(0.1)
            assert not journal.available
            with pytest.raises(QuireError) as caught:
                await journal.read("r")
            assert caught.value.code is ErrorCode.UNAVAILABLE
            append_tokens(journal, lease, 3, [4])
            server.start()
            await flushed(journal)
            assert journal.available
            record = await journal.read("r")
            assert record is not None
            assert record.choices[0].token_ids == [1, 2, 3, 4]


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the journal complained about; a library may log of something else in the same seconds."""
    journal = "quire_router.journal"
    return [each for each in caplog.records if each.levelno >= logging.WARNING and each.name.startswith(journal)]


REFUSALS = {"out of memory": "maxmemory", "too few replicas": "min-replicas-to-write"}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_redis_that_answers_but_does_not_write_is_one_outage(
    kind: str, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = JournalSettings(lease=0.03)  # so that Redis is asked, and answers, many times
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        await flushed(journal)
        await redis.config_set(REFUSALS[kind], 1)
        before = await script_loads(redis)
        append_tokens(journal, lease, 0, [1])
        await until(lambda: not journal.available)
        for _ in range(100):
            await asyncio.sleep(0.01)
            assert not journal.available
        assert len(complaints(caplog)) == 1
        assert await script_loads(redis) == before
        assert await rejected(redis) < 20
        await redis.config_set(REFUSALS[kind], 0)
        await flushed(journal)
        assert journal.available
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [1]


UNWRITABLE = {
    "out of memory": (("config", "set", "maxmemory", "1"), ("config", "set", "maxmemory", "0")),
    "a replica": (("replicaof", "127.0.0.1", "1"), ("replicaof", "no", "one")),
    "writes wait, as in a failover": (("client", "pause", "30000", "write"), ("client", "unpause")),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
async def test_a_record_that_redis_refuses_is_not_unknown_to_a_router_that_writes_nothing(
    kind: str, server: RedisServer
) -> None:
    break_it, mend_it = UNWRITABLE[kind]
    looks_on = JournalSettings(settle=1.0)
    async with (
        journal_at(server) as holder,
        journal_at(server, "other", settings=looks_on, timeout=1.0) as other,
        redis_at(server) as redis,
    ):
        await settled(other)
        assert await redis.execute_command(*break_it)
        append_tokens(holder, holder.open(small_request()), 0, [1])
        with pytest.raises(QuireError) as caught:
            await other.read("r")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert await redis.execute_command(*mend_it)
        await flushed(holder)
        assert seen(await other.read("r")) == Seen(small_request(), "me", 1, [DeliveredChoice([1])])


@pytest.mark.parametrize(("others", "writes", "away"), [(True, True, False), (True, False, True), (False, True, True)])
async def test_an_exchange_that_waits_while_others_are_answered_is_no_outage(
    others: bool, writes: bool, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(redis_connection, "monotonic", lambda: now[0])
    async with Redis() as client:
        server = redis_connection.RedisHealth(client, settle=60)
        with server.track_exchange(writes=True):
            for _ in range(10):
                if others:
                    with server.track_exchange(writes=writes):
                        now[0] += 0.2
                else:
                    now[0] += 0.2
        assert server.is_settling is away


@pytest.mark.parametrize("kind", UNWRITABLE)
@pytest.mark.parametrize("background", [False, True])
async def test_the_first_request_after_redis_starts_to_refuse_writes_is_reported_as_not_durable(
    kind: str, server: RedisServer, *, background: bool
) -> None:
    break_it, mend_it = UNWRITABLE[kind]
    settings = JournalSettings(lease=9, settle=0)  # it looks at Redis every two seconds or so
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        journal.start()
        await until(lambda: journal.available)
        assert await redis.execute_command(*break_it)
        assert await journal.open_if_absent(replace(small_request(), background=background)) is not None
        assert not journal.available
        assert await redis.execute_command(*mend_it)
        await flushed(journal)
        assert journal.available


async def test_a_reply_from_before_redis_refused_a_request_does_not_make_the_journal_available(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replied, release = asyncio.Event(), asyncio.Event()
    execute = redis_connection.PipelinedConnection.execute

    async def execute_late(self: redis_connection.PipelinedConnection, commands: Iterable[bytes]) -> list[Any]:
        replies = await execute(self, commands)
        replied.set()
        await release.wait()
        return replies

    settings = JournalSettings(lease=9, settle=0, pause=60)  # it writes once, and not again within the test
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        monkeypatch.setattr(redis_connection.PipelinedConnection, "execute", execute_late)
        journal.open(small_request("before"))
        await replied.wait()
        async with out_of_memory(redis):
            assert await journal.open_if_absent(replace(small_request(), background=True)) is not None
            release.set()
            for _ in range(20):
                await asyncio.sleep(0.005)
                assert not journal.available


async def test_a_request_that_redis_refused_is_not_durable_before_it_is_written(server: RedisServer) -> None:
    async with journal_at(server, settings=JournalSettings(settle=0, pause=1.5)) as journal, redis_at(server) as redis:
        journal.open(small_request("first"))
        await flushed(journal)  # from now on it pauses
        async with out_of_memory(redis):
            assert await journal.open_if_absent(replace(small_request(), background=True)) is not None
        journal.open(small_request("other"))
        journal._writer.available = True  # as after a heartbeat
        assert journal.is_durable(["first"])
        assert not journal.is_durable(["first", "r"])
        await flushed(journal)
        assert journal.is_durable(["first", "r"])


async def test_a_write_that_changed_nothing_does_not_make_the_journal_available(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "MAX_WRITES_PER_FLUSH", 1)
    async with journal_at(server, settings=JournalSettings(settle=0, pause=0.5)) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        await flushed(journal)  # from now on it pauses
        assert await redis.hset(keys("r")[0], "epoch", 2) == 0  # another router's
        async with out_of_memory(redis):
            append_tokens(journal, lease, 0, [1])
            assert await journal.open_if_absent(small_request("refused")) is not None
            for _ in range(80):
                await asyncio.sleep(0.01)
                assert not journal.available
        await flushed(journal)
        await until(lambda: journal.available)


@pytest.mark.parametrize("kind", UNWRITABLE)
async def test_an_idle_router_notices_that_redis_takes_no_writes_and_that_it_does_again(
    kind: str, server: RedisServer
) -> None:
    break_it, mend_it = UNWRITABLE[kind]
    settings = JournalSettings(lease=0.2, settle=0)
    async with journal_at(server, settings=settings, timeout=0.5) as journal, redis_at(server) as redis:
        journal.start()
        await until(lambda: journal.available)
        assert await redis.execute_command(*break_it)
        await until(lambda: not journal.available)
        assert await redis.execute_command(*mend_it)
        await until(lambda: journal.available)


async def script_loads(redis: Redis) -> int:
    return (await calls(redis, "script|load"))["calls"]


async def rejected(redis: Redis) -> int:
    """How often scripts were tried in vain."""
    stats = await calls(redis, "evalsha")
    return stats["failed_calls"] + stats["rejected_calls"]


async def calls(redis: Redis, command: str) -> dict[str, int]:
    return (await redis.info("commandstats"))[f"cmdstat_{command}"]


async def test_records_that_a_redis_out_of_memory_lost_are_written_again(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        generation = small_request()
        lease = journal.open(generation)
        append_tokens(journal, lease, 0, [1, 2])
        await flushed(journal)
        server.restart()
        append_tokens(journal, lease, 2, [3])
        await flushed(journal)
        assert seen(await journal.read("r")) == Seen(generation, "me", 1, [DeliveredChoice([1, 2, 3])])


async def test_tokens_that_were_lost_alone_are_written_again(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1, 2])
        await flushed(journal)
        await redis.delete(keys("r")[1])
        append_tokens(journal, lease, 2, [3])
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([1, 2, 3], FinishReason.STOP)


async def test_scripts_that_redis_flushed_are_loaded_again_without_a_pause(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        await flushed(journal)
        await redis.script_flush()
        append_tokens(journal, lease, 0, [1])
        await flushed(journal)
        assert not complaints(caplog)
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [1]


async def test_a_redis_that_hangs_delays_no_running_request(server: RedisServer) -> None:
    journal = RedisJournal(server.url, owner="me", timeout=0.1)
    lease = journal.open(small_request())
    await flushed(journal)
    server.signal(signal.SIGSTOP)
    try:
        for position in range(100):
            append_tokens(journal, lease, position, [position])
        await until(lambda: not journal.available)
        async with asyncio.timeout(10):
            await journal.close()
    finally:
        server.signal(signal.SIGCONT)


async def test_without_redis_a_request_is_opened_once_at_each_router() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as journal:
            lease = await journal.open_if_absent(small_request())
            assert lease is not None
            assert await journal.open_if_absent(replace(small_request(), created=1.0)) is None
            append_tokens(journal, lease, 0, [1])
            for call in (
                journal.claim("other"),
                journal.cancel("other"),
                journal.orphans(),
                journal.follow("r").poll(),
            ):
                with pytest.raises(QuireError) as caught:
                    await call
                assert caught.value.code is ErrorCode.UNAVAILABLE
            server.start()
            await flushed(journal)
            assert seen(await journal.read("r")) == Seen(small_request(), "me", 1, [DeliveredChoice([1])])


async def test_of_two_routers_that_opened_a_request_without_redis_one_loses_its_lease() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
            heard = {owner: Heard() for owner in ("me", "you")}
            for journal, owner, created in ((mine, "me", 1.0), (yours, "you", 2.0)):
                journal.set_listener(heard[owner])
                lease = await journal.open_if_absent(replace(small_request(), created=created))
                assert lease is not None
                append_tokens(journal, lease, 0, [1])
            server.start()
            await flushed(mine)
            await flushed(yours)
            record = await mine.read("r")
            assert record is not None
            assert {owner: each.taken for owner, each in heard.items()} == {
                owner: [] if owner == record.owner else ["r"] for owner in heard
            }


async def test_a_redis_that_hangs_delays_a_new_request_only_briefly(server: RedisServer) -> None:
    async with journal_at(server, timeout=60) as journal:
        server.signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):  # less than the client would wait
                assert await journal.open_if_absent(small_request()) is not None
        finally:
            server.signal(signal.SIGCONT)
        await flushed(journal)
        assert await journal.read("r") is not None


async def test_a_follower_gets_no_delta_until_lost_ones_are_written_again(server: RedisServer) -> None:
    async with journal_at(server, settings=JournalSettings()) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1, 2, 3])
        await flushed(journal)
        follower = journal.follow("r")
        await follower.poll()
        await redis.delete(keys("r")[1])
        tail = await follower.poll()
        assert tail is not None
        assert (tail.deltas, tail.leased) == ([], True)
        server.restart()
        tail = await follower.poll()
        assert tail is not None
        assert (tail.deltas, tail.leased) == ([], True)
        append_tokens(journal, lease, 3, [4])
        await flushed(journal)
        tail = await follower.poll()
        assert tail is not None
        assert tail.deltas == [RecordedDelta(0, [4])]


async def test_a_record_that_redis_may_have_lost_is_not_unknown_before_routers_could_rewrite_it(
    server: RedisServer,
) -> None:
    async with (
        journal_at(server) as journal,
        journal_at(server, owner="you", settings=JournalSettings(lease=1.0, settle=1.0)) as yours,
    ):
        lease = journal.open(small_request())
        yours.start()
        await flushed(journal)
        await settled(yours)
        follower = yours.follow("unknown")
        server.restart()
        with pytest.raises(QuireError) as caught:
            await yours.read("unknown")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        tail = await follower.poll()
        assert tail is not None
        assert (tail.deltas, tail.finish_reason, tail.leased) == ([], None, True)
        append_tokens(journal, lease, 0, [1])
        await flushed(journal)
        assert await yours.read("r") is not None
        await settled(yours)
        assert await follower.poll() is None


async def settled(journal: RedisJournal) -> None:
    """Returns once what is not there is unknown."""
    async with asyncio.timeout(20):
        while True:
            with suppress(QuireError):
                assert await journal.read("unknown") is None
                return
            await asyncio.sleep(0.05)


async def test_a_record_missing_after_redis_hung_is_not_unknown_yet(server: RedisServer) -> None:
    async with journal_at(server, settings=JournalSettings(settle=1.0)) as journal:
        journal.start()
        await settled(journal)
        server.signal(signal.SIGSTOP)
        reading = asyncio.create_task(journal.read("unknown"))
        await asyncio.sleep(0.6)
        server.signal(signal.SIGCONT)
        with pytest.raises(QuireError) as caught:
            await reading
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_nothing_is_claimed_before_routers_could_rewrite_their_records() -> None:
    settings = JournalSettings(lease=0.2, settle=2.0)
    with redis_server(persistent=True) as server:
        async with (
            journal_at(server, settings=settings) as mine,
            journal_at(server, owner="you", settings=settings) as yours,
        ):
            lease = mine.open(replace(small_request(), background=True))
            yours.start()
            await flushed(mine)
            await until(lambda: yours.available)
            assert await yours.orphans() == []
            server.kill()
            await asyncio.sleep(0.3)  # the lease is over
            server.start()
            await until(lambda: yours.available)
            assert await yours.claim("r") is None
            assert await yours.orphans() == []
            append_tokens(mine, lease, 0, [1])
            await flushed(mine)
            mine.release(lease)
            await flushed(mine)
            async with asyncio.timeout(20):
                while (claimed := await yours.claim("r")) is None:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)
            assert claimed[0].choices == [DeliveredChoice([1])]


async def test_a_router_that_comes_after_redis_gives_the_others_the_same_time() -> None:
    with redis_server(persistent=True) as server:
        async with journal_at(server) as mine:
            mine.release(mine.open(replace(small_request(), background=True)))
            await flushed(mine)
        server.restart()
        async with journal_at(server, owner="you", settings=JournalSettings(settle=2.0)) as late:
            assert await late.claim("r") is None
            assert await late.orphans() == []
            with pytest.raises(QuireError) as caught:
                await late.read("unknown")
            assert caught.value.code is ErrorCode.UNAVAILABLE
            await settled(late)
            assert await late.orphans() == ["r"]
            assert await late.claim("r") is not None


async def test_a_clock_of_redis_that_goes_back_to_before_its_start_is_no_outage(tmp_path: Path) -> None:
    """Its age, by which a router knows that others may still have to write, is below zero from then on."""
    settings = JournalSettings(lease=0.1, settle=0.2)  # of the first it looks every few hundredths of a second
    with redis_server(clock=settable_clock(tmp_path)) as server:
        assert server.clock is not None
        async with journal_at(server, settings=settings) as journal, journal_at(server, settings=settings) as later:
            journal.start()
            await until(lambda: journal.available)
            await settled(journal)
            server.clock.move(-600)
            later.start()
            await until(lambda: later.available)
            await asyncio.sleep(0.5)
            for each in (journal, later):
                await settled(each)


@pytest.mark.parametrize("other", [[7], [7, 8, 9, 10]], ids=["shorter and ended", "longer"])
async def test_a_follower_never_gets_another_request(server: RedisServer, other: list[int]) -> None:
    async with journal_at(server) as mine, journal_at(server, owner="you") as yours:
        append_tokens(mine, mine.open(small_request()), 0, [1, 2, 3])
        await flushed(mine)
        follower = yours.follow("r")
        await follower.poll()
        server.restart()
        lease = yours.open(replace(small_request(), created=1.0))
        append_tokens(yours, lease, 0, other)
        yours.finish(lease, FinishReason.STOP)
        await flushed(yours)
        with pytest.raises(QuireError) as caught:
            await follower.poll()
        assert caught.value.code is ErrorCode.INTERNAL
