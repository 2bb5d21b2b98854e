"""What ends an answer, in the words of each API: stop strings of the visible answer, stop tokens, half a call."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1.inference_pb2 import ChatResponse
from quire_proto.sampling import FinishReason, SamplingParams, StopToken
from quire_router.api.auth import ANONYMOUS
from quire_router.api.prepared_request import PreparedRequest, build_response_options
from quire_router.api.response_opener import Response
from quire_router.api.rest.messages_format import MESSAGES
from quire_router.api.rest.openai_format import CHAT, OpenAiFormat
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.rpc import messages
from quire_router.api.rpc.servicer import DeltaMessages
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.schemas.response_items import History
from quire_router.api.schemas.responses import ResponsesRequest
from quire_router.api.validation import Validator
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage
from quire_router.core.response_options import ReasoningPlacement, ResponseOptions
from quire_router.engines.settings import ServedModelLimits
from quire_router.journal.base import RecordedDelta
from quire_router.requests.resume import Replayer

from tests.support.tool_models import HERMES_TEMPLATE, OPENING_TEMPLATE, THINKING_TEMPLATE, tokenizer_with

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
OPTIONS = ResponseOptions(tools=("get",), include_usage=True)
USAGE = Usage(3, 5)
STOP_TOKEN = 11


@dataclass
class Ended:
    """The end of one answer, whole, in each API's words."""

    chat: dict[str, Any]
    message: dict[str, Any]
    response: dict[str, Any]

    @property
    def words(self) -> tuple[Any, ...]:
        response = self.response["status"], self.response["incomplete_details"]
        return (
            (self.chat["finish_reason"], self.chat["stop_reason"]),
            (self.message["stop_reason"], self.message["stop_sequence"]),
            response,
        )


def prepared_for(
    template: str,
    stop: tuple[str, ...] = (),
    *,
    placement: ReasoningPlacement = ReasoningPlacement.SEPARATE,
    **more: Any,
) -> PreparedRequest:
    tokenizer = tokenizer_with(template)
    asked = ResponsesRequest.from_fields({"model": "m", "input": "hi"}).to_chat(History(), "r").conversation
    options = OPTIONS.model_copy(update={"reasoning": placement})
    params = SamplingParams(max_tokens=999, stop_token_ids=(STOP_TOKEN,), **more)
    prompt = tokenizer.encode_plain("<think>\n" if template is OPENING_TEMPLATE else "hi")
    generation = GenerationRequest(
        "r", "m", prompt, params, stop, created=1, conversation=asked, response_options=options.to_json()
    )
    return PreparedRequest((generation,), options, tokenizer)


def deltas_of(
    prepared: PreparedRequest, text: str, reason: FinishReason, stop_token: StopToken | None = None, size: int = 1
) -> list[Delta]:
    token_ids = prepared.tokenizer.encode_plain(text)
    pieces = [token_ids[at : at + size] for at in range(0, len(token_ids), size)] or [[]]
    record = [RecordedDelta(0, piece) for piece in pieces[:-1]]
    record.append(RecordedDelta(0, pieces[-1], reason, stop_token=stop_token))
    replayer = Replayer(prepared.first, prepared.tokenizer, StreamCursor(1))
    deltas = [*replayer.replay(record, ended=True)]
    return [*deltas[:-1], replace(deltas[-1], usage=USAGE)]


def whole(style: Any, prepared: PreparedRequest, deltas: list[Delta]) -> dict[str, Any]:
    builder = style.builder(prepared)
    for delta in deltas:
        builder.add(delta)
    body: dict[str, Any] = json.loads(asyncio.run(builder.body(USAGE)))
    return body["choices"][0] if isinstance(style, OpenAiFormat) else body


def ended(prepared: PreparedRequest, text: str, reason: FinishReason = FinishReason.STOP, **more: Any) -> Ended:
    deltas = deltas_of(prepared, text, reason, **more)
    return Ended(*(whole(style, prepared, deltas) for style in (CHAT, MESSAGES, RESPONSES)))


def streamed_chat(prepared: PreparedRequest, deltas: list[Delta]) -> tuple[str, Any, Any]:
    encoder = CHAT.encoder(prepared, StreamCursor(1))
    events = b"".join(map(encoder.encode, deltas)).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return content, choices[-1]["finish_reason"], choices[-1]["stop_reason"]


async def no_deltas() -> AsyncGenerator[Delta]:
    for delta in ():
        yield delta


TEMPLATES = {"calls": HERMES_TEMPLATE, "thoughts": THINKING_TEMPLATE, "opened": OPENING_TEMPLATE}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stop_string_of_the_answer_is_named_by_every_api(size: int, include: bool) -> None:
    prepared = prepared_for(OPENING_TEMPLATE, ("END", "never"))
    prepared = replace(prepared, generations=(replace(prepared.first, include_stop=include),))
    end = ended(prepared, "the END is near</think>one END two", size=size)
    assert end.words == (("stop", "END"), ("stop_sequence", "END"), ("completed", None))
    text = "one END" if include else "one "
    assert end.chat["message"]["content"] == text
    assert end.chat["message"]["reasoning_content"] == "the END is near"
    assert [block.get("text") for block in end.message["content"]] == [None, text]
    assert [item["content"][0]["text"] for item in end.response["output"]] == ["the END is near", text]
    deltas = deltas_of(prepared, "the END is near</think>one END two", FinishReason.STOP, size=size)
    assert streamed_chat(prepared, deltas) == (text, "stop", "END")


@pytest.mark.parametrize("stop", ["Rome", '"', "}", "get", "city", "\n", "tool_call"])
def test_a_stop_string_does_not_cut_a_call(stop: str) -> None:
    end = ended(prepared_for(HERMES_TEMPLATE, (stop,)), CALL)
    assert end.words == (("tool_calls", None), ("tool_use", None), ("completed", None))
    assert end.chat["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_a_stop_string_behind_a_call_ends_the_answer_with_the_whole_call() -> None:
    end = ended(prepared_for(HERMES_TEMPLATE, ("Rome",)), f"{CALL}\nsee Rome!")
    assert end.words == (("stop", "Rome"), ("stop_sequence", "Rome"), ("completed", None))
    assert len(end.chat["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("text", [CALL[:45], CALL[:52], '<tool_call>{"name": "get", "arguments": {"city": {"a": 1}'])
def test_half_a_call_is_never_told_as_calls(text: str) -> None:
    token = StopToken(STOP_TOKEN)
    end = ended(prepared_for(HERMES_TEMPLATE), text, stop_token=token)
    assert end.words == (("stop", STOP_TOKEN), ("end_turn", None), ("incomplete", None))
    assert end.response["output"][-1]["status"] == "incomplete"
    assert ended(prepared_for(HERMES_TEMPLATE), text).words[0] == ("stop", None)


def test_stop_reason_is_the_stop_token_that_was_asked_for_and_no_other() -> None:
    for token_id, told in ((STOP_TOKEN, STOP_TOKEN), (STOP_TOKEN + 1, None)):
        prepared = prepared_for(HERMES_TEMPLATE)
        assert ended(prepared, "so", stop_token=StopToken(token_id)).words[0] == ("stop", told)
        deltas = deltas_of(prepared, "so", FinishReason.STOP, StopToken(token_id))
        assert streamed_chat(prepared, deltas) == ("so", "stop", told)
    assert ended(prepared_for(HERMES_TEMPLATE), "so", FinishReason.LENGTH).words[0] == ("length", None)


@pytest.mark.parametrize("placement", ReasoningPlacement)
def test_a_stop_string_does_not_count_in_reasoning_wherever_that_is_shown(placement: ReasoningPlacement) -> None:
    said = "<think>so END</think>one END two"
    chat = ended(prepared_for(THINKING_TEMPLATE, ("END",), placement=placement), said).chat
    shown = "<think>so END</think>" if placement is ReasoningPlacement.INLINE else ""
    assert (chat["message"]["content"], chat["stop_reason"]) == (f"{shown}one ", "END")


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": "', "so END"),
        ({"guided_grammar": 'start: "a"'}, "<think>so ", None),  # there is no reasoning before a grammar of the client
    ],
)
def test_a_constraint_on_the_answer_does_not_make_stop_strings_count_in_reasoning(
    fields: dict[str, Any], content: str, reasoning: str | None
) -> None:
    tokenizer = tokenizer_with(THINKING_TEMPLATE)
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stop": "END", **fields}
    request, limits = ChatRequest.from_fields(asked), ServedModelLimits(4096, tokenizer.vocab_size)
    (generation,) = Validator({"m": tokenizer}, lambda _: limits).generations(request, "r", ANONYMOUS)
    options = build_response_options(request, 99)
    prepared = PreparedRequest((replace(generation, response_options=options.to_json()),), options, tokenizer)
    deltas = deltas_of(prepared, '<think>so END</think>\n\n{"a": "END"}', FinishReason.STOP)
    message = whole(CHAT, prepared, deltas)["message"]
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)


def test_a_stop_string_does_not_count_within_the_least_tokens() -> None:
    assert ended(prepared_for(HERMES_TEMPLATE, ("a",), min_tokens=4), "aaaaXa").chat["message"]["content"] == "aaaaX"


SAID = st.lists(st.sampled_from(["END", "E", "N", "<think>", "</think>", CALL, " so ", "\n"]), max_size=6).map("".join)


@given(SAID, st.sampled_from(sorted(TEMPLATES)), st.lists(st.sampled_from(["END", "so", "N", "\n"]), max_size=2))
def test_chunks_messages_and_grpc_end_as_the_whole_chat(text: str, template: str, stops: list[str]) -> None:
    prepared = prepared_for(TEMPLATES[template], tuple(stops))
    deltas = deltas_of(prepared, text, FinishReason.STOP)
    chat = whole(CHAT, prepared, deltas)
    content, *reasons = streamed_chat(prepared, deltas_of(prepared, text, FinishReason.STOP, size=7))
    assert (content, reasons) == (chat["message"]["content"] or "", [chat["finish_reason"], chat["stop_reason"]])
    assert messages.chat_response(prepared.first, deltas[-1], "").stop_string == (chat["stop_reason"] or "")
    unstopped = prepared_for(TEMPLATES[template])
    free = whole(CHAT, unstopped, deltas_of(unstopped, text, FinishReason.STOP))["message"]["content"] or ""
    assert free.startswith(content)
    assert (chat["stop_reason"] is None) == (content == free)


@pytest.mark.parametrize("placement", ReasoningPlacement)
@pytest.mark.parametrize("stop", ["END", "never"])
def test_all_apis_count_the_same_reasoning(placement: ReasoningPlacement, stop: str) -> None:
    prepared = prepared_for(OPENING_TEMPLATE, (stop,), placement=placement)
    deltas = deltas_of(prepared, "well, hm</think>one END two", FinishReason.STOP)
    builders = [style.builder(prepared) for style in (CHAT, MESSAGES, RESPONSES)]
    for delta in deltas:
        for builder in builders:
            builder.add(delta)
    chat, message, response = (json.loads(asyncio.run(builder.body(USAGE)))["usage"] for builder in builders)
    counted = chat["completion_tokens_details"]["reasoning_tokens"]
    assert counted == message["output_tokens_details"]["thinking_tokens"]
    assert counted == response["output_tokens_details"]["reasoning_tokens"]
    assert (counted > 0) == (placement is not ReasoningPlacement.INLINE)
    encoder = CHAT.encoder(prepared, StreamCursor(1))
    events = b"".join(map(encoder.encode, deltas)).decode().split("\n\n")
    (usage,) = (json.loads(event[6:])["usage"] for event in events if '"choices":[]' in event)
    assert usage == chat
    rpc = DeltaMessages(Response(prepared, no_deltas(), StreamCursor(1)), messages.chat_response)
    *_, last = (rpc.message(delta) for delta in deltas)
    assert isinstance(last, ChatResponse)
    assert last.usage.reasoning_tokens == counted
