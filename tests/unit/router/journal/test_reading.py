"""However long a record is, reading it leaves everybody else their turn: another task is counted meanwhile."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_router.core.generation import Delta, GenerationRequest, ResponseConsumer, StreamCursor, Usage
from quire_router.core.response_options import ResponseOptions
from quire_router.journal.base import Journal, RecordedDelta, RequestRecord
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from quire_router.journal.token_log import CHUNK_VALUES, MAX_INLINE_VALUES, DeltaMerger, TokenLogReader, read_chunk
from quire_router.requests.resume import BackgroundRequests, RequestResumer
from quire_router.requests.runner import RequestRegistry

from tests.support.journal_kinds import KINDS
from tests.support.journals import append_tokens, by_choice
from tests.support.record_strategies import deliver, deltas, possible
from tests.support.redis_journals import flushed, journal_at, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server
from tests.support.scripted_api import ANSWER, MODEL, TOKENIZER, ScriptedRunner, ask, open_stage

T = TypeVar("T")
CHOICES, TOKENS, TOP = 4, 200, 20
PARTS = CHOICES * TOKENS * (11 + 2 * TOP) // CHUNK_VALUES - 1
TOKENS_A_TURN = 13


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@asynccontextmanager
async def journal_of(kind: str, server: RedisServer) -> AsyncIterator[Journal]:
    if kind == "redis":
        async with journal_at(server) as journal:
            yield journal
    elif kind == "memory":
        yield MemoryJournal()
    else:
        with TemporaryDirectory() as folder:
            journal = SqliteJournal(Path(folder) / "journal")
            yield journal
            await journal.close()


async def turns(work: Awaitable[T]) -> tuple[T, int]:
    """The result, and how many turns another task had meanwhile."""
    count = 0

    async def beat() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    beating = asyncio.create_task(beat())
    try:
        return await work, count
    finally:
        beating.cancel()


def long(request_id: str) -> GenerationRequest:
    params = SamplingParams(seed=1, n=CHOICES, max_tokens=TOKENS, logprobs=TOP)
    options = ResponseOptions(logprobs=TOP, include_usage=True).to_json()
    prompt = array("i", [1, 2, 3])
    return GenerationRequest(
        request_id, MODEL, prompt, params, operation="text_completion", response_options=options, created=5.0
    )


async def write(journal: Journal, request_id: str, *, ended: bool) -> list[RecordedDelta]:
    """A record of many tokens with their log-probabilities, ended or released."""
    lease, top = journal.open(long(request_id)), tuple((40 + rank, -0.5 - rank) for rank in range(TOP))
    sent = [
        RecordedDelta(index, [65 + (position + index) % 26], None, [TokenLogprobs(-0.25, top)])
        for position in range(TOKENS)
        for index in range(CHOICES)
    ]
    for number, delta in enumerate(sent):
        journal.append(lease, number // CHOICES, delta)
    if ended:
        ends = [RecordedDelta(index, [], FinishReason.LENGTH) for index in range(CHOICES)]
        for end in ends:
            journal.append(lease, TOKENS, end)
        journal.finish(lease, FinishReason.LENGTH, "", Usage(3, CHOICES * TOKENS))
        sent += ends
    else:
        journal.release(lease)
    await flushed(journal)
    return sent


@pytest.mark.parametrize("kind", KINDS)
async def test_a_long_record_is_read_in_chunks(kind: str, server: RedisServer) -> None:
    async with journal_of(kind, server) as journal:
        sent = await write(journal, kind, ended=False)
        for brief in (True, False):
            record, count = await turns(journal.read(kind, tokens_only=brief))
            assert count >= PARTS
            assert record is not None
            assert sum(len(choice.token_ids) for choice in record.choices) == CHOICES * TOKENS
            assert brief or by_choice(record.deltas) == by_choice(sent)
        follower, seen, looks = journal.follow(kind), list[RecordedDelta](), 1
        while (tail := await follower.poll()) is not None and tail.more:
            assert sum(len(delta.token_ids) for delta in tail.deltas) <= CHUNK_VALUES
            seen += tail.deltas
            looks += 1
        assert looks >= PARTS
        assert tail is not None
        assert by_choice(seen + tail.deltas) == by_choice(sent)
        claimed, count = await turns(journal.claim(kind))
        assert count >= PARTS
        assert claimed is not None
        assert by_choice(claimed[0].deltas) == by_choice(sent)


def holds(journal: Journal, request_id: str) -> bool:
    if isinstance(journal, MemoryJournal):
        return journal._records[request_id].leased
    return journal._buffer.get(request_id) is not None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_claim_leaves_no_lease(kind: str, server: RedisServer) -> None:
    async with journal_of(kind, server) as journal:
        name = f"{kind}-left"
        await write(journal, name, ended=False)
        claiming = asyncio.create_task(journal.claim(name))
        while not holds(journal, name) and not claiming.done():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        assert not claiming.done()
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        await flushed(journal)
        assert await journal.claim(name) is not None


class Archive(ScriptedRunner):
    """Answers from what a journal has."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(ANSWER)
        self._journal = journal
        self._resumption = RequestResumer(journal, {MODEL: TOKENIZER}, RequestRegistry(), BackgroundRequests(1), None)

    async def record(self, request_id: str) -> RequestRecord | None:
        return await self._journal.read(request_id, tokens_only=True)

    def resume(self, record: RequestRecord, mark: StreamCursor, deadline: float | None = None) -> AsyncGenerator[Delta]:
        return self._resumption.resume(record.generation, ResponseConsumer(None, cursor=mark), mark)


async def test_reading_statuses_reads_no_deltas_and_is_one_exchange() -> None:
    with redis_server() as server:
        async with journal_at(server) as journal, redis_at(server) as redis:
            names = [f"r-{number}" for number in range(30)]
            for name in names:
                append_tokens(journal, journal.open(small_request(name)), 0, [1] * 1000)
            await flushed(journal)
            await redis.config_resetstat()
            sent = await journal.statuses(names)
            assert [each.usage.completion_tokens for each in sent if each is not None] == [1000] * 30
            calls = {name.removeprefix("cmdstat_") for name in await redis.info("commandstats")}
            assert {"hmget", "hstrlen"} <= calls
            assert not {"hgetall", "get", "getrange"} & calls


async def test_a_record_of_an_older_version_is_counted_by_its_log() -> None:
    with redis_server() as server:
        async with journal_at(server) as journal, redis_at(server) as redis:
            append_tokens(journal, journal.open(small_request()), 0, [1] * 10)
            await flushed(journal)
            await redis.hdel(keys("r")[0], "told")
            (status,) = await journal.statuses(["r"])
            assert status is not None
            assert status.choices[0].token_ids == [1] * 10


@pytest.mark.parametrize("path", ["", "/events"])
async def test_a_long_output_is_replayed_in_chunks(path: str) -> None:
    journal = MemoryJournal()
    await write(journal, "long", ended=True)
    async with open_stage(runner=Archive(journal)) as stage:
        answer, count = await turns(ask(stage.port, "GET", f"/v1/requests/long{path}"))
    assert answer.status == 200
    assert answer.body.count(b'"finish_reason":"length"') == CHOICES
    assert count >= CHOICES * TOKENS // TOKENS_A_TURN


async def test_the_usage_of_a_request_that_was_cancelled_without_an_owner_is_what_was_sent() -> None:
    journal = MemoryJournal()
    await write(journal, "left", ended=False)
    assert await journal.cancel("left")
    async with open_stage(runner=Archive(journal)) as stage:
        shown = await ask(stage.port, "GET", "/v1/requests/left")
        retold = await ask(stage.port, "GET", "/v1/requests/left/events")
    assert shown.json["status"] == "cancelled"
    usage = shown.json["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (CHOICES * TOKENS, 3)
    assert retold.events[-1]["error"]["code"] == "cancelled"


async def test_a_delta_that_is_larger_than_a_chunk_is_read_by_itself() -> None:
    large = RecordedDelta(0, [5], None, [], [TokenLogprobs(-1.0, ((7, -0.5),))] * MAX_INLINE_VALUES)
    sent = [RecordedDelta(0, [1, 2]), large, RecordedDelta(0, [6], FinishReason.STOP)]
    log, reader, seen, position = deliver(sent, 1).values, TokenLogReader(1), list[list[RecordedDelta]](), 0
    while position < len(log):
        part, taken = await read_chunk(reader, log, position)
        seen.append(part)
        position += taken
    assert seen[:2] == [sent[:1], [large]]
    assert by_choice([delta for part in seen for delta in part]) == by_choice(sent)


@given(deltas, st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_chunks_of_any_size_add_up_to_the_log(deltas: list[RecordedDelta], limit: int) -> None:
    sent = possible(deltas, 4)
    log, reader, seen, position = deliver(sent, 4).values, TokenLogReader(4), DeltaMerger(), 0
    while position < len(log):
        assert reader.has_complete_entry(log, position)
        part, taken = reader.read(log, position, limit)
        assert taken
        for delta in part:
            seen.add(replace(delta, token_ids=list(delta.token_ids)))
        position += taken
    assert by_choice(seen.deltas) == by_choice(sent)
