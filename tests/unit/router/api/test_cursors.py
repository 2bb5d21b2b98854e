"""An answer that was cut anywhere and goes on from its last event is the undisturbed one, event for event."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.api.prepared_request import PreparedRequest, ResponseOptions
from quire_router.api.responses import Response, started_choices, with_prompt_echo
from quire_router.api.rest.openai_format import CHAT, COMPLETION
from quire_router.api.rest.sse import DONE, SseEncoder
from quire_router.api.rpc import messages
from quire_router.api.rpc.servicer import DeltaMessages
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage

from tests.support.scripted_api import MODEL, TEXT, as_had, events_of, logprobs_of


@dataclass
class Told:
    """An answer as a runner gives it, and the request that it belongs to."""

    admitted: PreparedRequest
    deltas: list[Delta]

    def pieces(self, mark: StreamCursor) -> list[Delta]:
        """The answer once more, for a reader who stands at ``mark``."""
        ends = [0] * self.admitted.num_choices
        had = []
        for delta in self.deltas:
            ends[delta.index] += len(delta.token_ids)
            piece = as_had(delta, ends[delta.index], mark)
            if not piece.replayed or piece.token_ids or piece.prompt_logprobs or piece.usage:
                had.append(piece)
        return had


@st.composite
def choices(draw, index: int, logprobs: bool) -> list[Delta]:
    """The pieces of one choice, of one token or of several, whose end comes with the last tokens or alone."""
    token_ids = TEXT.encode_plain(draw(st.text("aé😀", max_size=5)))
    output, pieces = TEXT.new_output_stream([], ()), [Delta("", [], index=index)] * draw(st.integers(0, 1))
    while token_ids:
        count = draw(st.integers(1, 4))
        taken, token_ids = list(token_ids[:count]), token_ids[count:]
        shown = [logprobs_of(each, 2) for each in taken] if logprobs else []
        pieces.append(Delta(output.push(taken), taken, index=index, logprobs=shown))
    if pieces and draw(st.booleans()):
        pieces[-1] = replace(pieces[-1], text=pieces[-1].text + output.finish(), finish_reason=FinishReason.STOP)
    else:
        pieces.append(Delta(output.finish(), [], FinishReason.LENGTH, index=index))
    return pieces


@st.composite
def answers(draw) -> Told:
    """Answers of both kinds, whose choices mingle."""
    operation = draw(st.sampled_from(["chat", "text_completion"]))
    n, logprobs = draw(st.integers(1, 3)), draw(st.sampled_from([None, 2]))
    echo = operation != "chat" and draw(st.booleans())
    prompts = 1 if operation == "chat" else draw(st.integers(1, 2))
    params = SamplingParams(n=n, logprobs=logprobs)
    prompt = list(TEXT.encode_plain("hi é"))
    generations = tuple(
        GenerationRequest(f"r_{number}", MODEL, prompt, params, echo=echo, operation=operation, created=1)
        for number in range(prompts)
    )
    with_usage, each_time = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    shape = ResponseOptions(include_usage=with_usage, continuous_usage=each_time, logprobs=logprobs)
    waiting = [draw(choices(index, logprobs is not None)) for index in range(n * prompts)]
    for index in range(0, n * prompts, n):
        about_prompt = [logprobs_of(each, 2) for each in prompt[1:]] if echo and logprobs else []
        waiting[index][0] = replace(waiting[index][0], prompt_logprobs=about_prompt)
    firsts = [waiting[index].pop(0) for index in range(0, n * prompts, n)]  # the first choice tells of the prompt
    deltas = [*firsts]
    while any(waiting):
        deltas.append(draw(st.sampled_from([each for each in waiting if each])).pop(0))
    usage, alone = Usage(3, 9, 1), draw(st.booleans())
    deltas = [*deltas, Delta("", [], usage=usage)] if alone else [*deltas[:-1], replace(deltas[-1], usage=usage)]
    return Told(PreparedRequest(generations, shape, TEXT, event_ids=True), deltas)


async def played(deltas: list[Delta]) -> AsyncGenerator[Delta]:
    for delta in deltas:
        yield delta


def answer_from(told: Told, after: str) -> Response:
    admitted, mark = told.admitted, StreamCursor.parse(after, told.admitted.num_choices)
    deltas = played(told.pieces(StreamCursor.parse(after, admitted.num_choices)))
    if admitted.first.echo:
        deltas = with_prompt_echo(deltas, admitted.generations, TEXT, started_choices(mark, admitted.num_choices))
    return Response(admitted, deltas, mark)


def over_rest(told: Told, after: str = "") -> list[tuple[str | None, object]]:
    """The events of the answer from a mark on."""

    async def write() -> bytes:
        answer = answer_from(told, after)
        chunks = SseEncoder(
            CHAT if told.admitted.first.operation == "chat" else COMPLETION, told.admitted, answer.cursor
        )
        data = b""
        async for delta in answer.deltas:
            if chunks.logprobs is not None:
                await chunks.logprobs.read_prompt(delta)
            data = data or chunks.opening()
            data += chunks.encode(delta)
        return data

    data = asyncio.run(write())
    assert data.endswith(DONE)
    return events_of(data)


def over_grpc(told: Told, after: str = "") -> list[object]:
    """The messages of the answer from a mark on."""

    async def write() -> list[object]:
        answer = answer_from(told, after)
        pieces = DeltaMessages(answer, messages.resume_response)
        return [message async for delta in answer.deltas if (message := pieces.message(delta)) is not None]

    return asyncio.run(write())


def inner(message):
    return getattr(message, message.WhichOneof("response"))


@settings(deadline=None, max_examples=150)
@given(answers())
def test_events_before_a_cut_and_events_from_its_last_id_on_are_all_events(told):
    whole = over_rest(told)
    assert all(event_id for event_id, data in whole if data != "[DONE]")
    assert len({event_id for event_id, _ in whole}) == len(whole), "two events with one id cannot be told apart"
    for cut in range(len(whole)):
        after = whole[cut - 1][0] if cut else ""
        assert over_rest(told, after) == whole[cut:]


@settings(deadline=None, max_examples=80)
@given(answers())
def test_messages_before_a_cut_and_messages_from_its_last_id_on_are_all_messages(told):
    whole = over_grpc(told)
    for cut in range(len(whole) + 1):
        after = inner(whole[cut - 1]).event_id if cut else ""
        again = over_grpc(told, after)
        assert [text_of(again, index) for index in range(told.admitted.num_choices)] == [
            text_of(whole[cut:], index) for index in range(told.admitted.num_choices)
        ]
        assert ends_of(again) == ends_of(whole[cut:])
        assert [inner(each).event_id for each in again] == [inner(each).event_id for each in whole[cut:]]


@settings(deadline=None, max_examples=80)
@given(answers(), st.data())
def test_an_answer_that_began_over_rest_goes_on_over_grpc(told, data):
    events = over_rest(told)
    cut = data.draw(st.integers(0, len(events) - 1))
    again = over_grpc(told, events[cut - 1][0] if cut else "")
    for index in range(told.admitted.num_choices):
        before = [
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for _, event in events[:cut]
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert "".join(before) + text_of(again, index) == text_of(over_grpc(told), index)


def text_of(found, index: int) -> str:
    return "".join(inner(message).text for message in found if inner(message).index == index)


def ends_of(found) -> list[tuple[int, int]]:
    return [(inner(each).index, inner(each).finish_reason) for each in found if inner(each).finish_reason]
