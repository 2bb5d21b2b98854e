"""Deltas that are written as soon as they are made: the client gets the same ones in the same order either way."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import Delta, DeltaStream, GenerationRequest, ResponseConsumer
from quire_router.engines.attempt import Output
from quire_router.engines.output_stream import ExpectedOutput, OutputStream
from quire_router.journal.memory import MemoryJournal
from quire_router.requests.runner import RequestRunner
from quire_router.requests.state import RequestState

from tests.support.byte_tokenizer import TOKENIZER
from tests.support.contract_engine import ContractEngine
from tests.unit.router.requests.test_runner_properties import (
    CALM,
    PROMPT,
    Client,
    DirectLink,
    DisturbedRun,
    OneEngine,
    Script,
    answers,
    make_lifecycle,
    settle,
    tokens,
    undisturbed,
)

EVENTS = [*CALM, "replay", "restart"]


@dataclass
class DirectClient(Client):
    """A client whose direct writer is set from its first delta on; ``opened`` says when it is open."""

    opened: list[bool] = field(default_factory=list)
    num_direct: int = 0
    num_tokens: int = 0

    @property
    def is_open(self) -> bool:
        return not self.opened or self.opened.pop()

    def write(self, delta: Delta) -> None:
        assert delta.finish_reason is None
        assert delta.usage is None
        self.deltas.append(delta)
        self.num_direct += 1

    def write_token(self, index: int, token_id: int, text: str) -> None:
        self.write(Delta(text, [token_id], index=index))
        self.num_tokens += 1

    async def read(self, lifecycle: RequestRunner, generation: GenerationRequest, journal: MemoryJournal) -> None:
        answer = lifecycle.run(generation)
        assert isinstance(answer, DeltaStream)
        async for delta in answer:
            self.deltas.append(delta)
            answer.direct_path.sink = self


def run_direct(
    made: list[str], stop: tuple[str, ...], most: int, data: st.DataObject, client: DirectClient
) -> DisturbedRun:
    sampling = SamplingParams(seed=7, max_tokens=most, n=len(made))
    generation = GenerationRequest("r", "m", tokens(PROMPT), sampling, stop)
    done = DisturbedRun(Script([tokens(text) for text in made], most), generation, data)
    done.client, done.events = client, data.draw(st.sampled_from([CALM, EVENTS]))
    asyncio.run(done.run())
    return done


@given(answers(), st.lists(st.booleans(), max_size=12), st.data())
@settings(max_examples=30, deadline=None)
def test_the_output_is_the_same_with_and_without_direct_delivery(
    answer: tuple[list[str], tuple[str, ...], int], opened: list[bool], data: st.DataObject
) -> None:
    made, stop, most = answer
    client = run_direct(made, stop, most, data, DirectClient(opened=opened)).client
    for index, output in enumerate(made):
        text, whole, reason = undisturbed(output, stop, most)
        assert (client.text(index), client.token_ids(index)) == (text, tokens(whole))
        assert [delta.finish_reason for delta in client.of(index) if delta.finish_reason] == [reason]
    assert [delta.usage is not None for delta in client.deltas].index(True) == len(client.deltas) - 1


def test_deltas_computed_for_a_direct_write_belong_to_their_own_output() -> None:
    """A stop string ends a choice, so that its deltas are not written directly, whatever is processed before them."""

    async def scenario() -> None:
        generation = GenerationRequest("r", "m", tokens(PROMPT), SamplingParams(seed=7, n=2, max_tokens=9), ("b",))
        journal, client = MemoryJournal(), DirectClient()
        progress = RequestState(generation, TOKENIZER, journal, journal.open(generation), ResponseConsumer())
        progress._direct_path.sink = client
        ends, goes_on = Output(tokens("ab"), 0, index=0), Output(tokens("xy"), 0, index=1)
        assert not progress.try_direct_write(ends)
        assert [(delta.index, delta.text) for delta in progress.process_output(goes_on)] == [(1, "xy")]
        assert [(delta.index, delta.text) for delta in progress.process_output(ends)] == [(0, "a")]

    asyncio.run(scenario())


async def test_a_token_in_columns_is_written_directly_from_the_second_of_its_choice_on() -> None:
    generation = GenerationRequest("r", "m", tokens(PROMPT), SamplingParams(seed=7, max_tokens=9, n=2))
    engine = ContractEngine(Script([tokens("abcdefgh"), tokens("ijklmnop")], 9), columns=True)
    link, journal, client = DirectLink(engine), MemoryJournal(), DirectClient()
    reading = asyncio.create_task(client.read(make_lifecycle(OneEngine(link), journal), generation, journal))
    await settle()
    link.deliver_commands()
    for _ in range(9):
        link.step({0: 1, 1: 1})
        await settle()
    await asyncio.wait_for(reading, 10)
    assert (client.text(0), client.text(1)) == ("abcdefgh", "ijklmnop")
    # Of each choice the first token opens the direct path or starts the clock, and the end comes alone.
    assert client.num_tokens == 2 * 7
    record = await journal.read("r")
    assert record is not None
    assert [list(choice.token_ids) for choice in record.choices] == [tokens("abcdefgh"), tokens("ijklmnop")]


async def open_stream() -> OutputStream:
    expected = ExpectedOutput({0: 0}, 10)
    return OutputStream("r", expected, on_cancel=lambda *_: None, slow_client_timeout=60)


def test_only_a_waiting_readers_deltas_are_delivered_directly() -> None:
    async def scenario() -> None:
        stream, direct = await open_stream(), list[list[int]]()
        stream.sink = lambda output: direct.append(output.token_ids) is None
        stream.push(Output([1], 0))
        assert not direct, "no reader waits yet"
        assert (await anext(stream)).token_ids == [1]
        reading = asyncio.create_task(anext(stream))
        await settle()
        stream.push(Output([2], 1))
        stream.push(Output([2, 3], 1))
        assert direct == [[2], [3]]
        stream.sink = lambda _: False
        stream.push(Output([4], 3))
        stream.sink = lambda output: direct.append(output.token_ids) is None
        stream.push(Output([5], 4))
        assert (await reading).token_ids == [4, 5], "an output behind an unread one waits with it"
        assert direct == [[2], [3]]

    asyncio.run(scenario())


def test_a_writer_that_fails_ends_its_request_alone() -> None:
    async def scenario() -> None:
        stream = await open_stream()

        def fail(_output: Output) -> bool:
            raise ValueError("not the connection's")

        stream.sink = fail
        reading = asyncio.create_task(anext(stream))
        await settle()
        stream.push(Output([1], 0))
        end = await reading
        assert end.finish_reason is FinishReason.ERROR
        assert end.error is not None
        assert end.error.code is ErrorCode.INTERNAL

    asyncio.run(scenario())


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_deltas_are_delivered_directly_as_soon_as_the_writer_is_set(data: st.DataObject) -> None:
    client = DirectClient()
    run_direct(["abababab"], (), 9, data, client)
    moves = sum(delta.move is not None for delta in client.deltas)
    assert len(client.deltas) <= 2 + moves + client.num_direct, "only the first of each engine and the last are not"
