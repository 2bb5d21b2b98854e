"""The contract of all journals: a record is what was written to it, once, by its owner."""

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from time import time
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import MAX_CONVERSATION_CHARACTERS, NO_USAGE, GenerationRequest, Usage
from quire_router.core.model_version import ModelVersion
from quire_router.core.usage import Account
from quire_router.journal.base import DeliveredChoice, Lease, RecordedDelta, RequestRecord, unrecorded

from tests.support.journal_kinds import KINDS, AnyJournal, Databases, databases, journal_of
from tests.support.journals import Seen, append_tokens, by_choice, seen
from tests.support.record_strategies import deltas, generations, possible

STOP = FinishReason.STOP


@pytest.fixture(scope="module")
def stores() -> Iterator[Databases]:
    with databases() as running:
        yield running


def request(request_id: str = "r", prompt: list[int] | None = None, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3, n=n)
    )


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """An id of the test's own: the tests of this module share one server."""
    return f"r{abs(hash(request.node.nodeid))}"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_reads_as_it_was_written(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        generation = request(fresh)
        lease = journal.open(generation)
        append_tokens(journal, lease, 0, [10, 11])
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(generation, "me", 1, [DeliveredChoice([10, 11])])
        append_tokens(journal, lease, 2, [12])
        journal.finish(lease, FinishReason.ERROR, "The engines were lost.")
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(
            generation, "me", 1, [DeliveredChoice([10, 11, 12])], FinishReason.ERROR, "The engines were lost."
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_comes_back_with_its_record_and_not_with_its_status(
    kind: str, stores: Databases, fresh: str
) -> None:
    async with journal_of(kind, stores) as journal:
        generation = replace(request(fresh), conversation='{"items": ["wörld \ud800", "😀"]}' + "x" * 100_000)
        lease = journal.open(generation)
        read = await flushed(journal, fresh)
        assert read.generation.conversation == generation.conversation
        journal.release(lease)
        await journal.flush()
        claimed = await journal.claim(fresh)
        assert claimed is not None
        assert claimed[0].generation.conversation == generation.conversation
        (status,) = await journal.statuses([fresh])
        assert status is not None
        assert kind == "memory" or status.generation.conversation == ""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_whose_conversation_is_too_long_is_not_kept(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        journal.open(replace(request(fresh), conversation="x" * (MAX_CONVERSATION_CHARACTERS + 1)))
        await journal.flush()
        assert await journal.read(fresh) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_each_choice_has_its_own_tokens_and_its_own_end(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        generation = request(fresh, n=3)
        lease = journal.open(generation)
        assert len((await flushed(journal, fresh)).choices) == 3
        for position in range(2):
            append_tokens(journal, lease, position, [10 + position], 0)
            append_tokens(journal, lease, position, [30 + position], 2)
        append_tokens(journal, lease, 2, [32], 2, FinishReason.LENGTH)
        append_tokens(journal, lease, 0, [], 1, FinishReason.STOP)
        assert seen(await flushed(journal, fresh)) == Seen(
            generation,
            "me",
            1,
            [
                DeliveredChoice([10, 11]),
                DeliveredChoice([], FinishReason.STOP),
                DeliveredChoice([30, 31, 32], FinishReason.LENGTH),
            ],
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_added_to_a_choice_that_has_ended(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        lease = journal.open(request(fresh, n=2))
        for _ in range(2):
            append_tokens(journal, lease, 0, [5], 1, FinishReason.STOP)
        append_tokens(journal, lease, 1, [6], 1, FinishReason.LENGTH)
        append_tokens(journal, lease, 1, [9], 0, FinishReason.STOP)  # with a hole before it
        assert (await flushed(journal, fresh)).choices == [DeliveredChoice(), DeliveredChoice([5], FinishReason.STOP)]


async def flushed(journal: AnyJournal, request_id: str) -> RequestRecord:
    """The record, once all is written."""
    await journal.flush()
    record = await journal.read(request_id)
    assert record is not None
    return record


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_that_was_never_opened_is_unknown(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        append_tokens(journal, Lease(fresh, "me", 1), 0, [1])
        journal.finish(Lease(fresh, "me", 1), FinishReason.STOP)
        await journal.flush()
        assert await journal.read(fresh) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_repeating_a_write_changes_nothing(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        lease = journal.open(request(fresh))
        for _ in range(2):
            append_tokens(journal, lease, 0, [1, 2])
            append_tokens(journal, lease, 1, [2, 3])
            await journal.flush()
        record = await journal.read(fresh)
        assert record is not None
        assert record.choices[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lease", [Lease("", "me", 0), Lease("", "someone", 1)])
async def test_only_the_lease_may_write(kind: str, lease: Lease, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        generation = request(fresh)
        mine = journal.open(generation)
        append_tokens(journal, mine, 0, [1])
        append_tokens(journal, replace(lease, request_id=fresh), 1, [9])
        journal.finish(replace(lease, request_id=fresh), FinishReason.STOP)
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(generation, "me", 1, [DeliveredChoice([1])])


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_request_without_a_record_used_is_counted_once_however_often_it_is_run(
    kind: str, stores: Databases, fresh: str
) -> None:
    """As a line of a batch that is embedded again, because its router died before its answer was written."""
    generation = replace(request(fresh), tenant=fresh)
    async with AsyncExitStack() as journals:
        journal = await journals.enter_async_context(journal_of(kind, stores))

        async def counted() -> list[tuple[int, int, int, int]]:
            await journal.flush()
            await journal.settle_usage()
            return [row.counts for row in await journal.usage(time() - 7200, time() + 1, fresh)]

        journal.finish(journal.open_unrecorded(generation), FinishReason.ERROR)  # no engine had it
        assert await counted() == []
        for _ in range(2):
            lease = journal.open_unrecorded(generation)
            append_tokens(journal, lease, 0, [1])
            journal.finish(lease, FinishReason.STOP, "", Usage(2, 0, 1))
            journal.release(lease, Usage(2, 0, 1))
        assert await counted() == [(1, 2, 1, 0)]
        assert await journal.read(fresh) is None
        if kind != "memory":
            await journals.aclose()
            journal = await journals.enter_async_context(journal_of(kind, stores))
        journal.release(journal.open_unrecorded(generation), Usage(2, 0))
        assert await counted() == [(1, 2, 1, 0)]
        other = journal.open_unrecorded(replace(generation, request_id=f"{fresh}-1"))
        journal.finish(other, FinishReason.STOP, "", Usage(5, 0))
        assert await counted() == [(2, 7, 1, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finished", [True, False])
async def test_another_request_of_the_same_id_changes_nothing(
    kind: str, finished: bool, stores: Databases, fresh: str
) -> None:
    async with journal_of(kind, stores) as journal:
        generation = request(fresh)
        lease = journal.open(generation)
        append_tokens(journal, lease, 0, [1])
        if finished:
            journal.finish(lease, FinishReason.STOP)
        await journal.flush()
        other = journal.open(request(fresh, [7]))
        append_tokens(journal, other, 0, [8, 9])
        journal.finish(other, FinishReason.LENGTH)
        await journal.flush()
        record = await journal.read(fresh)
        assert seen(record) == Seen(
            generation, "me", 1, [DeliveredChoice([1])], FinishReason.STOP if finished else None
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_added_after_the_end(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        lease = journal.open(request(fresh))
        journal.finish(lease, FinishReason.ABORT)
        append_tokens(journal, lease, 0, [1])
        await journal.flush()
        append_tokens(journal, lease, 0, [1])
        journal.finish(lease, FinishReason.STOP)
        await journal.flush()
        record = await journal.read(fresh)
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([], FinishReason.ABORT)


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
@given(generation=generations, deltas=deltas)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_record_comes_back_exactly_from_a_database(
    kind: str, stores: Databases, generation: GenerationRequest, deltas: list[RecordedDelta]
) -> None:
    async def run() -> None:
        unique = replace(generation, request_id=uuid4().hex)
        sent = possible(deltas, unique.params.n)
        async with journal_of(kind, stores) as journal:
            lease = journal.open(unique)
            made = [0] * 4
            for delta in sent:
                journal.append(lease, made[delta.index], delta)
                made[delta.index] += len(delta.token_ids)
            record = await flushed(journal, unique.request_id)
            assert by_choice(record.deltas) == by_choice(sent)
            assert replace(record, deltas=[]) == RequestRecord(unique, "me", 1, [], leased=True)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_request_without_a_record_has_used_is_counted(kind: str, stores: Databases, fresh: str) -> None:
    async with journal_of(kind, stores) as journal:
        account = Account(fresh, "m")
        for number, usage in enumerate([Usage(5, 2, 1), Usage(7, 0), NO_USAGE]):
            journal.count_usage(unrecorded(f"{fresh}-{number}"), account, usage)
        await journal.flush()
        rows = await journal.usage(0, 1e11, fresh)
        assert [sum(each) for each in zip(*(row.counts for row in rows), strict=True)] == [2, 12, 1, 2]
        assert await journal.read(f"{fresh}-0") is None


@pytest.mark.parametrize("kind", KINDS)
async def test_the_version_of_the_model_is_written_with_the_first_tokens(
    kind: str, stores: Databases, fresh: str
) -> None:
    old, new = ModelVersion("old", "ab"), ModelVersion("new", "cd")
    async with journal_of(kind, stores) as journal:
        lease = journal.open(request(fresh))
        journal.set_version(lease, old)
        await journal.flush()
        journal.set_version(lease, new)  # it began nothing there
        append_tokens(journal, lease, 0, [10])
        await journal.flush()
        append_tokens(journal, lease, 1, [11])
        journal.release(lease)
        await journal.flush()
        claimed = await journal.claim(fresh)
        assert claimed is not None
        assert claimed[0].version == new
        journal.release(claimed[1])
