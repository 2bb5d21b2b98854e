"""Answers of the Responses API: streamed, whole and resumed after any event they are the same, however an engine's
outputs are cut into deltas.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.schemas.response_items import History, decode_encrypted_content, read_items
from quire_router.api.schemas.responses import ResponsesRequest
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage
from quire_router.core.response_options import Api, ReasoningPlacement, ResponseOptions
from quire_router.journal.base import RecordedDelta
from quire_router.requests.resume import Replayer

from tests.support.response_streams import Event, response_events, response_of
from tests.support.tool_models import THINKING_TEMPLATE, tokenizer_with

TOKENIZER = tokenizer_with(THINKING_TEMPLATE)
OPTIONS = ResponseOptions(tools=("get", "now"), api=Api.RESPONSES)
PLAIN = ResponseOptions(api=Api.RESPONSES, reasoning=ReasoningPlacement.INLINE)
USAGE = Usage(5, 9, 2)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLS = [
    '<tool_call>\n{"name": "get", "arguments": {"city": "Röm", "n": [1, {"a": null}]}}\n</tool_call>',
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
]
TEXTS = ["hello wörld", "\n", " ", "a", "<tool_call>{}", "<tool", "😀", '{"a": 1}']
ANSWER = f"<think>hm</think>so {CALLS[0]}{CALLS[1]} then"


@st.composite
def outputs(draw) -> str:
    """What a model may write: thinking or none, then texts and calls in any order."""
    thinking = draw(st.sampled_from(["", "<think>well, yes</think>", "<think>\n</think>\n\n", "<think>open"]))
    return thinking + "".join(draw(st.lists(st.sampled_from(TEXTS + CALLS), max_size=5)))


Cut = list[int]
CUTS = st.lists(st.integers(0, 2**16), max_size=12)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
REQUESTS = st.sampled_from(
    [{}, {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"]}, {"store": False}]
)


def prepared_for(
    options: ResponseOptions = OPTIONS, request: dict[str, Any] | None = None, *, ids: bool = True, **fields: Any
) -> PreparedRequest:
    prompt = TOKENIZER.encode_plain("hi é?")
    sent = ResponsesRequest.from_fields({"model": "m", "input": "hi é?", **(request or {})})
    conversation = sent.to_chat(History(), "r").conversation
    generation = GenerationRequest(
        "r", "m", prompt, SamplingParams(max_tokens=999), created=1, conversation=conversation, **fields
    )
    return PreparedRequest((generation,), options, TOKENIZER, event_ids=ids)


def recorded(output: str, cut: Cut, reason: FinishReason, *, logprobs: bool = False) -> list[RecordedDelta]:
    """The record of an answer whose outputs were cut at these places, modulo its length."""
    token_ids = TOKENIZER.encode_plain(output)
    places = sorted({0, len(token_ids), *(place % (len(token_ids) + 1) for place in cut)})
    parts = [token_ids[first:last] for first, last in pairwise(places)] or [[]]
    deltas = [RecordedDelta(0, list(part), reason if part is parts[-1] else None) for part in parts]
    if not logprobs:
        return deltas
    return [replace(each, logprobs=[TokenLogprobs(-i / 64, ((i, -0.5),)) for i in each.token_ids]) for each in deltas]


def deltas_of(prepared: PreparedRequest, record: Sequence[RecordedDelta], usage: Usage = USAGE) -> list[Delta]:
    """The deltas that a client gets which resumes: all of them."""
    deltas = [*Replayer(prepared.first, TOKENIZER, StreamCursor(1)).replay(record, ended=True)]
    return [*deltas[:-1], replace(deltas[-1], usage=usage)]


def streamed(prepared: PreparedRequest, record: Sequence[RecordedDelta], after: str = "") -> list[Event]:
    """The events of a stream behind the one with the id ``after``."""
    position, delivered = RESPONSES.read_event_id(after)
    assert position == ""
    encoder = RESPONSES.encoder(prepared, StreamCursor(1), delivered)
    data = encoder.opening()
    for delta in deltas_of(prepared, record):
        if encoder.logprobs is not None:
            asyncio.run(encoder.logprobs.read_prompt(delta))
        data += encoder.encode(delta)
    return response_events(data)


def whole(prepared: PreparedRequest, record: Sequence[RecordedDelta]) -> dict[str, Any]:
    builder = RESPONSES.builder(prepared)
    for delta in deltas_of(prepared, record):
        if builder.logprobs is not None:
            asyncio.run(builder.logprobs.read_prompt(delta))
        builder.add(delta)
    response: dict[str, Any] = json.loads(asyncio.run(builder.body(USAGE)))
    return response


@given(outputs(), CUTS, CUTS, REASONS, REQUESTS)
@example(ANSWER, [], [], FinishReason.STOP, {})
@settings(max_examples=50, deadline=None)
def test_a_stream_is_the_whole_response_however_it_is_cut(
    output: str, cut: Cut, other: Cut, reason: FinishReason, request: dict[str, Any]
) -> None:
    prepared = prepared_for(request=request)
    events = streamed(prepared, recorded(output, cut, reason))
    assert response_of(events) == whole(prepared, recorded(output, other, reason))


@given(outputs(), CUTS, REASONS, REQUESTS)
@settings(max_examples=30, deadline=None)
def test_events_and_responses_are_those_of_openais_library(
    output: str, cut: Cut, reason: FinishReason, request: dict[str, Any]
) -> None:
    prepared = prepared_for(request=request)
    for event in streamed(prepared, recorded(output, cut, reason)):
        EVENTS.validate_python(event.data)
    Response.model_validate(whole(prepared, recorded(output, cut, reason)))


@given(outputs(), CUTS, CUTS, REASONS, REQUESTS)
@example(ANSWER, [], list(range(99)), FinishReason.STOP, {})
@example(ANSWER, [20, 60], [], FinishReason.STOP, {})
@settings(max_examples=40, deadline=None)
def test_a_stream_that_breaks_after_any_event_resumes_with_what_is_missing(
    output: str, cut: Cut, other: Cut, reason: FinishReason, request: dict[str, Any]
) -> None:
    prepared, first, second = (
        prepared_for(request=request),
        recorded(output, cut, reason),
        recorded(output, other, reason),
    )
    events, response = streamed(prepared, first), whole(prepared, first)
    for count, event in enumerate(events[:-1], 1):
        assert streamed(prepared, first, str(event.number)) == events[count:]
        assert response_of([*events[:count], *streamed(prepared, second, event.event_id or "")]) == response
    assert streamed(prepared, second, str(events[-1].number)) == []


@given(outputs(), CUTS, CUTS)
@settings(max_examples=30, deadline=None)
def test_an_answer_may_break_again_and_again(output: str, cut: Cut, other: Cut) -> None:
    """Each time after one event more, of outputs that are cut in turns."""
    prepared = prepared_for()
    records = [recorded(output, each, FinishReason.STOP) for each in (cut, other)]
    events: list[Event] = []
    while not events or events[-1].kind != "response.completed":
        after = events[-1].event_id if events else ""
        events.append(streamed(prepared, records[len(events) % 2], after or "")[0])
    assert response_of(events) == whole(prepared, records[0])


@given(outputs(), CUTS, CUTS, REASONS)
@settings(max_examples=30, deadline=None)
def test_log_probabilities_of_a_text_are_the_same_however_it_is_cut(
    output: str, cut: Cut, other: Cut, reason: FinishReason
) -> None:
    prepared = prepared_for(PLAIN.model_copy(update={"logprobs": 1}))
    first, second = (recorded(output, each, reason, logprobs=True) for each in (cut, other))
    events, response = streamed(prepared, first), whole(prepared, second)
    assert response_of(events) == response
    shown = [entry for item in response["output"] for entry in item["content"][0]["logprobs"]]
    assert len(shown) == (len(TOKENIZER.encode_plain(output)) if output else 0)
    for count, event in enumerate(events[:-1], 1):
        assert response_of([*events[:count], *streamed(prepared, second, event.event_id or "")]) == response


@given(outputs())
@settings(max_examples=30, deadline=None)
def test_a_token_is_encoded_as_a_delta_of_one_token_is(output: str) -> None:
    token_ids = TOKENIZER.encode_plain(output)
    for options in (OPTIONS, PLAIN):
        for ids in (False, True):
            prepared = prepared_for(options, ids=ids)
            encoders = [RESPONSES.encoder(prepared, StreamCursor(1)) for _ in range(2)]
            assert encoders[0].opening() == encoders[1].opening()
            text = TOKENIZER.new_output_stream([], ())
            for token_id in token_ids:
                delta = Delta(text.push([token_id]), [token_id])
                assert encoders[0].encode_token(0, token_id, delta.text) == encoders[1].encode(delta)
            last = Delta(text.finish(), [], FinishReason.STOP, USAGE)
            assert encoders[0].encode(last) == encoders[1].encode(last)


@pytest.mark.parametrize("number", range(16))
def test_a_text_goes_on_behind_the_characters_that_its_client_has(number):
    """Also where they came in two events, and come in one now."""
    encoder = RESPONSES.encoder(prepared_for(PLAIN), StreamCursor(1), 4 + number)  # behind the marks before it
    assert encoder.opening() == b""
    data = encoder.encode(Delta("Hello ", [1, 2])) + encoder.encode(Delta("world", [3]))
    events = response_events(data)
    assert "".join(event.data["delta"] for event in events) == "Hello world"[number:]
    assert [event.number for event in events] == [9, 14][2 - len(events) :]


@pytest.mark.parametrize(
    ("output", "reason", "expected"),
    [
        ("so", FinishReason.STOP, ("completed", None)),
        (CALLS[0], FinishReason.STOP, ("completed", None)),
        ("so", FinishReason.LENGTH, ("incomplete", {"reason": "max_output_tokens"})),
        ("so", FinishReason.ABORT, ("cancelled", None)),
    ],
)
def test_the_status_says_how_an_answer_ended(output, reason, expected):
    response = whole(prepared_for(), recorded(output, [], reason))
    assert (response["status"], response["incomplete_details"]) == expected
    (item,) = response["output"]
    assert item["status"] == ("completed" if reason is FinishReason.STOP else "incomplete")


def test_the_items_are_in_the_order_in_which_the_model_wrote_them():
    response = whole(prepared_for(), recorded(ANSWER, [], FinishReason.STOP))
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert whole(prepared_for(PLAIN), recorded("", [], FinishReason.STOP))["output"] == []
    ids = {item["id"] for item in response["output"]}
    other = replace(prepared_for(), generations=(replace(prepared_for().first, request_id="s"),))
    others = whole(other, recorded(ANSWER, [], FinishReason.STOP))["output"]
    assert len(ids) == 5
    assert not ids & {item["id"] for item in others}
    assert not {item.get("call_id") for item in others} & {item.get("call_id", "") for item in response["output"]}


@given(CUTS)
@settings(max_examples=20, deadline=None)
def test_the_usage_tells_cached_and_reasoning_tokens(cut: Cut) -> None:
    response = whole(prepared_for(), recorded(ANSWER, cut, FinishReason.STOP))
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": len(TOKENIZER.encode_plain("<think>hm</think>"))},
        "total_tokens": 14,
    }
    unthinking = whole(prepared_for(), recorded("so", cut, FinishReason.STOP))
    assert unthinking["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    hidden = OPTIONS.model_copy(update={"reasoning": ReasoningPlacement.HIDDEN})
    untold = whole(prepared_for(hidden), recorded(ANSWER, cut, FinishReason.STOP))
    assert untold["usage"]["output_tokens_details"] == response["usage"]["output_tokens_details"]
    endless = recorded("<think>hm, and on", cut, FinishReason.LENGTH)
    counted = whole(prepared_for(), endless)["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert counted == len(TOKENIZER.encode_plain("<think>hm, and on"))


def test_reasoning_comes_as_text_as_summary_or_to_be_given_back():
    record = recorded("<think>hm, wöll</think>so", [3, 9], FinishReason.STOP)
    text = [{"type": "reasoning_text", "text": "hm, wöll"}]
    item = whole(prepared_for(), record)["output"][0]
    assert (item["summary"], item["content"]) == ([], text)
    assert "encrypted_content" not in item
    item = whole(prepared_for(request={"reasoning": {"summary": "auto"}}), record)["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": "hm, wöll"}], [])
    item = whole(prepared_for(request={"include": ["reasoning.encrypted_content"]}), record)["output"][0]
    assert decode_encrypted_content(item["encrypted_content"]) == "hm, wöll"
    for without in ("content", "encrypted_content"):
        given_back = {name: value for name, value in item.items() if name != without}
        assert read_items([given_back])[0].reasoning == "hm, wöll"


def test_a_call_of_a_function_in_a_namespace_tells_it():
    space = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "get"}]}
    prepared = prepared_for(OPTIONS.model_copy(update={"tools": ("agents__get",)}), {"tools": [space]})
    record = recorded(CALLS[0].replace('"get"', '"agents__get"'), [9], FinishReason.STOP)
    (call,) = whole(prepared, record)["output"]
    assert (call["namespace"], call["name"]) == ("agents", "get")
    assert response_of(streamed(prepared, record))["output"] == [call]


def test_an_answer_that_has_not_ended_is_never_passed_on_as_a_response():
    prepared = prepared_for()
    builder, encoder = RESPONSES.builder(prepared), RESPONSES.encoder(prepared, StreamCursor(1))
    builder.add(Delta("so", [1]))
    encoder.encode(Delta("so", [1]))
    for end in (lambda: asyncio.run(builder.body(USAGE)), lambda: encoder.encode(Delta("", [], usage=USAGE))):
        with pytest.raises(QuireError) as caught:
            end()
        assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("resumable", [True, False])
def test_a_stream_that_fails_says_so_in_every_way_that_clients_look_for(resumable):
    encoder = RESPONSES.encoder(prepared_for(PLAIN), StreamCursor(1))
    data = encoder.opening() + encoder.encode(Delta("so", [1]))
    error = QuireError(ErrorCode.UNAVAILABLE, "This router is shutting down.", reason="stopping")
    data += RESPONSES.error_event(error, "r", resumable=resumable, encoder=encoder)
    events = response_events(data)
    last = next(event for event in events if event.kind == "error")
    failed = events[-1]
    assert (failed.kind == "response.failed") is not resumable
    if not resumable:
        assert failed.data["response"]["error"]["message"] == error.message
        assert failed.data["response"]["status"] == "failed"
        (item,) = failed.data["response"]["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "so")
        EVENTS.validate_python(failed.data)
    assert last.data["type"] == "error"
    assert (last.data["code"], last.data["message"]) == ("stopping", error.message)
    assert last.data["error"]["code"] == "stopping"
    assert last.data["error"]["resumable"] is resumable
    EVENTS.validate_python(last.data)


@pytest.mark.parametrize("event_id", ["17e", "17eu", "-", "x", "17_1", "-1", "1" * 16, " 1"])
def test_an_id_that_no_event_has_is_refused(event_id):
    with pytest.raises(QuireError) as caught:
        RESPONSES.read_event_id(event_id)
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("text", ["", "{}", "x\n", "[]\n", "[" * 100_000 + "\n"])
def test_a_damaged_state_is_an_internal_error(text):
    prepared = prepared_for()
    damaged = replace(prepared, generations=(replace(prepared.first, conversation=text),))
    with pytest.raises(QuireError) as caught:
        RESPONSES.builder(damaged)
    assert caught.value.code is ErrorCode.INTERNAL
