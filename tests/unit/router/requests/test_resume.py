"""A client that comes back, to another router, with whatever it had and whatever was written: it gets what it lacks,
once, and what it would have got undisturbed.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from time import monotonic, time
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.admission.limits import RateLimiter
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.core.generation import (
    NO_USAGE,
    Delta,
    GenerationRequest,
    PromptGroup,
    ResponseConsumer,
    StreamCursor,
    Usage,
    prompt_request_id,
)
from quire_router.engines.attempt import Output
from quire_router.journal.base import (
    Journal,
    Lease,
    LeaseListener,
    RecordedDelta,
    RecordUpdate,
    RequestRecord,
)
from quire_router.journal.memory import MemoryJournal
from quire_router.requests import resume
from quire_router.requests.choice import create_choices
from quire_router.requests.deltas import CHUNK_TOKENS
from quire_router.requests.resume import Replayer
from quire_router.requests.runner import RequestRunner
from quire_router.requests.state import RequestState

from tests.support.byte_tokenizer import TOKENIZER, tokens
from tests.support.contract_engine import ContractEngine, Script
from tests.support.runner_harness import RunnerHarness, collect, delta_text, open_runner, started
from tests.support.scripted_engine import LENGTH, STOP, output
from tests.support.waiting import until
from tests.unit.router.requests.test_runner_properties import (
    PROMPT,
    DirectLink,
    OneEngine,
    answers,
    make_lifecycle,
    settle,
    undisturbed,
)

Piece = TypeVar("Piece")


class Place:
    """One router with an engine that goes on by itself."""

    def __init__(self, script: Script, journal: MemoryJournal, tokenizer: ModelTokenizer = TOKENIZER) -> None:
        self.link = DirectLink(ContractEngine(script))
        self.fleet = OneEngine(self.link)
        self.lifecycle: RequestRunner = make_lifecycle(self.fleet, journal, tokenizer)
        self._choices = len(script.choices)

    async def read(self, answer: AsyncGenerator[Piece], steps: list[int], most: int | None = None) -> list[Piece]:
        """The pieces of an answer, ``most`` of them, while each step makes so many tokens of each choice."""
        deltas: list[Piece] = []

        async def follow() -> None:
            async with aclosing(answer) as pieces:
                async for delta in pieces:
                    deltas.append(delta)
                    if len(deltas) == most:
                        return

        reading = asyncio.create_task(follow())
        for number in range(300):
            await settle()
            if reading.done():
                break
            self.link.deliver_commands()
            self.link.step(dict.fromkeys(range(self._choices), steps[number % len(steps)]))
            await asyncio.sleep(0)
        await asyncio.wait_for(reading, 10)
        assert self.lifecycle.in_flight == self.fleet.table.requests.sum() == 0
        return deltas


def copied(record: RequestRecord, kept: int) -> MemoryJournal:
    """What another router finds, when only so many pieces were written before the first one died."""
    journal = MemoryJournal()
    lease = journal.open(record.generation)
    positions: dict[int, int] = defaultdict(int)
    for piece in record.deltas[:kept]:
        journal.append(lease, positions[piece.index], piece)
        positions[piece.index] += len(piece.token_ids)
    if kept >= len(record.deltas) and record.finish_reason is not None:
        journal.finish(lease, record.finish_reason, record.error, record.usage)
    else:
        journal.release(lease)
    return journal


def mark_of(deltas: list[Delta], choices: int) -> StreamCursor:
    mark = StreamCursor(choices)
    for delta in deltas:
        if delta.token_ids or delta.finish_reason:
            mark.advance(delta)
        mark.usage |= delta.usage is not None
    return StreamCursor.parse(str(mark), choices)


steps = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(answers(), st.sampled_from(["", "logprobs", "best_of"]), st.integers(0, 12), st.integers(0, 12), steps, steps)
@example((["a", "b", "c", "d"], (), 3), "best_of", 1, 2, [1], [1])
@settings(max_examples=75, deadline=None)
def test_the_deltas_read_and_those_resumed_are_the_undisturbed_output(
    answer: tuple[list[str], tuple[str, ...], int], kind: str, read: int, kept: int, before: list[int], after: list[int]
) -> None:
    made, stop, max_tokens = answer
    script = Script([tokens(text) for text in made], max_tokens)
    n = max(1, len(made) - 1) if kind == "best_of" else len(made)
    best_of = len(made) if kind == "best_of" else 0
    params = SamplingParams(seed=7, max_tokens=max_tokens, n=n, best_of=best_of, logprobs=0 if kind else None)
    generation = GenerationRequest("r", "m", tokens(PROMPT), params, stop, stream=True, digest="d")

    async def play() -> tuple[list[Delta], list[Delta], list[Delta]]:
        calm = Place(script, MemoryJournal())
        whole = await calm.read(calm.lifecycle.run(generation), before)
        journal = MemoryJournal()
        first = Place(script, journal)
        had = await first.read(first.lifecycle.run(generation), before, read) if read else []
        record = await journal.read("r")
        if record is None:  # it was never begun
            lease = journal.open(generation)
            journal.release(lease)
            record = await journal.read("r")
        assert record is not None
        second = Place(script, copied(record, kept))
        resumed = await second.read(second.lifecycle.resume(record, mark_of(had, n)), after)
        return whole, had, resumed

    whole, had, resumed = asyncio.run(play())
    fresh = [delta for delta in resumed if not delta.replayed]
    assert {i: everything(whole, i) for i in range(n)} == {i: everything(had + fresh, i) for i in range(n)}
    usages = [delta.usage for delta in had + fresh if delta.usage is not None]
    assert usages == [whole[-1].usage]
    if not best_of:
        expected = [undisturbed(text, stop, max_tokens)[0] for text in made]
        assert [delta_text(had + fresh, index) for index in range(n)] == expected
        assert [delta_text(resumed, index) for index in range(n)] == expected, "what was told is told again, as told"


def everything(
    deltas: list[Delta], index: int
) -> tuple[str, list[int], list[float], list[FinishReason], list[StopToken]]:
    mine = [delta for delta in deltas if delta.index == index]
    return (
        delta_text(mine, index),
        [token_id for delta in mine for token_id in delta.token_ids],
        [each.logprob for delta in mine for each in delta.logprobs],
        [delta.finish_reason for delta in mine if delta.finish_reason is not None],
        [delta.stop_token for delta in mine if delta.stop_token is not None],
    )


def streamed(**more: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.5, seed=7, max_tokens=50)
    return replace(GenerationRequest("r", "m", tokens("hello"), params, stream=True), **more)


async def test_a_prompt_of_a_list_can_be_resumed_though_only_another_had_started() -> None:
    async with open_runner() as place:
        siblings = PromptGroup(started=True)
        for part in (streamed(parts=("r", "r_1")), streamed(request_id=prompt_request_id("r", 1))):
            answer = await place.lifecycle.run_once(part, siblings)
            assert answer is not None
            task, _ = await started(place, answer)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            record = await place.journal.read(part.request_id)
            assert record is not None
            assert (record.leased, record.finish_reason) == (False, None)
        task, _ = await started(place, place.lifecycle.run(streamed(request_id="alone")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await place.left_nothing("alone", FinishReason.ABORT, "")


async def test_an_interrupted_output_is_not_reported_as_complete() -> None:
    async with open_runner() as place:
        lease = place.journal.open(streamed(params=SamplingParams(seed=7, max_tokens=50, n=2)))
        place.journal.append(lease, 0, RecordedDelta(0, tokens("ab"), FinishReason.STOP))
        place.journal.append(lease, 0, RecordedDelta(1, tokens("c")))
        place.journal.finish(lease, FinishReason.ABORT, usage=Usage(5, 3))
        record = await place.lifecycle.record("r")
        assert record is not None
        deltas = await collect(place.lifecycle.resume(record, StreamCursor.parse("2e.-", 2)))
        fresh = [delta for delta in deltas if not delta.replayed]
        assert [(delta.index, delta.text, delta.finish_reason) for delta in fresh] == [
            (1, "c", None),
            (1, "", FinishReason.ABORT),
        ]
        assert fresh[-1].usage == Usage(5, 3)


async def test_a_second_reader_follows_the_first() -> None:
    async with open_runner() as place:
        first, submit = await started(place, place.lifecycle.run(streamed()))
        place.engine.send(output("r", tokens("one "), 0))
        await place.delivered("one ")
        record = await place.lifecycle.record("r")
        assert record is not None
        second = asyncio.create_task(collect(place.lifecycle.resume(record, StreamCursor.parse("1", 1))))
        place.engine.send(output("r", tokens("two"), 4, LENGTH))
        assert delta_text(await first) == delta_text(await second) == "one two"
        assert delta_text([delta for delta in await second if not delta.replayed]) == "ne two"
        assert submit.request_id == "r"
        assert place.engine.commands.empty(), "it was run twice"


async def test_a_disconnect_frees_the_engine_and_the_request_can_be_resumed() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(streamed())
        task = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("ab"), 0))
        await task
        await answer.aclose()
        assert (await place.engine.cancel()).request_id == "r"
        record = await place.lifecycle.record("r")
        assert record is not None
        assert not record.leased
        again = asyncio.create_task(collect(place.lifecycle.resume(record, StreamCursor.parse("2", 1))))
        submit = await place.engine.submit()
        assert submit.request_id != "r", "the engine may still be busy with the first"
        assert list(submit.output_token_ids) == tokens("ab")
        place.engine.send(output(submit.request_id, tokens("c"), 2, STOP))
        assert delta_text([delta for delta in await again if not delta.replayed]) == "c"
        await place.left_nothing("r", FinishReason.STOP, "abc")


async def test_a_request_cancelled_as_its_client_disconnects_ends() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(streamed())
        task = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("ab"), 0))
        await task
        assert await place.lifecycle.cancel("r")
        await answer.aclose()
        await place.left_nothing("r", FinishReason.ABORT, "ab")


async def test_a_disconnect_of_a_request_that_cannot_be_resumed_ends_it() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(streamed(stream=False))
        task = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("ab"), 0))
        await task
        await answer.aclose()
        await place.left_nothing("r", FinishReason.ABORT, "ab")


async def test_a_request_of_one_id_runs_once() -> None:
    async with open_runner() as place:
        answer = await place.lifecycle.run_once(streamed(digest="d"))
        assert answer is not None
        assert await place.lifecycle.run_once(streamed(digest="d")) is None
        await answer.aclose()
        record = await place.lifecycle.record("r")
        assert record is not None
        assert not record.leased, "it was never begun, and must be let go of all the same"


async def test_a_background_request_runs_without_a_reader_and_is_adopted_when_its_router_leaves() -> None:
    async with open_runner() as place:
        assert await place.lifecycle.start(streamed(background=True, stream=False))
        await place.engine.submit()
        place.engine.send(output("r", tokens("ab"), 0))
        await place.delivered("ab")
        await place.lifecycle.drain(0.01)
        record = await place.lifecycle.record("r")
        assert record is not None
        assert not record.leased
        async with open_runner(journal=place.journal) as other:
            assert await other.lifecycle.claim_orphans() == 1
            assert await other.lifecycle.claim_orphans() == 0
            submit = await other.engine.submit()
            assert list(submit.output_token_ids) == tokens("ab")
            other.engine.send(output(submit.request_id, tokens("c"), 2, STOP))
            await other.delivered("abc")
            async with asyncio.timeout(30):
                while other.lifecycle.in_flight:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.002)
            await other.left_nothing("r", FinishReason.STOP, "abc")


async def test_reading_the_status_adopts_a_background_request_missing_from_the_index() -> None:
    class Unlisted(MemoryJournal):
        async def orphans(self) -> list[str]:
            return []

    async with open_runner(journal=Unlisted()) as place:
        for name, background in (("left", True), ("waits", False)):
            generation = streamed(request_id=name, background=background, stream=not background)
            place.journal.release(place.journal.open(generation))
        assert await place.lifecycle.claim_orphans() == 0
        told = await place.lifecycle.statuses(["left", "waits", "unknown"])
        assert [record and record.finish_reason for record in told] == [None] * 3
        assert (await place.engine.submit()).request_id.startswith("left")
        assert place.lifecycle.in_flight == 1
        await place.lifecycle.statuses(["left"])
        assert place.lifecycle.in_flight == 1
        await place.lifecycle.drain(0.01)


async def test_a_request_cancelled_before_its_last_delta_was_delivered_ends_as_cancelled() -> None:
    async with open_runner() as place:
        task, submit = await started(place, place.lifecycle.run(streamed()))
        place.engine.send(output(submit.request_id, tokens("ab"), 0))
        await place.delivered("ab")
        place.engine.send(output(submit.request_id, tokens("c"), 2, STOP))
        assert await place.lifecycle.cancel("r")
        await task
        await until(lambda: place.lifecycle.in_flight == 0)
        record = await place.journal.read("r")
        assert record is not None
        assert record.finish_reason is FinishReason.ABORT


async def test_a_drained_router_ends_its_streams_so_that_other_routers_resume_them() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(streamed()))
        place.engine.send(output("r", tokens("ab"), 0))
        await place.delivered("ab")
        record = await place.lifecycle.record("r")
        assert record is not None
        following = asyncio.create_task(collect(place.lifecycle.resume(record, StreamCursor(1))))
        await asyncio.sleep(0.1)
        await place.lifecycle.drain(0.01)
        for reading in (task, following):
            with pytest.raises(QuireError) as caught:
                await reading
            assert caught.value.code is ErrorCode.UNAVAILABLE
        assert await place.journal.claim("r") is not None


async def test_a_resumed_stream_ends_with_its_requests_error() -> None:
    async with open_runner() as place:
        with pytest.raises(QuireError):
            await collect(place.lifecycle.run(streamed(deadline=0.0)))
        record = await place.lifecycle.record("r")
        assert record is not None
        with pytest.raises(QuireError, match="time for this request was over") as caught:
            await collect(place.lifecycle.resume(record, StreamCursor(1)))
        assert caught.value.code is ErrorCode.DEADLINE


async def test_a_stream_whose_request_another_router_claimed_ends() -> None:
    journal = Owned()
    async with open_runner(journal=journal) as place:
        task, _ = await started(place, place.lifecycle.run(streamed()))
        place.engine.send(output("r", tokens("ab"), 0))
        await place.delivered("ab")
        journal.owners.on_lease_lost("r")
        with pytest.raises(QuireError, match="Another router"):
            await task
        assert place.lifecycle.in_flight == 0


class Owned(MemoryJournal):
    """A journal that can be asked whom it tells of its records."""

    owners: LeaseListener

    def set_listener(self, owners: LeaseListener) -> None:
        self.owners = owners
        super().set_listener(owners)


@asynccontextmanager
async def being_told_what_was_written() -> AsyncIterator[tuple[RunnerHarness, AsyncGenerator[Delta, None]]]:
    """A reader who has come back, and was told the first of two pieces of a record that was claimed for it."""
    journal = MemoryJournal()
    async with open_runner(journal=Behind(journal)) as place:
        lease = journal.open(streamed())
        journal.append(lease, 0, RecordedDelta(0, tokens("ab")))
        journal.append(lease, 2, RecordedDelta(0, tokens("cd"), logprobs=[TokenLogprobs(-1.0), TokenLogprobs(-1.0)]))
        record = await place.lifecycle.record("r")
        assert record is not None
        answer = place.lifecycle.resume(replace(record, deltas=[]), StreamCursor(1))
        journal.release(lease)
        assert delta_text([await anext(answer)]) == "ab", "it is told from what was claimed"
        yield place, answer


async def test_a_disconnect_during_replay_leaves_no_lease() -> None:
    async with being_told_what_was_written() as (place, answer):
        await answer.aclose()
        after = await place.journal.read("r")
        assert after is not None
        assert not after.leased
        assert place.lifecycle.in_flight == 0


async def test_a_request_can_be_cancelled_during_replay() -> None:
    async with being_told_what_was_written() as (place, answer):
        assert await place.lifecycle.cancel("r")
        rest = await collect(answer)
        assert delta_text(rest) == "cd"
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert place.engine.commands.empty(), "it was run"
        await place.left_nothing("r", FinishReason.ABORT, "abcd")


async def test_a_drain_ends_a_request_during_replay() -> None:
    async with being_told_what_was_written() as (place, answer):
        await place.lifecycle.drain(0.01)
        with pytest.raises(QuireError, match="shutting down"):
            await collect(answer)
        after = await place.journal.read("r")
        assert after is not None
        assert not after.leased


class Behind:
    """A journal whose followers see nothing yet: all that was written comes with the claim."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> object:
        return getattr(self._journal, name)

    def follow(self, _request_id: str) -> "Behind":
        return self

    async def poll(self) -> RecordUpdate:
        return RecordUpdate([], None, "", NO_USAGE, leased=False)


async def test_a_router_leaves_background_requests_of_models_it_does_not_serve_to_others() -> None:
    async with open_runner() as place:
        for model, name in (("another", "a"), ("m", "b")):
            place.journal.release(
                place.journal.open(streamed(request_id=name, model=model, background=True, stream=False))
            )
        assert await place.lifecycle.claim_orphans() == 1
        assert (await place.engine.submit()).prompt_token_ids == tokens("hello")
        foreign = await place.journal.read("a")
        assert foreign is not None
        assert (foreign.leased, foreign.epoch, foreign.finish_reason) == (False, 1, None)


class Broken(str):
    """A stop string that nothing can be searched for with."""

    __slots__ = ()

    def __getitem__(self, _key: object) -> str:
        raise RuntimeError("broken")


async def test_a_background_request_that_cannot_resume_ends_and_delays_no_other() -> None:
    async with open_runner() as place:
        for name, stop in (("bad", (Broken("x"),)), ("good", ())):
            generation = streamed(request_id=name, stop=stop, background=True, stream=False)
            place.journal.release(place.journal.open(generation))
        assert await place.lifecycle.claim_orphans() == 1
        await place.engine.submit()
        bad = await place.journal.read("bad")
        assert bad is not None
        assert (bad.leased, bad.finish_reason) == (False, FinishReason.ERROR)


async def test_an_adopted_request_counts_towards_its_tenants_limit() -> None:
    limits = RateLimiter(Tenants(default=Tenant(max_concurrent=1)))
    async with open_runner(limits=limits) as place:
        place.journal.release(place.journal.open(streamed(background=True, stream=False)))
        assert await place.lifecycle.claim_orphans() == 1
        submit = await place.engine.submit()
        with pytest.raises(QuireError) as caught:
            await collect(place.lifecycle.run(streamed(request_id="second")))
        assert caught.value.reason == "max_concurrent"
        place.engine.send(output(submit.request_id, tokens("c"), 0, STOP))
        async with asyncio.timeout(30):
            while place.lifecycle.in_flight:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)
        task, _ = await started(place, place.lifecycle.run(streamed(request_id="third")))
        place.engine.send(output("third", tokens("c"), 0, STOP))
        assert delta_text(await task) == "c"


async def test_a_charged_request_that_cannot_start_releases_its_place() -> None:
    limits = RateLimiter(Tenants(default=Tenant(max_concurrent=1)))
    async with open_runner(limits=limits) as place:
        for name, stop in (("r", (Broken("x"),)), ("s", (Broken("x"),)), ("t", ())):
            answer = place.lifecycle.run(streamed(stop=stop, request_id=name))
            if stop:
                with pytest.raises(QuireError) as caught:
                    await collect(answer)
                assert caught.value.code is ErrorCode.INTERNAL
            else:
                task, _ = await started(place, answer)
                place.engine.send(output("t", tokens("c"), 0, STOP))
                assert delta_text(await task) == "c"


async def test_a_background_request_that_fails_on_too_many_engines_ends() -> None:
    async with open_runner(grace=0.05) as place:
        assert await place.lifecycle.start(streamed(background=True, stream=False))
        for generation in range(3):
            await place.engine.submit()
            place.engine.restart_as(10 + generation)
            place.engine.break_stream()
        async with asyncio.timeout(10):
            while place.lifecycle.in_flight:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)
        assert await place.lifecycle.claim_orphans() == 0
        await place.left_nothing("r", FinishReason.ERROR, "")


async def test_requests_without_a_reader_are_bounded() -> None:
    async with open_runner(max_background=2) as place:
        for name in "ab":
            assert await place.lifecycle.start(streamed(request_id=name, background=True))
        with pytest.raises(QuireError) as caught:
            await place.lifecycle.start(streamed(request_id="c", background=True))
        assert (caught.value.code, caught.value.reason) == (ErrorCode.OVERLOADED, "background_full")
        assert await place.lifecycle.record("c") is None
        assert await place.lifecycle.claim_orphans() == 0
        await place.lifecycle.drain(0.01)


async def test_concurrent_adoptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_ORPHAN_TOKENS", 2 * streamed().stored_size)
    async with open_runner() as place:
        for name in "abc":
            place.journal.release(place.journal.open(streamed(request_id=name, background=True, stream=False)))
        assert await place.lifecycle.claim_orphans() == 2
        assert await place.lifecycle.claim_orphans() == 0
        submit = await place.engine.submit()
        place.engine.send(output(submit.request_id, tokens("c"), 0, STOP))
        async with asyncio.timeout(10):
            while not await place.lifecycle.claim_orphans():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.002)
        await place.lifecycle.drain(0.01)


async def test_a_request_that_runs_here_is_not_adopted_here() -> None:
    class Forgetful(MemoryJournal):
        async def orphans(self) -> list[str]:
            return ["r"]

        async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
            raise AssertionError("it is in flight")

    async with open_runner(journal=Forgetful()) as place:
        assert await place.lifecycle.start(streamed(background=True))
        await place.engine.submit()
        assert await place.lifecycle.claim_orphans() == 0
        await place.lifecycle.drain(0.01)


async def test_a_resumed_stream_has_its_own_deadline() -> None:
    async with open_runner() as place:
        first, submit = await started(place, place.lifecycle.run(streamed(deadline=time() + 0.3)))
        place.engine.send(output(submit.request_id, tokens("ab"), 0))
        record = await place.lifecycle.record("r")
        assert record is not None
        with pytest.raises(QuireError, match="time to read this answer was over") as caught:
            await collect(place.lifecycle.resume(record, StreamCursor(1), monotonic() + 0.1))
        assert caught.value.code is ErrorCode.DEADLINE
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.sleep(0.3)
        again = asyncio.create_task(collect(place.lifecycle.resume(record, StreamCursor(1), monotonic() + 20)))
        submit = await place.engine.submit()
        place.engine.send(output(submit.request_id, tokens("c"), 2, STOP))
        assert delta_text(await again) == "abc"


@pytest.mark.parametrize("background", [False, True])
async def test_a_reader_whose_deadline_passes_releases_the_request_it_resumed(background: bool) -> None:
    """Also when the request still waits for an engine."""
    async with open_runner(ready=0) as place:
        place.journal.release(place.journal.open(streamed(background=background, deadline=time() + 600)))
        record = await place.lifecycle.record("r")
        assert record is not None
        with pytest.raises(QuireError, match="time to read this answer was over") as caught:
            await collect(place.lifecycle.resume(record, StreamCursor(1), monotonic() + 0.05))
        after = await place.lifecycle.record("r")
        assert after is not None
        assert caught.value.code is ErrorCode.DEADLINE
        assert (after.leased, after.finish_reason, place.lifecycle.in_flight) == (False, None, 0)


@given(st.integers(0, 3 * CHUNK_TOKENS), st.integers(0, 3 * CHUNK_TOKENS), st.booleans())
@settings(deadline=None)
def test_a_long_delta_is_replayed_in_parts(first: int, second: int, ended: bool) -> None:
    generation = streamed(params=SamplingParams(seed=7, max_tokens=10_000))
    text = "".join(chr(97 + number % 26) for number in range(first + second))
    reason = FinishReason.STOP if ended else None
    pieces = [RecordedDelta(0, tokens(text[:first])), RecordedDelta(0, tokens(text[first:]), reason)]
    retold = list(Replayer(generation, TOKENIZER, StreamCursor(1)).replay(pieces, ended=ended))
    assert delta_text(retold) == text
    assert [token_id for delta in retold for token_id in delta.token_ids] == tokens(text)
    assert [delta.finish_reason for delta in retold if delta.finish_reason] == [FinishReason.STOP] * ended
    assert max((len(delta.token_ids) for delta in retold), default=0) <= CHUNK_TOKENS


def restored(pieces: list[RecordedDelta], journal: MemoryJournal, stop: tuple[str, ...] = ()) -> RequestState:
    """A request that goes on from its record, which has these pieces."""
    request = GenerationRequest("r", "m", tokens("hi"), SamplingParams(max_tokens=2**20), stop)
    lease, position = journal.open(request), 0
    for piece in pieces:
        journal.append(lease, position, piece)
        position += len(piece.token_ids)
    return RequestState(
        request, TOKENIZER, journal, lease, ResponseConsumer(), record=RequestRecord(request, "router", 1, pieces)
    )


@given(st.lists(st.text("abé", max_size=3 * CHUNK_TOKENS), max_size=4), st.sampled_from([(), ("ba",), ("aab", "bé")]))
@settings(deadline=None)
def test_a_record_reread_in_parts_equals_one_read_at_once(texts: list[str], stop: tuple[str, ...]) -> None:
    journal = MemoryJournal()

    async def reread() -> tuple[RequestState, int]:
        progress = restored([RecordedDelta(0, tokens(text)) for text in texts], journal, stop)
        before = progress.usage.completion_tokens
        await progress.replay_record()
        return progress, before

    progress, before = asyncio.run(reread())
    (choice,) = create_choices(progress.generation, TOKENIZER, 1)
    choice.process(Output(tokens("".join(texts)), 0))
    submission = progress.build_submit({})
    assert before == len(tokens("".join(texts)))
    assert list(submission.output_token_ids) == choice.token_ids
    assert progress.ended == (choice.finish_reason is not None)
    if not progress.ended:
        following = Output(tokens("aé"), len(choice.token_ids), FinishReason.LENGTH)
        assert progress.process_output(replace(following))[0].text == choice.process(following).text
        record = asyncio.run(journal.read("r"))
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == (choice.token_ids, choice.finish_reason)


async def test_a_long_record_is_reread_in_chunks() -> None:
    progress, turns = restored([RecordedDelta(0, tokens("a") * 100 * CHUNK_TOKENS)], MemoryJournal()), 0

    async def beat() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beating = asyncio.create_task(beat())
    await progress.replay_record()
    beating.cancel()
    assert turns >= 99
