"""A response that breaks off anywhere and is resumed after its last event has the events of an unbroken one."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.response_opener import Response, started_choices, with_prompt_echo
from quire_router.api.rest.openai_format import CHAT, COMPLETION, DONE, ChunkEncoder
from quire_router.api.rpc import messages
from quire_router.api.rpc.servicer import DeltaMessages
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage
from quire_router.core.response_options import ResponseOptions

from tests.support.scripted_api import MODEL, TOKENIZER, as_replayed, events_of, logprobs_of


@dataclass
class RecordedAnswer:
    """The deltas that a runner yields for one request, and that request."""

    prepared: PreparedRequest
    deltas: list[Delta]

    def deltas_after(self, cursor: StreamCursor) -> list[Delta]:
        """The deltas again, for a client that resumes at ``cursor``: those that it has already are marked replayed."""
        ends = [0] * self.prepared.num_choices
        resumed = []
        for delta in self.deltas:
            ends[delta.index] += len(delta.token_ids)
            seen = as_replayed(delta, ends[delta.index], cursor)
            if not seen.replayed or seen.token_ids or seen.prompt_logprobs or seen.usage:
                resumed.append(seen)
        return resumed


@st.composite
def choices(draw, index: int, logprobs: bool) -> list[Delta]:
    """The deltas of one choice, of one to four tokens each; the finish reason is in the last or in one of its own."""
    token_ids = TOKENIZER.encode_plain(draw(st.text("aé😀", max_size=5)))
    output, deltas = TOKENIZER.new_output_stream([], ()), [Delta("", [], index=index)] * draw(st.integers(0, 1))
    while token_ids:
        count = draw(st.integers(1, 4))
        taken, token_ids = list(token_ids[:count]), token_ids[count:]
        shown = [logprobs_of(each, 2) for each in taken] if logprobs else []
        deltas.append(Delta(output.push(taken), taken, index=index, logprobs=shown))
    if deltas and draw(st.booleans()):
        deltas[-1] = replace(deltas[-1], text=deltas[-1].text + output.finish(), finish_reason=FinishReason.STOP)
    else:
        deltas.append(Delta(output.finish(), [], FinishReason.LENGTH, index=index))
    return deltas


@st.composite
def recorded_answers(draw) -> RecordedAnswer:
    """Chat and text completions, whose choices' deltas are interleaved."""
    operation = draw(st.sampled_from(["chat", "text_completion"]))
    n, logprobs = draw(st.integers(1, 3)), draw(st.sampled_from([None, 2]))
    echo = operation != "chat" and draw(st.booleans())
    prompts = 1 if operation == "chat" else draw(st.integers(1, 2))
    params = SamplingParams(n=n, logprobs=logprobs)
    prompt = list(TOKENIZER.encode_plain("hi é"))
    generations = tuple(
        GenerationRequest(f"r_{number}", MODEL, prompt, params, echo=echo, operation=operation, created=1)
        for number in range(prompts)
    )
    with_usage, continuous = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    options = ResponseOptions(
        include_usage=with_usage, continuous_usage=continuous, logprobs=logprobs, token_ids=draw(st.booleans())
    )
    waiting = [draw(choices(index, logprobs is not None)) for index in range(n * prompts)]
    for index in range(0, n * prompts, n):
        prompt_logprobs = [logprobs_of(each, 2) for each in prompt[1:]] if echo and logprobs else []
        waiting[index][0] = replace(waiting[index][0], prompt_logprobs=prompt_logprobs)
    firsts = [waiting[index].pop(0) for index in range(0, n * prompts, n)]  # the first choices carry prompt logprobs
    deltas = [*firsts]
    while any(waiting):
        deltas.append(draw(st.sampled_from([each for each in waiting if each])).pop(0))
    usage, alone = Usage(3, 9, 1), draw(st.booleans())
    deltas = [*deltas, Delta("", [], usage=usage)] if alone else [*deltas[:-1], replace(deltas[-1], usage=usage)]
    return RecordedAnswer(PreparedRequest(generations, options, TOKENIZER, event_ids=True), deltas)


async def stream(deltas: list[Delta]) -> AsyncGenerator[Delta]:
    for delta in deltas:
        yield delta


def response_after(answer: RecordedAnswer, after: str) -> Response:
    prepared, cursor = answer.prepared, StreamCursor.parse(after, answer.prepared.num_choices)
    deltas = stream(answer.deltas_after(cursor))
    if prepared.first.echo:
        deltas = with_prompt_echo(
            deltas, prepared.generations, TOKENIZER, started_choices(cursor, prepared.num_choices)
        )
    return Response(prepared, deltas, cursor)


@given(recorded_answers(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_token_is_encoded_as_a_delta_of_one_token_is(answer: RecordedAnswer, event_ids: bool) -> None:
    prepared = replace(answer.prepared, event_ids=event_ids)
    style = CHAT if prepared.first.operation == "chat" else COMPLETION
    encoders = [ChunkEncoder(style, prepared, StreamCursor(prepared.num_choices)) for _ in range(2)]
    opening = [encoder.opening() for encoder in encoders]
    assert opening[0] == opening[1]
    for delta in answer.deltas:
        if delta.logprobs:
            continue
        for number, token_id in enumerate(delta.token_ids):
            text = delta.text if number == 0 else ""
            as_delta = encoders[1].encode(Delta(text, [token_id], index=delta.index))
            assert encoders[0].encode_token(delta.index, token_id, text) == as_delta


def rest_events(answer: RecordedAnswer, after: str = "") -> list[tuple[str | None, object]]:
    """The server-sent events after the event id ``after``: each one's id and data."""

    async def write() -> bytes:
        response = response_after(answer, after)
        kind = CHAT if answer.prepared.first.operation == "chat" else COMPLETION
        encoder = ChunkEncoder(kind, answer.prepared, response.cursor)
        data = b""
        async for delta in response.deltas:
            if encoder.logprobs is not None:
                await encoder.logprobs.read_prompt(delta)
            data = data or encoder.opening()
            data += encoder.encode(delta)
        return data

    data = asyncio.run(write())
    assert data.endswith(DONE)
    return events_of(data)


def grpc_messages(answer: RecordedAnswer, after: str = "") -> list[object]:
    """The messages of the gRPC stream after the event id ``after``."""

    async def write() -> list[object]:
        response = response_after(answer, after)
        encoder = DeltaMessages(response, messages.resume_response)
        return [message async for delta in response.deltas if (message := encoder.message(delta)) is not None]

    return asyncio.run(write())


def payload(message):
    return getattr(message, message.WhichOneof("response"))


@settings(deadline=None, max_examples=50)
@given(recorded_answers())
def test_events_before_a_cut_and_those_resumed_after_its_last_id_are_all_events(answer):
    whole = rest_events(answer)
    assert all(event_id for event_id, data in whole if data != "[DONE]")
    assert len({event_id for event_id, _ in whole}) == len(whole), "two events have one id"
    for cut in range(len(whole)):
        after = whole[cut - 1][0] if cut else ""
        assert rest_events(answer, after) == whole[cut:]


@settings(deadline=None, max_examples=40)
@given(recorded_answers())
def test_messages_before_a_cut_and_those_resumed_after_its_last_id_are_all_messages(answer):
    whole = grpc_messages(answer)
    for cut in range(len(whole) + 1):
        after = payload(whole[cut - 1]).event_id if cut else ""
        resumed = grpc_messages(answer, after)
        assert [text_of(resumed, index) for index in range(answer.prepared.num_choices)] == [
            text_of(whole[cut:], index) for index in range(answer.prepared.num_choices)
        ]
        assert finish_reasons_of(resumed) == finish_reasons_of(whole[cut:])
        assert [payload(each).event_id for each in resumed] == [payload(each).event_id for each in whole[cut:]]


@settings(deadline=None, max_examples=40)
@given(recorded_answers(), st.data())
def test_a_stream_that_started_over_rest_resumes_over_grpc(answer, data):
    events = rest_events(answer)
    cut = data.draw(st.integers(0, len(events) - 1))
    resumed = grpc_messages(answer, events[cut - 1][0] if cut else "")
    for index in range(answer.prepared.num_choices):
        before = [
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for _, event in events[:cut]
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert "".join(before) + text_of(resumed, index) == text_of(grpc_messages(answer), index)


def text_of(received, index: int) -> str:
    return "".join(payload(message).text for message in received if payload(message).index == index)


def finish_reasons_of(received) -> list[tuple[int, int]]:
    return [(payload(each).index, payload(each).finish_reason) for each in received if payload(each).finish_reason]
