"""A router that finds a request running asks the one that runs it, and depends on no answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason
from quire_router.core.generation import Usage
from quire_router.journal.base import Lease
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis import owner_channel
from quire_router.journal.redis.owner_channel import MAX_ANSWERS, OwnerChannel, channel_of
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.asyncio import Redis

from tests.chaos.proxy import UP, Proxy
from tests.support.journals import append_tokens
from tests.support.redis_journals import flushed, journal_at, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server

SELDOM = JournalSettings(settle=0, end_timeout=60, ask_timeout=60, pause=3600)  # between two flushes nobody asks for
READS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with redis_at(server) as client:
        await client.flushall()
        yield client


@asynccontextmanager
async def two_routers(
    server: RedisServer, settings: JournalSettings = SELDOM
) -> AsyncIterator[tuple[RedisJournal, RedisJournal]]:
    """Both have subscribed. The first one's next flush is due in an hour, unless somebody asks for it."""
    async with journal_at(server, settings=settings) as owner, journal_at(server, "you", settings=settings) as other:
        owner.start()
        other.start()
        async with redis_at(server) as client, asyncio.timeout(60):
            while len(await client.pubsub_channels("quire:journal:*")) < 2:  # noqa: ASYNC110 - Redis does not say
                await asyncio.sleep(0.002)
        yield owner, other


async def running(journal: RedisJournal, request_id: str = "r") -> Lease:
    """Its record is written."""
    lease = await journal.open_if_absent(small_request(request_id))
    assert lease is not None
    append_tokens(journal, lease, 0, [1, 2, 3])
    return lease


READERS = {
    "read": lambda journal, name: journal.read(name),
    "read without log-probabilities": lambda journal, name: journal.read(name, tokens_only=True),
    "status": lambda journal, name: first(journal.statuses([name])),
    "one of several": lambda journal, name: last(journal.statuses(["unknown", name])),
}


async def first(statuses):
    return (await statuses)[0]


async def last(statuses):
    return (await statuses)[-1]


@pytest.mark.parametrize("kind", READERS)
async def test_another_router_sees_an_end_that_is_not_written_yet(server: RedisServer, redis: Redis, kind: str) -> None:
    async with two_routers(server) as (owner, other):
        for number in range(READS):
            owner.finish(await running(owner, f"r{number}"), FinishReason.LENGTH, usage=Usage(2, 3))
            record = await READERS[kind](other, f"r{number}")
            assert record is not None
            assert (record.finish_reason, record.usage) == (FinishReason.LENGTH, Usage(2, 3))


async def test_a_request_that_runs_is_said_to_run(server: RedisServer, redis: Redis) -> None:
    async with two_routers(server) as (owner, other):
        lease = await running(owner)
        for read in READERS.values():
            record = await read(other, "r")
            assert record is not None
            assert (record.finish_reason, record.leased) == (None, True)
        owner.finish(lease, FinishReason.LENGTH)
        assert await owner.flush_end(lease)


async def test_an_end_that_is_deleted_at_another_router_was_the_end(server: RedisServer, redis: Redis) -> None:
    """It is written first, so that what it used is counted from the record."""
    async with two_routers(server) as (owner, other):
        owner.finish(await running(owner), FinishReason.LENGTH, usage=Usage(2, 3))
        assert await other.read("r") is not None
        assert await other.delete("r")
        for journal in (owner, other):
            assert await journal.read("r") is None


async def test_a_router_that_is_gone_is_not_waited_for(server: RedisServer, redis: Redis) -> None:
    """The hour of patience would be over this test's."""
    async with journal_at(server, "you", settings=SELDOM) as other:
        async with journal_at(server) as owner:
            await running(owner)
            await flushed(owner)
        record = await other.read("r")
        assert record is not None
        assert record.finish_reason is None


async def test_a_router_that_does_not_answer_is_asked_once(server: RedisServer, redis: Redis) -> None:
    """It hangs, and Redis does not know that."""
    settings = JournalSettings(settle=0, ask_timeout=0.05)
    async with journal_at(server, "you", settings=settings) as other, redis.pubsub() as hanging:
        async with journal_at(server) as owner:
            await running(owner)
            await flushed(owner)
        await hanging.subscribe(channel_of("me"))
        for _ in range(5):
            record = await other.read("r")
            assert record is not None
            assert record.finish_reason is None
        questions = []
        while (message := await hanging.get_message(timeout=0.05)) is not None:
            questions += [message["data"]] if message["type"] == "message" else []
        assert [json.loads(question)["ids"] for question in questions] == [["r"]]


async def test_reads_go_on_where_no_router_may_subscribe(server: RedisServer, redis: Redis) -> None:
    await redis.execute_command("ACL", "SETUSER", "default", "resetchannels")
    try:
        async with journal_at(server, settings=SELDOM) as owner, journal_at(server, "you", settings=SELDOM) as other:
            lease = await running(owner)
            record = await other.read("r")
            assert record is not None
            assert record.finish_reason is None
            owner.finish(lease, FinishReason.LENGTH)
            assert await owner.flush_end(lease)
    finally:
        await redis.execute_command("ACL", "SETUSER", "default", "allchannels")


async def test_questions_are_answered_again_after_the_connection_broke(
    server: RedisServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_channel, "SILENCE", 0.01)
    proxy = Proxy(server.port)
    await proxy.start()
    client = Redis.from_url(f"redis://{proxy.address}")
    asked: list[list[str]] = []

    async def flush_ends(request_ids: list[str]) -> bool:
        asked.append(request_ids)
        return True

    channel, asking = (
        OwnerChannel(client, "me", flush_ends),
        OwnerChannel(Redis.from_url(server.url), "you", flush_ends),
    )
    try:
        for each in (channel, asking):
            each.start()
        for broken in (False, True):
            if broken:
                proxy.cut()
            async with asyncio.timeout(60):
                while not await asking.ask("me", ["r"]):  # noqa: ASYNC110 - it subscribes again
                    await asyncio.sleep(0.01)
        assert asked[0] == ["r"]
        proxy.break_silently([UP], loses=True)
    finally:
        proxy.heal()
        for each in (channel, asking):
            await each.close()
        await proxy.stop()


@given(
    st.binary(max_size=50)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["ask", "answer", "from", "ids", "ended"]), inner, max_size=5)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_comes_over_the_channel_ends_nothing(data: bytes) -> None:
    async def receive() -> None:
        async def flush_ends(_: object) -> bool:
            return True

        channel = OwnerChannel(Redis(), "me", flush_ends)
        channel._on_message(data)
        for answer in list(channel._answers):
            answer.cancel()
        await asyncio.gather(*channel._answers, return_exceptions=True)

    asyncio.run(receive())


async def test_no_more_answers_are_under_way_than_may_be() -> None:
    async def flush_ends(_: object) -> bool:
        await asyncio.Event().wait()
        return True

    channel = OwnerChannel(Redis(), "me", flush_ends)
    for number in range(MAX_ANSWERS + 10):
        channel._on_message(json.dumps({"ask": number, "from": "you", "ids": ["r"]}).encode())
    assert len(channel._answers) == MAX_ANSWERS
    for answer in list(channel._answers):
        answer.cancel()
    await asyncio.gather(*channel._answers, return_exceptions=True)
