"""A reader who comes back with any mark of an answer, whatever became of its record meanwhile, is told what is missing
and nothing else: no message says nothing, and none comes after the usage.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
from google.protobuf.json_format import MessageToDict
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured_output import Structured, StructuredKind
from quire_router.api.auth import ANONYMOUS
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.response_opener import Response, ResponseOpener
from quire_router.api.rest.openai_format import CHAT, COMPLETION, DONE, ChunkEncoder
from quire_router.api.rpc import messages
from quire_router.api.rpc.servicer import DeltaMessages
from quire_router.api.stored_requests import RequestStore
from quire_router.core.generation import Delta, GenerationRequest, Usage, prompt_request_id
from quire_router.core.response_options import ResponseOptions
from quire_router.journal.base import Lease
from quire_router.journal.memory import MemoryJournal
from quire_router.requests import resume as resumption

from tests.support.contract_engine import Script
from tests.support.scripted_api import events_of
from tests.support.tool_models import THINKING_TEMPLATE, tokenizer_with
from tests.unit.router.requests.test_resume import Place

TOKENIZER = tokenizer_with(THINKING_TEMPLATE)
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
GRAMMAR = Structured(StructuredKind.GRAMMAR, "start: /a+/")

Event = tuple[str, Any]
"""What a reader is given: where it stands then, and the data."""
Fact = tuple[str, int, Any]
"""What one event says: of what kind it is, of which choice, and what."""


@dataclass(frozen=True)
class Kind:
    """A request, and what an engine makes of each of its choices: ``most`` tokens of each at most."""

    outputs: tuple[str, ...]
    operation: str = "chat"
    prompts: int = 1
    echo: bool = False
    most: int = 500
    steps: tuple[int, ...] = (7, 3)
    options: ResponseOptions = field(default_factory=lambda: ResponseOptions(include_usage=True))
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> Script:
        return Script([TOKENIZER.encode_plain(output)[: self.most] for output in self.outputs], self.most)

    @property
    def generations(self) -> tuple[GenerationRequest, ...]:
        ids = tuple(prompt_request_id("r", number) if number else "r" for number in range(self.prompts))
        params = SamplingParams(**{"seed": 7, "max_tokens": self.most, "n": len(self.outputs), **self.params})
        common = {
            "operation": self.operation,
            "stream": True,
            "response_options": self.options.to_json(),
            "echo": self.echo,
        }
        prompt = TOKENIZER.encode_plain("hi é")
        return tuple(
            GenerationRequest(name, "m", prompt, params, parts=ids if self.prompts > 1 and not number else (), **common)
            for number, name in enumerate(ids)
        )


TOOLS = ResponseOptions(include_usage=True, tools=("get",))
KINDS = {
    "plain": Kind(("Hello wörld", "no", "")),
    "cut": Kind(("Hello wörld",), most=9),
    "without the usage": Kind(("Hello", "no"), options=ResponseOptions()),
    "thoughts": Kind(("<think>\nwell, yes\n</think>\nno",)),
    "forced call": Kind((CALL,), options=TOOLS, params={"structured": GRAMMAR}),
    "tools": Kind((f"so\n{CALL}\n{CALL}", "no <tool"), options=TOOLS, steps=(20, 11)),
    "log-probabilities": Kind(
        ("Hello", "no"), options=ResponseOptions(include_usage=True, logprobs=0), params={"logprobs": 0}
    ),
    "best of": Kind(("one", "two", "six"), params={"n": 2, "best_of": 3}),
    "beams": Kind(("one", "two"), params={"beam_width": 4}),
    "prompt's log-probabilities": Kind(("Hello",), "text_completion", params={"prompt_logprobs": 0}),
    "prompts": Kind(("Hello", ""), "text_completion", prompts=2),
    "echoed prompts": Kind(("Hello",), "text_completion", prompts=2, echo=True, most=4),
}


# Readers


async def over_grpc(answer: Response) -> AsyncGenerator[Event]:
    """The messages, as the service writes them."""
    pieces = DeltaMessages(answer, messages.resume_response)
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            message = pieces.message(delta)
            if message is not None:
                inner = getattr(message, str(message.WhichOneof("response")))
                yield inner.event_id, inner
            if delta.usage is not None:
                return
    raise AssertionError("it ends without its usage")


async def over_rest(answer: Response) -> AsyncGenerator[Event]:
    """The events, as a stream writes them."""
    chunks = ChunkEncoder(
        CHAT if answer.prepared.first.operation == "chat" else COMPLETION, answer.prepared, answer.cursor
    )
    opened = False
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            if chunks.logprobs is not None:
                await chunks.logprobs.read_prompt(delta)
            data = (b"" if opened else chunks.opening()) + chunks.encode(delta)
            opened = True
            assert data.endswith(DONE) is (delta.usage is not None)
            for event_id, event in events_of(data.removesuffix(DONE)):
                yield event_id or "", event
            if delta.usage is not None:
                return
    raise AssertionError("it ends without its usage")


def facts_over_grpc(message: Any) -> Iterator[Fact]:
    index = message.index
    for name in ("text", "reasoning", "finish_reason", "score", "prompt_logprobs"):
        if getattr(message, name, None):
            yield name, index, str(getattr(message, name))
    for token_id in message.token_ids:
        yield "tokens", index, f" {token_id}"
    for logprobs in message.logprobs:
        yield "logprobs", index, str(MessageToDict(logprobs))
    for call in getattr(message, "tool_calls", ()):
        yield f"call {call.index}", index, f"{call.id}{call.name}{call.arguments}"
    if message.HasField("usage"):
        yield "usage", 0, str(MessageToDict(message.usage))


def facts_over_rest(event: Any) -> Iterator[Fact]:
    for choice in event["choices"]:
        index, delta = choice["index"], choice.get("delta", {})
        texts = {**choice, **delta}
        for name in ("role", "text", "content", "reasoning", "finish_reason", "score"):
            if texts.get(name):
                yield name, index, str(texts[name])
        for logprobs in (choice.get("logprobs") or {}).get("content") or ():
            yield "logprobs", index, str(logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            yield (
                f"call {call['index']}",
                index,
                f"{call.get('id', '')}{function.get('name', '')}{function['arguments']}",
            )
    if event.get("usage"):
        yield "usage", 0, str(event["usage"])


Reader = Callable[[Response], AsyncGenerator[Event]]
FactReader = Callable[[Any], Iterator[Fact]]
READERS: dict[str, tuple[Reader, FactReader]] = {
    "gRPC": (over_grpc, facts_over_grpc),
    "REST": (over_rest, facts_over_rest),
}


# Records


@dataclass
class Written:
    """What one prompt came to undisturbed."""

    generation: GenerationRequest
    deltas: list[Delta]

    @property
    def usage(self) -> Usage:
        usage = self.deltas[-1].usage
        assert usage is not None
        return usage

    def write(self, journal: MemoryJournal, lease: Lease, begin: int, end: int) -> None:
        """Some of its pieces, as its router writes them."""
        positions: dict[int, int] = defaultdict(int)
        for number, delta in enumerate(self.deltas[:end]):
            if number >= begin and (delta.token_ids or delta.finish_reason is not None):
                journal.append(lease, positions[delta.index], delta)
            positions[delta.index] += len(delta.token_ids)

    def finish(self, journal: MemoryJournal, lease: Lease) -> None:
        journal.finish(lease, FinishReason.STOP, usage=self.usage)


def finished(written: Written, journal: MemoryJournal) -> None:
    lease = journal.open(written.generation)
    written.write(journal, lease, 0, len(written.deltas))
    written.finish(journal, lease)


def not_closed(written: Written, journal: MemoryJournal) -> None:
    """Its router died, or was left, between the last choice's end and the record's."""
    lease = journal.open(written.generation)
    written.write(journal, lease, 0, len(written.deltas))
    journal.release(lease)


def left(written: Written, journal: MemoryJournal) -> None:
    """Its router died, or was left, in the middle."""
    lease = journal.open(written.generation)
    written.write(journal, lease, 0, len(written.deltas) // 2)
    journal.release(lease)


def lost(written: Written, journal: MemoryJournal) -> None:
    """Its router died before it had written anything but the request."""
    journal.release(journal.open(written.generation))


def running(written: Written, journal: MemoryJournal) -> None:
    """Another router goes on with it."""
    lease, middle = journal.open(written.generation), len(written.deltas) // 2
    written.write(journal, lease, 0, middle)
    _go_on(written, journal, lease, middle, len(written.deltas))


def dying(written: Written, journal: MemoryJournal) -> None:
    """Another router goes on with it, and leaves it after some pieces more."""
    lease, middle = journal.open(written.generation), len(written.deltas) // 2
    written.write(journal, lease, 0, middle)
    _go_on(written, journal, lease, middle, min(middle + 2, len(written.deltas) - 1))


def _go_on(written: Written, journal: MemoryJournal, lease: Lease, at: int, end: int) -> None:
    """Writes its pieces from ``at`` to ``end``, one by one."""
    if at < end:
        written.write(journal, lease, at, at + 1)
        asyncio.get_running_loop().call_later(0.0005, _go_on, written, journal, lease, at + 1, end)
    elif end == len(written.deltas):
        written.finish(journal, lease)
    else:
        journal.release(lease)


RECORDS = [finished, not_closed, left, lost, running, dying]


# The whole of it


@dataclass
class Router:
    """A router of its own with what the API needs of it."""

    kind: Kind
    journal: MemoryJournal
    late_ends: bool = False

    def __post_init__(self) -> None:
        self.place = Place(self.kind.script, self.journal, TOKENIZER)
        self.place.link.engine.late_ends = self.late_ends
        together = MultiPromptRunner(self.place.lifecycle, ConcurrencyLimit(64))
        self.archive = RequestStore(self.place.lifecycle, {"m": TOKENIZER})
        self.answers = ResponseOpener(self.place.lifecycle, together, self.archive)

    async def first(self, read: Reader) -> list[Event]:
        admitted = PreparedRequest(self.kind.generations, self.kind.options, TOKENIZER, event_ids=True)
        return await self.place.read(read(await self.answers.open(admitted, ANONYMOUS)), [*self.kind.steps])

    async def alone(self, generation: GenerationRequest) -> Written:
        """One prompt as the journal records it."""
        return Written(generation, await self.place.read(self.place.lifecycle.run(generation), [*self.kind.steps]))

    async def resumed(self, read: Reader, after: str) -> list[Event]:
        earlier = await self.archive.get("r", ANONYMOUS)
        answer = await self.answers.resume(earlier, after, ANONYMOUS)
        return await self.place.read(read(answer), [step + 1 for step in self.kind.steps])


def together(facts: list[Fact]) -> dict[tuple[str, int], str]:
    """All facts of each choice joined: how many events they came in does not matter, but a repeated one does."""
    texts: dict[tuple[str, int], str] = defaultdict(str)
    for kind, index, what in facts:
        texts[kind, index] += what
    return texts


@dataclass
class Undisturbed:
    """An answer that nothing happened to, as one API tells it and as the journal is told of each of its prompts."""

    events: list[Event]
    prompts: list[Written]

    @classmethod
    async def of(cls, kind: Kind, read: Reader, *, late_ends: bool) -> Self:
        alone = [await Router(kind, MemoryJournal(), late_ends).alone(each) for each in kind.generations]
        return cls(await Router(kind, MemoryJournal(), late_ends).first(read), alone)

    def places(self) -> Iterator[tuple[str, list[Event]]]:
        """Every mark on the way, and what its reader has."""
        for cut in range(len(self.events) + 1):
            yield self.events[cut - 1][0] if cut else "", self.events[:cut]

    def records(self) -> Iterator[tuple[str, MemoryJournal]]:
        """Whatever may have become of the record, and of that of a second prompt: the same, or the next thing."""
        same, mixed = zip(RECORDS, RECORDS, strict=True), zip(RECORDS, [*RECORDS[1:], RECORDS[0]], strict=True)
        for fates in [(fate,) for fate in RECORDS] if len(self.prompts) == 1 else [*same, *mixed]:
            journal = MemoryJournal()
            for fate, written in zip(fates, self.prompts, strict=True):
                fate(written, journal)
            yield " and ".join(fate.__name__ for fate in fates), journal


def check(events: list[Event], facts_of: FactReader, where: str) -> list[Fact]:
    """The facts of all events. Every event has at least one, and only the last event may have the usage."""
    by_event = [list(facts_of(event)) for _, event in events]
    assert all(by_event), f"an event is empty: {where}"
    facts = [fact for each in by_event for fact in each]
    assert "usage" not in [kind for kind, _, _ in facts[:-1]], f"more after the usage: {where}"
    return facts


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "POLL_INTERVAL", 0.001)


@pytest.mark.parametrize("late_ends", [False, True], ids=["early ends", "late ends"])
@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize("name", KINDS)
async def test_resuming_at_every_cursor_gives_exactly_the_rest(name: str, api: str, late_ends: bool) -> None:
    kind, (read, facts_of) = KINDS[name], READERS[api]
    whole = await Undisturbed.of(kind, read, late_ends=late_ends)
    expected = together(check(whole.events, facts_of, "undisturbed"))
    for after, had in whole.places():
        for fate, journal in whole.records():
            rest = await Router(kind, journal, late_ends).resumed(read, after)
            where = f"{fate}, after {after!r}: {rest}"
            assert together(check(had + rest, facts_of, where)) == expected, where
            assert [event_id for event_id, _ in rest][-1:] == [whole.events[-1][0]][: len(rest)], where


@pytest.mark.parametrize("name", KINDS)
async def test_resuming_over_the_other_api_gives_no_empty_message(name: str) -> None:
    kind = KINDS[name]
    for api, other in (("gRPC", "REST"), ("REST", "gRPC")):
        whole = await Undisturbed.of(kind, READERS[api][0], late_ends=False)
        read, facts_of = READERS[other]
        for after, _ in whole.places():
            for fate, journal in whole.records():
                rest = await Router(kind, journal).resumed(read, after)
                check(rest, facts_of, f"{fate}, from {api} after {after!r}: {rest}")
                assert not (rest and after.endswith("u")), f"{fate}: {rest}"


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize("name", KINDS)
async def test_a_request_cancelled_while_its_reader_was_away_ends_once(name: str, api: str) -> None:
    kind, (read, facts_of) = KINDS[name], READERS[api]
    whole = await Undisturbed.of(kind, read, late_ends=False)
    for after, had in whole.places():
        for fate, journal in whole.records():
            for each in kind.generations:
                await journal.cancel(each.request_id)
            rest = await Router(kind, journal).resumed(read, after)
            facts = check(had + rest, facts_of, f"{fate}, after {after!r}: {rest}")
            ends = sorted(index for field, index, _ in facts if field == "finish_reason")
            assert ends == [*range(len(kind.generations) * kind.generations[0].params.n)], f"{fate}, {after!r}: {rest}"
