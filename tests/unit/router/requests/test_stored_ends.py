"""The end of an answer that can be read again comes once the journal has it, and never a token."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage
from quire_router.journal.base import Lease
from quire_router.journal.memory import MemoryJournal

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import collect, open_runner, started
from tests.support.scripted_engine import LENGTH, output

REQUEST = GenerationRequest("r", "m", tokens("hello"), SamplingParams(max_tokens=3), stream=True)
STORED = {
    "keyed": {"digest": "d"},
    "in the background": {"background": True},
    "gone on from": {"conversation": '{}\n[{"type":"message"}]'},
}
NOT_STORED: dict[str, dict[str, Any]] = {"plain": {}, "not to be gone on from": {"conversation": "{}\n"}}


class LateJournal(MemoryJournal):
    """Its database has an end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answers: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def flush_end(self, lease: Lease) -> bool:
        self.asked.set()
        return await self.answers


async def begun(answer: Any, journal: LateJournal) -> tuple[asyncio.Task[None], list[Delta]]:
    """The deltas that have come when the journal was asked for the end."""
    deltas: list[Delta] = []

    async def read() -> None:
        async for delta in answer:
            deltas.append(delta)

    reading = asyncio.create_task(read())
    await journal.asked.wait()
    await asyncio.sleep(0)
    return reading, deltas


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("kind", STORED)
async def test_only_the_usage_waits_for_the_journal(kind: str, *, is_stored: bool) -> None:
    journal = LateJournal()
    async with open_runner(journal=journal) as place:
        answer = place.lifecycle.run(replace(REQUEST, **STORED[kind]))
        async with asyncio.timeout(10):
            reading = asyncio.create_task(begun(answer, journal))
            submit = await place.engine.submit()
            place.engine.send(output(submit.request_id, tokens("abc"), 0, LENGTH))
            reading_on, deltas = await reading
            assert "".join(delta.text for delta in deltas) == "abc"
            assert deltas[-1].finish_reason is not None
            assert all(delta.usage is None for delta in deltas)
            journal.answers.set_result(is_stored)
            await reading_on
        assert deltas[-1] == Delta("", [], usage=Usage(5, 3), pending=not is_stored)


@pytest.mark.parametrize("kind", NOT_STORED)
async def test_an_answer_that_cannot_be_read_again_waits_for_nothing(kind: str) -> None:
    journal = LateJournal()
    async with open_runner(journal=journal) as place:
        task, submit = await started(place, place.lifecycle.run(replace(REQUEST, **NOT_STORED[kind])))
        place.engine.send(output(submit.request_id, tokens("abc"), 0, LENGTH))
        deltas = await task
        assert deltas[-1].usage == Usage(5, 3)
        assert not deltas[-1].pending
        assert not journal.asked.is_set()


async def test_an_error_that_ends_a_stored_request_waits_for_the_journal_too() -> None:
    journal = LateJournal()
    async with open_runner(journal=journal, max_attempts=1) as place:
        answer = place.lifecycle.run(replace(REQUEST, digest="d", deadline=1.0))
        task = asyncio.create_task(collect(answer))
        async with asyncio.timeout(10):
            await journal.asked.wait()
        assert not task.done()
        record = await journal.read("r")
        assert record is not None
        assert record.error
        journal.answers.set_result(False)
        with pytest.raises(QuireError) as failed:
            await task
        assert failed.value.code is ErrorCode.DEADLINE


@pytest.mark.parametrize("pending", [True, False])
async def test_who_follows_an_answer_is_told_too_that_its_end_is_not_stored(*, pending: bool) -> None:
    journal = MemoryJournal()
    async with open_runner(journal=journal) as place:
        task, submit = await started(place, place.lifecycle.run(REQUEST))
        place.engine.send(output(submit.request_id, tokens("abc"), 0, LENGTH))
        await task
        record = await journal.read("r")
        assert record is not None
        follower = journal.follow("r")
        update = await follower.poll()
        assert update is not None
        journal.follow = lambda _: OneUpdate(replace(update, pending=pending))  # type: ignore[method-assign]
        deltas = await collect(place.lifecycle.resume(record, StreamCursor(1)))
        assert [delta.pending for delta in deltas] == [*([False] * (len(deltas) - 1)), pending]


@dataclass
class OneUpdate:
    """A follower that is at the end."""

    update: Any

    async def poll(self) -> Any:
        return self.update
