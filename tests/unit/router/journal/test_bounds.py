"""How much a journal in Redis holds, how long it keeps it, and that it shows nothing."""

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from quire_proto.sampling import FinishReason
from quire_router.journal.codec import JournalSettings, encode_request
from quire_router.journal.redis.redis_connection import LEDGER, keys
from quire_router.journal.redis.redis_journal import RedisJournal

from tests.support.journals import append_tokens
from tests.support.redis_journals import counted, flushed, journal_at, redis_at, small_request, taken
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_closing_writes_what_is_pending(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1])
        journal.finish(lease, FinishReason.STOP)
    async with journal_at(server) as other:
        record = await other.read("r")
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([1], FinishReason.STOP)


async def test_unwritten_records_are_bounded_in_requests_and_in_tokens() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server, max_requests=2, max_tokens=100) as journal:
            before = counted("quire_journal_dropped_writes_total")
            first = journal.open(small_request("first"))
            second = journal.open(small_request("second"))
            third = journal.open(small_request("third"))
            assert counted("quire_journal_dropped_writes_total") == before + 1
            append_tokens(journal, third, 0, [1])
            append_tokens(journal, first, 0, [1] * 90)
            append_tokens(journal, second, 0, [1] * 90)
            assert counted("quire_journal_dropped_writes_total") == before + 2
            append_tokens(journal, first, 90, [2])
            server.start()
            await flushed(journal)
            record = await journal.read("first")
            assert record is not None
            assert record.choices[0].token_ids == [1] * 90 + [2]
            assert await journal.read("second") is None
            assert await journal.read("third") is None
            append_tokens(journal, journal.open(small_request("fourth")), 0, [1] * 97)  # there is room again
            await flushed(journal)
            assert await journal.read("fourth") is not None


async def test_a_router_holds_nothing_of_requests_that_have_ended(server: RedisServer) -> None:
    """Whether they were finished, cancelled here or elsewhere, released or taken by another router."""
    quick = JournalSettings(pause=0.0005, settle=0)
    async with journal_at(server, settings=quick) as mine, journal_at(server, owner="you", settings=quick) as yours:
        held = []
        tracemalloc.start()
        try:
            for rounds in (10, 20, 20):
                for number in range(rounds):
                    await end_in_every_way(mine, yours, f"{len(held)}-{number}")
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert held[2] - held[1] < 5 * 20 * 300  # bytes: a record takes some kilobytes


async def end_in_every_way(mine: RedisJournal, yours: RedisJournal, name: str) -> None:
    """Five requests."""
    names = [f"{name}-{way}" for way in range(5)]
    leases = [mine.open(replace(small_request(each, [1] * 200), background=True)) for each in names]
    for lease in leases:
        append_tokens(mine, lease, 0, [1] * 200)
    mine.release(leases[0])
    await flushed(mine)
    taken_over = await taken(yours, names[0])
    yours.finish(taken_over[1], FinishReason.STOP)
    mine.finish(leases[1], FinishReason.STOP)
    await mine.cancel(names[2])
    mine.release(leases[2])
    await yours.cancel(names[3])
    mine.finish(leases[3], FinishReason.ABORT)
    mine.release(leases[4])
    await mine.follow(names[4]).poll()
    await flushed(mine)
    await flushed(yours)
    await yours.cancel(names[4])
    await yours.orphans()


async def test_long_outputs_are_written_in_parts(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, list(range(200_000)))
        journal.finish(lease, FinishReason.LENGTH)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == list(range(200_000))
        assert record.finish_reason is FinishReason.LENGTH


async def test_a_running_record_expires_late_and_a_finished_one_after_the_retention_time(server: RedisServer) -> None:
    settings = JournalSettings(retention=60, running_ttl=5000)
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1])
        await flushed(journal)
        for key in keys("r"):
            assert 4990 <= await redis.ttl(key) <= 5000
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        for key in keys("r"):
            assert 50 <= await redis.ttl(key) <= 60


async def test_every_key_of_a_request_is_in_one_slot_and_expires(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        append_tokens(journal, journal.open(small_request("abc")), 0, [1])
        await flushed(journal)
        names = [name if isinstance(name, str) else name.decode() for name in await redis.keys("*")]
        assert names
        for name in names:
            assert "{abc}" in name or name in LEDGER
            assert await redis.ttl(name) > 0


async def test_a_password_is_used_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire_router")
    with redis_server(password="correct-horse") as server:
        async with journal_at(server) as journal:
            journal.open(small_request(prompt=[424242]))
            await flushed(journal)
            assert journal.available
        wrong = RedisJournal(server.url.replace("correct", "wrong"), owner="me", timeout=0.1)
        wrong.open(small_request(prompt=[424242]))
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
    generation = small_request()
    assert encode_request(generation) == encode_request(replace(generation))
