"""Leases, followers and cancellations of records: the same in all journals."""

from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import chain
from uuid import uuid4

import pytest
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_router.core.generation import MAX_PARTS, MAX_RESPONSE_OPTIONS_CHARACTERS, GenerationRequest, Usage
from quire_router.journal.base import RecordedDelta, RequestRecord
from quire_router.journal.buffered_journal import BufferedJournal

from tests.support.journal_kinds import KINDS, AnyJournal, Databases, databases, journal_of
from tests.support.journals import Heard, append_tokens, by_choice
from tests.support.waiting import until

STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


@pytest.fixture(scope="module")
def stores() -> Iterator[Databases]:
    with databases() as running:
        yield running


@pytest.fixture(params=KINDS)
async def journal(request: pytest.FixtureRequest, stores: Databases) -> AsyncIterator[AnyJournal]:
    async with journal_of(request.param, stores) as journal:
        yield journal


@pytest.fixture
def heard(journal: AnyJournal) -> Heard:
    heard = Heard()
    journal.set_listener(heard)
    return heard


def request(**options: object) -> GenerationRequest:
    generation = GenerationRequest(uuid4().hex, "m", array("i", [1, 2]), SamplingParams(seed=3, n=2))
    return replace(generation, **options)  # type: ignore[arg-type]


async def read(journal: AnyJournal, generation: GenerationRequest) -> RequestRecord:
    await journal.flush()
    record = await journal.read(generation.request_id)
    assert record is not None
    return record


async def test_a_leased_record_cannot_be_claimed_and_a_released_one_continues(
    journal: AnyJournal,
) -> None:
    generation = request()
    former = journal.open(generation)
    append_tokens(journal, former, 0, [5, 6], 1)
    assert (await read(journal, generation)).leased
    assert await journal.claim(generation.request_id) is None
    journal.release(former)
    assert not (await read(journal, generation)).leased
    claimed = await journal.claim(generation.request_id)
    assert claimed is not None
    record, lease = claimed
    assert record == RequestRecord(generation, "me", 2, [RecordedDelta(1, [5, 6])], leased=True)
    assert lease.epoch == 2
    append_tokens(journal, former, 2, [9], 1)
    journal.finish(former, ABORT)
    journal.release(former)
    append_tokens(journal, lease, 2, [7], 1, STOP)
    append_tokens(journal, lease, 0, [8], 0)
    deltas = [RecordedDelta(1, [5, 6, 7]), RecordedDelta(1, [], STOP), RecordedDelta(0, [8])]
    assert await read(journal, generation) == RequestRecord(generation, "me", 2, deltas, leased=True)
    assert await journal.claim(generation.request_id) is None


async def test_a_record_released_a_moment_ago_can_be_claimed(journal: AnyJournal) -> None:
    generation = request()
    lease = journal.open(generation)
    append_tokens(journal, lease, 0, [5])
    journal.release(lease)
    append_tokens(journal, lease, 1, [6])
    claimed = await journal.claim(generation.request_id)
    assert claimed is not None
    assert claimed[0].choices[0].token_ids == [5]


async def test_a_finished_record_does_not_change(journal: AnyJournal) -> None:
    generation = request()
    lease = journal.open(generation)
    journal.finish(lease, FinishReason.ERROR, "The engines were lost.", Usage(3, 1, 16))
    journal.release(lease)
    expected = RequestRecord(generation, "me", 1, [], FinishReason.ERROR, "The engines were lost.", Usage(3, 1, 16))
    assert await journal.claim(generation.request_id) is None
    assert not await journal.cancel(generation.request_id)
    assert await read(journal, generation) == expected
    assert await journal.claim(generation.request_id) is None
    assert not await journal.cancel(generation.request_id)
    assert await journal.open_if_absent(replace(generation, created=1.0)) is None
    assert await read(journal, generation) == expected


async def test_an_unknown_record_can_neither_be_claimed_nor_cancelled_nor_followed(journal: AnyJournal) -> None:
    assert await journal.claim("unknown") is None
    assert not await journal.cancel("unknown")
    assert await journal.follow("unknown").poll() is None


async def test_a_request_is_opened_once(journal: AnyJournal) -> None:
    generation = request()
    lease = await journal.open_if_absent(generation)
    assert lease is not None
    again = replace(generation, created=1.0)
    assert await journal.open_if_absent(again) is None
    append_tokens(journal, lease, 0, [5])
    journal.release(lease)
    assert (await read(journal, generation)).choices[0].token_ids == [5]
    assert await journal.open_if_absent(again) is None
    assert (await read(journal, generation)).generation == generation


async def test_a_status_is_the_whole_record_without_its_deltas(journal: AnyJournal) -> None:
    names = [uuid4().hex for _ in range(3)]
    for number, name in enumerate(names):
        lease = journal.open(replace(request(), request_id=name))
        append_tokens(journal, lease, 0, [5, 6], 1)
        append_tokens(journal, lease, 0, [7] * number, 0, STOP)
        await journal.flush()
        if number == 1:
            journal.release(lease)
        if number == 2:
            journal.finish(lease, FinishReason.ERROR, "Why.", Usage(2, 9, 1))
    await journal.flush()
    statuses = await journal.statuses([*names, "unknown"])
    assert statuses.pop() is None
    for number, (name, status) in enumerate(zip(names, statuses, strict=True)):
        record = await journal.read(name)
        assert record is not None
        assert status is not None
        usage = Usage(2, 9, 1) if number == 2 else Usage(2, 2 + number)
        without = replace(record.generation, prompt_token_ids=status.generation.prompt_token_ids)
        assert status == replace(record, generation=without, deltas=[], usage=usage)


# Cancelling


async def test_the_owner_of_a_record_gets_one_cancellation(journal: AnyJournal, heard: Heard) -> None:
    generation = request()
    lease = journal.open(generation)
    await journal.flush()
    assert await journal.cancel(generation.request_id)
    assert await journal.cancel(generation.request_id)
    await until(lambda: bool(heard.cancelled))
    append_tokens(journal, lease, 0, [5])
    assert (await read(journal, generation)).finish_reason is None
    journal.finish(lease, ABORT)
    assert (await read(journal, generation)).choices[0].token_ids == [5]
    assert heard == Heard([generation.request_id], [])


@pytest.mark.parametrize("heard_of_it", [False, True])
async def test_a_cancel_that_was_acknowledged_is_not_overtaken_by_an_end(
    journal: AnyJournal, heard: Heard, *, heard_of_it: bool
) -> None:
    """Choices that have ended stay ended."""
    generation = request()
    lease = journal.open(generation)
    append_tokens(journal, lease, 0, [5], 0, STOP)
    append_tokens(journal, lease, 0, [6], 1, STOP)
    await journal.flush()
    if heard_of_it:
        assert await journal.cancel(generation.request_id)
    else:
        await cancelled_elsewhere(journal, generation.request_id)
    journal.finish(lease, STOP, "", Usage(2, 2))
    record = await read(journal, generation)
    assert (record.finish_reason, record.usage) == (ABORT, Usage(2, 2))
    assert [(choice.token_ids, choice.finish_reason) for choice in record.choices] == [([5], STOP), ([6], STOP)]


async def cancelled_elsewhere(journal: AnyJournal, request_id: str) -> None:
    """By another router, of which this one has not heard yet."""
    if isinstance(journal, BufferedJournal):
        await journal._store.cancel(request_id)
    else:
        await journal.cancel(request_id)


async def test_a_record_without_a_lease_ends_when_it_is_cancelled(journal: AnyJournal, heard: Heard) -> None:
    generation = request(background=True)
    lease = journal.open(generation)
    append_tokens(journal, lease, 0, [5])
    journal.release(lease)
    await journal.flush()
    assert await journal.cancel(generation.request_id)
    record = await read(journal, generation)
    assert (record.finish_reason, record.leased, record.choices[0].token_ids) == (ABORT, False, [5])
    assert await journal.claim(generation.request_id) is None
    assert generation.request_id not in await journal.orphans()
    assert not await journal.cancel(generation.request_id)
    assert heard == Heard()


async def test_a_record_released_after_its_cancellation_has_ended(journal: AnyJournal, heard: Heard) -> None:
    generation = request()
    lease = journal.open(generation)
    await journal.flush()
    await journal.cancel(generation.request_id)
    journal.release(lease)
    assert await journal.claim(generation.request_id) is None
    assert (await read(journal, generation)).finish_reason is ABORT


# Looking on


async def test_a_follower_gets_each_delta_once_and_the_end(journal: AnyJournal) -> None:
    generation = request()
    follower = journal.follow(generation.request_id)
    assert await follower.poll() is None
    lease = journal.open(generation)
    await journal.flush()
    seen = await follower.poll()
    assert seen is not None
    assert (seen.deltas, seen.leased, seen.finish_reason) == ([], True, None)
    logprobs = [TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))]
    sent = [RecordedDelta(0, [5, 6]), RecordedDelta(1, [7], STOP, logprobs, logprobs, -0.25), RecordedDelta(0, [8])]
    for position, delta in zip((0, 0, 2), sent, strict=True):
        journal.append(lease, position, delta)
        await journal.flush()
        seen = await follower.poll()
        assert seen is not None
        assert seen.deltas == [delta]
    journal.release(lease)
    await journal.flush()
    seen = await follower.poll()
    assert seen is not None
    assert (seen.deltas, seen.leased) == ([], False)
    claimed = await journal.claim(generation.request_id)
    assert claimed is not None
    append_tokens(journal, claimed[1], 3, [9])
    journal.finish(claimed[1], FinishReason.ERROR, "Why.", Usage(3, 1, 16))
    await journal.flush()
    seen = await follower.poll()
    assert seen is not None
    assert (seen.deltas, seen.error, seen.usage, seen.leased) == (
        [RecordedDelta(0, [9])],
        "Why.",
        Usage(3, 1, 16),
        False,
    )
    late = await journal.follow(generation.request_id).poll()
    assert late is not None
    assert by_choice(late.deltas) == by_choice([*sent, RecordedDelta(0, [9])])


# Orphans


async def test_background_requests_without_a_lease_are_orphans(journal: AnyJournal) -> None:
    held, released, ended = (request(background=True) for _ in range(3))
    watched = request()
    leases = {each.request_id: journal.open(each) for each in (held, released, ended, watched)}
    await journal.flush()
    assert await journal.orphans() == []
    journal.release(leases[released.request_id])
    journal.release(leases[watched.request_id])
    journal.finish(leases[ended.request_id], STOP)
    await journal.flush()
    assert await journal.orphans() == [released.request_id]
    claimed = await journal.claim(released.request_id)
    assert claimed is not None
    assert await journal.orphans() == []
    journal.finish(claimed[1], STOP)
    journal.finish(leases[held.request_id], STOP)
    await journal.flush()
    assert await journal.orphans() == []


async def test_orphans_are_listed_in_bounded_batches(journal: AnyJournal) -> None:
    """Whether or not anybody takes up the first ones: they may be of models that run elsewhere."""
    leases = [journal.open(request(background=True)) for _ in range(40)]
    for lease in leases:
        journal.release(lease)
    await journal.flush()
    for _ in range(2):
        rounds = [await journal.orphans() for _ in range(3)]
        assert [len(names) for names in rounds] == [16, 16, 8]
        assert sorted(chain(*rounds)) == sorted(lease.request_id for lease in leases)
    for lease in leases:
        await journal.cancel(lease.request_id)
    assert [await journal.orphans() for _ in range(3)] == [[], [], []]


# Bounds


@pytest.mark.parametrize(
    "large", [{"response_options": "x" * (MAX_RESPONSE_OPTIONS_CHARACTERS + 1)}, {"parts": ("x",) * (MAX_PARTS + 1)}]
)
async def test_a_request_of_no_reasonable_size_is_not_kept(journal: AnyJournal, large: dict[str, object]) -> None:
    generation = request(**large)
    append_tokens(journal, journal.open(generation), 0, [1])
    await journal.flush()
    assert await journal.read(generation.request_id) is None


async def test_a_request_of_no_reasonable_size_is_not_opened_once_either(journal: AnyJournal) -> None:
    generation = request(response_options="x" * (MAX_RESPONSE_OPTIONS_CHARACTERS + 1))
    assert await journal.open_if_absent(generation) is not None
    await journal.flush()
    assert await journal.read(generation.request_id) is None
