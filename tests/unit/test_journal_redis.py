"""What the Redis journal promises beyond the protocol: nothing waits for Redis, and what Redis lost it gets again."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.generation import Generation
from quire_router.journal.base import Delivered, Record
from quire_router.journal.codec import encode_request
from quire_router.journal.redis import RedisJournal
from quire_router.journal.writer import WriterSettings, keys
from redis.asyncio import Redis

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
    return Generation(request_id, "m", [1, 2] if prompt is None else prompt, SamplingParams(seed=3))


async def flushed(journal: RedisJournal) -> None:
    await asyncio.wait_for(journal.flush(), 15)


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0


# Redis goes away


async def test_without_redis_everything_goes_on_and_is_written_when_it_comes() -> None:
    with redis_server(started=False) as server:
        async with journal_at(server) as journal:
            lease = journal.open(request())
            journal.append(lease, 0, [1, 2, 3])
            await asyncio.sleep(0.1)
            assert not journal.available
            with pytest.raises(QuireError) as caught:
                await journal.read("r")
            assert caught.value.code is ErrorCode.UNAVAILABLE
            journal.append(lease, 3, [4])
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
        journal.append(lease, 0, [1])
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
        journal.append(lease, 0, [1, 2])
        await flushed(journal)
        server.restart()
        journal.append(lease, 2, [3])
        await flushed(journal)
        assert await journal.read("r") == Record(generation, "me", 1, [Delivered([1, 2, 3])])


async def test_tokens_that_were_lost_alone_are_written_again(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        journal.append(lease, 0, [1, 2])
        await flushed(journal)
        await redis.delete(keys("r")[1])
        journal.append(lease, 2, [3])
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
        journal.append(lease, 0, [1])
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
            journal.append(lease, position, [position])
        await until(lambda: not journal.available)
        async with asyncio.timeout(10):
            await journal.close()
    finally:
        server.signal(signal.SIGCONT)


async def test_closing_writes_what_is_pending(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(request())
        journal.append(lease, 0, [1])
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
            journal.append(third, 0, [1])
            journal.append(first, 0, [1] * 90)
            journal.append(second, 0, [1] * 90)
            assert counted("quire_journal_dropped_writes_total") == before + 2
            journal.append(first, 90, [2])
            server.start()
            await flushed(journal)
            record = await journal.read("first")
            assert record is not None
            assert record.choices[0].token_ids == [1] * 90 + [2]
            assert await journal.read("second") is None
            assert await journal.read("third") is None
            journal.append(journal.open(request("fourth")), 0, [1] * 97)  # there is room again
            await flushed(journal)
            assert await journal.read("fourth") is not None


async def test_long_outputs_are_written_in_pieces(server: RedisServer) -> None:
    async with journal_at(server) as journal:
        lease = journal.open(request())
        journal.append(lease, 0, list(range(200_000)))
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
        journal.append(lease, 0, [1])
        await flushed(journal)
        await redis.hset(keys("r")[0], mapping={"owner": "other", "epoch": 2})
        before = counted("quire_stale_epoch_rejections_total")
        for token_ids in tokens:
            journal.append(lease, 1, token_ids)
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
        mine.append(lease, 0, [1])
        await flushed(mine)
        stolen = yours.open(generation)
        yours.append(stolen, 0, [8, 9])
        await flushed(yours)
        assert await yours.read("r") == Record(generation, "me", 1, [Delivered([1])])


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


# How long it is kept


async def test_a_record_is_kept_long_while_it_runs_and_for_the_retention_time_afterwards(server: RedisServer) -> None:
    settings = WriterSettings(retention=60, running_ttl=5000)
    async with journal_at(server, settings=settings) as journal, redis_at(server) as redis:
        lease = journal.open(request())
        journal.append(lease, 0, [1])
        await flushed(journal)
        for key in keys("r"):
            assert 4990 <= await redis.ttl(key) <= 5000
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        for key in keys("r"):
            assert 50 <= await redis.ttl(key) <= 60


async def test_every_key_of_a_request_is_in_one_slot_and_expires(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.append(journal.open(request("abc")), 0, [1])
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
        journal.append(journal.open(request("bad")), 0, [1])
        journal.append(journal.open(request("good")), 0, [1])
        await flushed(journal)
        assert await journal.read("good") is not None
        assert await redis.get(keys("bad")[0]) == b"not a hash"


async def test_a_damaged_record_is_our_fault(server: RedisServer) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        journal.open(request())
        await flushed(journal)
        await redis.hset(keys("r")[0], "request", "{}")
        with pytest.raises(QuireError) as caught:
            await journal.read("r")
        assert caught.value.code is ErrorCode.INTERNAL


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
