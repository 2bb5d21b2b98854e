"""Whatever fails between a router and its engine, and in whichever order the choices' tokens come, the client gets the
output of an undisturbed run.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.admission.fair_queue import QueuedRequest
from quire_router.core.generation import Delta, GenerationRequest, LoRA
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.engines.engine import Dispatch, Engine
from quire_router.engines.load import LoadLedger
from quire_router.engines.output_stream import OutputStream
from quire_router.engines.session import CommandQueue, Session
from quire_router.engines.settings import ConnectionSettings
from quire_router.journal.base import Journal
from quire_router.journal.memory import MemoryJournal
from quire_router.placement.engine_table import EngineTable, Rows
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.runner import RequestRunner

from tests.support.batches import take_all
from tests.support.byte_tokenizer import TOKENIZER, tokens
from tests.support.contract_engine import STOP_TOKEN, ContractEngine, Script
from tests.support.runner_harness import FirstIdle

PROMPT = "hello"
CALM = ["tokens"] * 6 + ["commands"] * 3 + ["read"] * 3
DISTURBED = [*CALM, "replay", "lost commands", "restart", "give back", "gap"]


class DirectLink:
    """A connection without a network: the test delivers commands and batches itself."""

    address = "engine"
    ready = True
    description = engine_pb2.DescribeResponse(served_model_names=["m"])

    def __init__(self, engine: ContractEngine) -> None:
        self.engine = engine
        self.session = Session(ConnectionSettings(slow_client_timeout=3600))
        self.session.begin(engine_pb2.Snapshot(generation=engine.generation))
        self.load = engine_pb2.Load()

    def submit(self, message: engine_pb2.Submit, tenant: str = "") -> OutputStream:
        return self.session.submit(message)

    def deliver_commands(self) -> None:
        for command in pending_commands(self.session.commands):
            self.engine.receive(command)

    def step(self, counts: dict[int, int]) -> None:
        take_all(self.session, self.engine.step(counts))

    def replay(self, back: int) -> None:
        """The stream breaks, and the engine resumes it ``back`` batches earlier."""
        sequence = max(0, self.session.sequence - back)
        snapshot = engine_pb2.Snapshot(generation=self.engine.generation, resumed=True, sequence=sequence)
        self.session.begin(snapshot)
        for batch in self.engine.batches[sequence:]:
            take_all(self.session, batch)

    def restart(self) -> None:
        self.engine.restart()
        self.session.begin(engine_pb2.Snapshot(generation=self.engine.generation))

    def gap(self) -> None:
        """A batch is lost: the session's state is invalidated, and a new session begins."""
        self.session.invalidate()
        self.engine.batches = []
        self.session.begin(engine_pb2.Snapshot(generation=self.engine.generation))


def pending_commands(outbox: CommandQueue) -> Iterator[engine_pb2.SessionRequest]:
    """Takes the commands that are queued now."""
    while True:
        taking = outbox.next()
        try:
            taking.send(None)
        except StopIteration as taken:
            yield taken.value
        else:
            taking.close()
            return


class OneEngine:
    """A fleet of one engine whose admission never waits."""

    def __init__(self, link: DirectLink) -> None:
        self.table = EngineTable()
        self.ledger = LoadLedger(self.table)
        self.engine = Engine(link, self.ledger.add(link.address))  # type: ignore[arg-type]
        self.tenants: set[str] = set()  # whose requests it was sent

    def rows(self, model: str, lora: LoRA | None = None) -> Rows:
        return np.array([self.engine.row])

    def version(self, engine_id: str) -> ModelVersion:
        return UNKNOWN_VERSION

    def zone(self, engine_id: str) -> str | None:
        return None

    def dispatch(
        self, engine_id: str, message: engine_pb2.Submit, *, pending_tokens: int, tenant: str = ""
    ) -> Dispatch:
        self.tenants.add(tenant)
        begin = partial(self.ledger.begin, engine_id, pending_tokens=pending_tokens)
        return Dispatch(self.engine, message, begin, lambda _: None)

    async def acquire(self, waiting: QueuedRequest) -> None:
        pass

    def abandon(self, request_id: str) -> bool:
        return False


@dataclass
class Client:
    """Reads one request's stream and keeps its deltas."""

    deltas: list[Delta] = field(default_factory=list)

    def of(self, index: int) -> list[Delta]:
        return [delta for delta in self.deltas if delta.index == index]

    def text(self, index: int) -> str:
        return "".join(delta.text for delta in self.of(index))

    def token_ids(self, index: int) -> list[int]:
        return [token_id for delta in self.of(index) for token_id in delta.token_ids]

    def logprobs(self, index: int) -> list[float]:
        return [each.logprob for delta in self.of(index) for each in delta.logprobs]

    def stop_token(self, index: int) -> StopToken | None:
        *earlier, last = self.of(index)
        assert not any(delta.stop_token for delta in earlier)
        return last.stop_token

    async def read(self, lifecycle: RequestRunner, generation: GenerationRequest, journal: MemoryJournal) -> None:
        async for delta in lifecycle.run(generation):
            assert not any(earlier.finish_reason for earlier in self.of(delta.index))
            assert not any(earlier.usage for earlier in self.deltas)
            self.deltas.append(delta)
            record = await journal.read(generation.request_id)
            assert record is not None
            for index, choice in enumerate(record.choices):
                assert choice.token_ids[: len(self.token_ids(index))] == self.token_ids(index)


@dataclass
class DisturbedRun:
    """One request from beginning to end, with the disturbances that ``data`` draws."""

    script: Script
    generation: GenerationRequest
    data: st.DataObject
    cancel_at: int | None = None

    def __post_init__(self) -> None:
        draw = self.data.draw
        self.engine = ContractEngine(
            self.script,
            repeats=draw(st.integers(0, 2), label="repeats"),
            late_ends=draw(st.booleans(), label="late ends"),
            columns=draw(st.booleans(), label="columns"),
        )
        self.client = Client()
        self.events = draw(st.sampled_from([CALM, DISTURBED]), label="events")
        self.no_command_was_lost = True

    async def run(self) -> None:
        self.link, self.journal = DirectLink(self.engine), MemoryJournal()
        fleet = OneEngine(self.link)
        lifecycle = make_lifecycle(fleet, self.journal)
        reading = asyncio.create_task(self.client.read(lifecycle, self.generation, self.journal))
        await settle()
        for number in range(60):
            if reading.done():
                break
            if number == self.cancel_at:
                await lifecycle.cancel("r")
            await self.disturb()
        for _ in range(200):
            if reading.done():
                break
            await self.advance()
        await asyncio.wait_for(reading, 10)
        assert fleet.tenants <= {self.generation.tenant}
        await self.check_nothing_is_left(lifecycle, fleet)

    async def disturb(self) -> None:
        link, event = self.link, self.data.draw(st.sampled_from(self.events), label="event")
        self.no_command_was_lost &= event not in ("lost commands", "gap")
        if event == "tokens":
            indexes = st.integers(0, len(self.script.choices) - 1)
            link.step(self.data.draw(st.dictionaries(indexes, st.integers(0, 3)), label="tokens"))
        elif event == "commands":
            link.deliver_commands()
        elif event == "replay":
            link.replay(self.data.draw(st.integers(0, 3), label="batches"))
        elif event == "lost commands":
            list(pending_commands(link.session.commands))
            link.replay(0)
        elif event == "restart":
            link.restart()
        elif event == "give back":
            self.engine.give_back()
        elif event == "gap":
            link.gap()
        else:
            await settle()

    async def advance(self) -> None:
        self.link.deliver_commands()
        self.link.step(dict.fromkeys(range(len(self.script.choices)), 2))
        await settle()

    async def check_nothing_is_left(self, lifecycle: RequestRunner, fleet: OneEngine) -> None:
        if self.events is CALM and self.cancel_at is None:
            assert self.engine.submits == 1
        assert lifecycle.in_flight == 0
        assert fleet.engine.in_flight == fleet.table.requests.sum() == fleet.table.decoding.sum() == 0
        self.link.replay(0)
        self.link.deliver_commands()
        assert not self.engine.runs, "the engine still runs a request"
        self.link.step({})
        assert self.link.session.in_flight == 0
        self.link.replay(0)
        if self.no_command_was_lost:
            assert not list(pending_commands(self.link.session.commands)), "a request that has ended is cancelled"
        record = await self.journal.read("r")
        assert record is not None
        for index, choice in enumerate(record.choices):
            assert choice.token_ids == self.client.token_ids(index)
            assert choice.finish_reason is self.client.of(index)[-1].finish_reason


def make_lifecycle(fleet: OneEngine, journal: Journal, tokenizer: ModelTokenizer = TOKENIZER) -> RequestRunner:
    placer = FirstIdle(fleet.table)
    routing = Dispatcher(fleet, placer, fleet, policy="first_idle", hold_timeout=10)  # type: ignore[arg-type]
    return RequestRunner(fleet, placer, routing, journal, {"m": tokenizer}, max_attempts=1000)  # type: ignore[arg-type]


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(8):
        await asyncio.sleep(0)


def undisturbed(output: str, stops: tuple[str, ...], max_tokens: int) -> tuple[str, str, FinishReason]:
    """A choice's text, the same with its stop string, and its finish reason, by searching the whole output."""
    for end in range(1, len(output) + 1):
        found = [len(stop) for stop in stops if output[:end].endswith(stop)]
        if found:
            return output[: end - max(found)], output[:end], FinishReason.STOP
    return output, output, FinishReason.LENGTH if len(output) == max_tokens else FinishReason.STOP


def stop_token_of(script: Script, index: int, text: str, whole: str, reason: FinishReason) -> StopToken | None:
    """The token that ended an undisturbed choice; None if a stop string or its length did."""
    if reason is not FinishReason.STOP or text != whole:
        return None
    return StopToken(STOP_TOKEN, TokenLogprobs(script.logprob(index, len(whole))))


outputs = st.text("abX", max_size=9)
stop_strings = st.lists(st.text("abX", min_size=1, max_size=3), max_size=2).map(tuple)


@st.composite
def answers(draw: st.DrawFn, most: int = 4) -> tuple[list[str], tuple[str, ...], int]:
    """Each choice's output without stop strings, the stop strings, and ``max_tokens``."""
    made = draw(st.lists(outputs, min_size=1, max_size=most))
    longest = max(1, *map(len, made))
    return made, draw(stop_strings), longest + draw(st.integers(0, 1))


def run_disturbed(
    made: list[str], stop: tuple[str, ...], max_tokens: int, data: st.DataObject, **params: Any
) -> DisturbedRun:
    cancel_at = params.pop("cancel_at", None)
    sampling = SamplingParams(seed=7, max_tokens=max_tokens, **params)
    generation = GenerationRequest("r", "m", tokens(PROMPT), sampling, stop, tenant="t")
    done = DisturbedRun(Script([tokens(text) for text in made], max_tokens), generation, data, cancel_at)
    asyncio.run(done.run())
    return done


@given(answers(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_each_choice_equals_that_of_an_undisturbed_run(
    answer: tuple[list[str], tuple[str, ...], int], logprobs: bool, prompt_logprobs: bool, data: st.DataObject
) -> None:
    made, stop, max_tokens = answer
    wanted_logprobs = {"logprobs": 0 if logprobs else None, "prompt_logprobs": 0 if prompt_logprobs else None}
    done = run_disturbed(made, stop, max_tokens, data, n=len(made), **wanted_logprobs)
    expected = [undisturbed(output, stop, max_tokens) for output in made]
    client, script = done.client, done.script
    for index, (text, whole, reason) in enumerate(expected):
        assert client.text(index) == text
        assert client.token_ids(index) == tokens(whole)
        assert client.of(index)[-1].finish_reason is reason
        given_logprobs = [script.logprob(index, position) for position in range(len(whole))]
        assert client.logprobs(index) == (given_logprobs if logprobs else [])
        assert client.stop_token(index) == (stop_token_of(script, index, text, whole, reason) if logprobs else None)
    usage = client.deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), sum(len(whole) for _, whole, _ in expected))
    check_prompt_logprobs(client, prompt_logprobs)


def check_prompt_logprobs(client: Client, requested: bool) -> None:
    """All of them are in the first delta, and none in any other."""
    by_delta = [[each.logprob for each in delta.prompt_logprobs] for delta in client.deltas]
    assert by_delta[0] == ([-float(position) for position in range(1, len(PROMPT))] if requested else [])
    assert not any(by_delta[1:])


@given(answers(most=5), st.booleans(), st.booleans(), st.data())
@settings(max_examples=50, deadline=None)
def test_best_of_returns_the_choices_with_the_highest_mean_logprob_whatever_fails(
    answer: tuple[list[str], tuple[str, ...], int], logprobs: bool, prompt_logprobs: bool, data: st.DataObject
) -> None:
    made, stop, max_tokens = [*answer[0], "ba"], answer[1], max(2, answer[2])
    n = data.draw(st.integers(1, len(made) - 1), label="n")
    wanted_logprobs = {"logprobs": 0 if logprobs else None, "prompt_logprobs": 0 if prompt_logprobs else None}
    done = run_disturbed(made, stop, max_tokens, data, n=n, best_of=len(made), **wanted_logprobs)
    expected = [undisturbed(output, stop, max_tokens) for output in made]
    client, script = done.client, done.script

    def mean(index: int) -> float:
        values = [script.logprob(index, position) for position in range(len(expected[index][1]))]
        return fmean(values) if values else float("-inf")

    ranked = sorted(range(len(made)), key=lambda index: (-mean(index), index))[:n]
    assert [delta.index for delta in client.deltas] == list(range(n))
    for rank, candidate in enumerate(ranked):
        text, whole, reason = expected[candidate]
        assert client.text(rank) == text
        assert client.token_ids(rank) == tokens(whole)
        assert client.of(rank)[-1].finish_reason is reason
        given_logprobs = [script.logprob(candidate, position) for position in range(len(whole))]
        assert client.logprobs(rank) == (given_logprobs if logprobs else [])
        assert client.stop_token(rank) == (stop_token_of(script, candidate, text, whole, reason) if logprobs else None)
    usage = client.deltas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == sum(len(whole) for _, whole, _ in expected)
    check_prompt_logprobs(client, prompt_logprobs)


@given(st.lists(outputs, min_size=1, max_size=3), st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_all_beams_that_a_client_gets_are_of_one_search(
    made: list[str], prompt_logprobs: bool, data: st.DataObject
) -> None:
    top = 0 if prompt_logprobs else None
    done = run_disturbed(made, (), 10, data, n=len(made), beam_width=4, prompt_logprobs=top)
    client, deltas = done.client, done.client.deltas
    assert [delta.index for delta in deltas] == list(range(len(made)))
    searches = {delta.token_ids[-1] for delta in deltas}
    assert len(searches) == 1
    assert [delta.token_ids for delta in deltas] == done.script.beams(searches.pop(), len(made))
    assert [delta.score for delta in deltas] == [-1.0 - index for index in range(len(made))]
    check_prompt_logprobs(client, prompt_logprobs)


@pytest.mark.parametrize("kind", ["drawn", "best_of", "beams"])
@given(answers(), st.integers(0, 15), st.data())
@settings(max_examples=30, deadline=None)
def test_cancelling_ends_every_choice_and_delivers_only_its_own_tokens(
    kind: str, answer: tuple[list[str], tuple[str, ...], int], cancel_at: int, data: st.DataObject
) -> None:
    made, stop, max_tokens = answer
    if kind == "beams":
        params: dict[str, int] = {"n": len(made), "beam_width": 4}
        stop = ()
    else:
        params = {"n": len(made)} if kind == "drawn" else {"n": 1, "best_of": len(made)}
    done = run_disturbed(made, stop, max_tokens + 1, data, cancel_at=cancel_at, **params)
    expected = [undisturbed(output, stop, max_tokens + 1) for output in made]
    client = done.client
    for index in range(params["n"]):
        reason = client.of(index)[-1].finish_reason
        assert reason is not None
        if kind == "drawn":
            text, whole, natural = expected[index]
            assert tokens(whole)[: len(client.token_ids(index))] == client.token_ids(index)
            assert text.startswith(client.text(index)) if reason is natural else True
            assert reason in (natural, FinishReason.ABORT)
    assert client.deltas[-1].usage is not None
