"""What the journal in memory keeps, and for how long."""

import asyncio
import tracemalloc
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured_output import Structured, StructuredKind
from quire_router.core.generation import GenerationRequest
from quire_router.journal.memory import MemoryJournal

from tests.support.journals import append_tokens


def request(request_id: str = "r", prompt: list[int] | None = None, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3, **params)
    )


async def test_finished_records_are_dropped_after_the_retention_time() -> None:
    now = [0.0]
    journal = MemoryJournal(retention=10, clock=lambda: now[0])
    journal.finish(journal.open(request("done")), FinishReason.STOP)
    journal.open(request("running"))
    now[0] = 9.9
    assert await journal.read("done") is not None
    now[0] = 10.0
    assert await journal.read("done") is None
    assert await journal.read("running") is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30))
@settings(deadline=None)
def test_memory_is_bounded_in_tokens_and_the_oldest_finished_records_are_evicted(
    script: list[tuple[int, int, bool]],
) -> None:
    """Each request of ``script`` has a prompt, then an output, and then it may finish."""

    async def run() -> None:
        most = 20
        journal = MemoryJournal(max_tokens=most)
        running: dict[str, int] = {}
        finished: dict[str, int] = {}
        for number, (prompt, output, finishes) in enumerate(script):
            name = str(number)
            lease = journal.open(request(name, [1] * prompt))
            finished = newest(finished, most - sum(running.values()) - prompt)
            if sum(running.values()) + prompt <= most:
                running[name] = prompt + output
            append_tokens(journal, lease, 0, [1] * output)
            finished = newest(finished, most - sum(running.values()))
            if finishes and name in running:
                journal.finish(lease, FinishReason.STOP)
                finished = newest(finished | {name: running.pop(name)}, most - sum(running.values()))
            for each in map(str, range(number + 1)):
                assert (await journal.read(each) is not None) == (each in running or each in finished)

    asyncio.run(run())


def newest(finished: dict[str, int], room: int) -> dict[str, int]:
    """The last entries that have room together."""
    kept = dict(finished)
    while kept and sum(kept.values()) > room:
        del kept[next(iter(kept))]
    return kept


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=40))
@settings(deadline=None, max_examples=60)
def test_no_tenant_evicts_what_another_has_in_its_share(script: list[tuple[str, int, int, bool]]) -> None:
    """Bob has a quarter; three others do what they like, each with a prompt, an output, and maybe an end."""

    async def run() -> None:
        journal = MemoryJournal(max_tokens=100, max_records=40)
        own = [replace(request(f"bob {number}", [1] * 5), tenant="bob") for number in range(5)]
        for each in own:
            journal.finish(journal.open(each), FinishReason.STOP)
        tokens = 0
        for number, (tenant, prompt, output, finishes) in enumerate(script):
            lease = journal.open(replace(request(f"{number}", [1] * prompt), tenant=tenant))
            append_tokens(journal, lease, 0, [1] * output)
            tokens += output
            if finishes:
                journal.finish(lease, FinishReason.STOP)
        if 25 + 3 * 25 + tokens <= 100 or all(finishes for *_, finishes in script):
            assert all([await journal.read(each.request_id) is not None for each in own])
        assert sum(share.tokens for share in journal._shares.values()) == journal._tokens
        assert sum(share.records for share in journal._shares.values()) == len(journal._records)
        assert journal._tokens == sum(record.size for record in journal._records.values())

    asyncio.run(run())


async def test_running_requests_of_one_tenant_leave_half_of_the_space_to_others() -> None:
    journal = MemoryJournal(max_tokens=100)
    for number in range(30):
        journal.open(replace(request(f"{number}", [1] * 10), tenant="alice"))
    bob = journal.open(replace(request("bob", [1] * 40), tenant="bob"))
    assert await journal.read("4") is not None
    assert await journal.read("5") is None, "alice has half"
    journal.finish(bob, FinishReason.STOP)
    for number in range(30, 60):
        journal.finish(journal.open(replace(request(f"{number}", [1] * 10), tenant="alice")), FinishReason.STOP)
    assert await journal.read("bob") is not None


async def test_a_running_record_is_kept_whole_however_long_it_grows() -> None:
    journal = MemoryJournal(max_tokens=10)
    lease = journal.open(request("long"))
    for position in range(0, 100, 10):
        append_tokens(journal, lease, position, list(range(position, position + 10)))
    journal.open(request("new"))
    record = await journal.read("long")
    assert record is not None
    assert record.choices[0].token_ids == list(range(100))
    assert await journal.read("new") is None


async def test_memory_is_bounded_and_finished_records_are_evicted_first() -> None:
    journal = MemoryJournal(max_records=2)
    journal.open(request("running"))
    journal.finish(journal.open(request("done")), FinishReason.STOP)
    journal.open(request("new"))
    assert await journal.read("done") is None
    append_tokens(journal, journal.open(request("too many")), 0, [1])
    assert await journal.read("too many") is None
    assert await journal.read("running") is not None
    assert await journal.read("new") is not None


LARGE = {
    "grammar": lambda number: request(structured=Structured(StructuredKind.REGEX, f"{number:04}" * 1000)),
    "biases": lambda number: request(logit_bias=tuple((number + token_id, token_id / 64) for token_id in range(64))),
    "words": lambda number: request(bad_words=tuple((number + first, first, 10**6 + first) for first in range(32))),
    "stops": lambda number: replace(request(), stop=tuple(f"{number:04}{stop:012}" * 16 for stop in range(16))),
    "parts": lambda number: replace(request(), parts=tuple(f"{number:04}{part:028}" for part in range(128))),
}


@pytest.mark.parametrize("kind", LARGE)
def test_whatever_clients_multiply_is_counted(kind: str) -> None:
    """Of records that could take megabytes, no more is kept than what has room beside them."""
    journal = MemoryJournal(max_tokens=20_000)
    tracemalloc.start()
    try:
        for number in range(400):
            generation = replace(LARGE[kind](number), request_id=str(number))
            journal.finish(journal.open(generation), FinishReason.STOP)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 5 * 80_000
