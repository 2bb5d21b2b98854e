"""Answers of the Messages API: streamed, whole and resumed after any event they are the same, however an engine's
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
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.rest.messages_format import MESSAGES, read_input
from quire_router.core.generation import Delta, GenerationRequest, StreamCursor, Usage
from quire_router.core.response_options import Api, ReasoningPlacement, ResponseOptions
from quire_router.journal.base import RecordedDelta
from quire_router.requests.resume import Replayer

from tests.support.message_streams import Event, message_events, message_of
from tests.support.tool_models import THINKING_TEMPLATE, tokenizer_with

TOKENIZER = tokenizer_with(THINKING_TEMPLATE)
OPTIONS = ResponseOptions(tools=("get", "now"), api=Api.MESSAGES)
USAGE = Usage(5, 9, 2)
CALLS = [
    '<tool_call>\n{"name": "get", "arguments": {"city": "Röm", "n": [1, {"a": null}]}}\n</tool_call>',
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
]
TEXTS = ["hello wörld", "\n", " ", "a", "<tool_call>{}", "<tool", "😀", '{"a": 1}']


@st.composite
def outputs(draw) -> str:
    """What a model may write: thinking or none, then texts and calls in any order."""
    thinking = draw(st.sampled_from(["", "<think>well, yes</think>", "<think>\n</think>\n\n", "<think>open"]))
    return thinking + "".join(draw(st.lists(st.sampled_from(TEXTS + CALLS), max_size=5)))


Cut = list[int]
CUTS = st.lists(st.integers(0, 2**16), max_size=12)


def prepared_for(options: ResponseOptions = OPTIONS, *, ids: bool = True, **fields: Any) -> PreparedRequest:
    prompt = TOKENIZER.encode_plain("hi é?")
    generation = GenerationRequest("r", "m", prompt, SamplingParams(max_tokens=999), created=1, **fields)
    return PreparedRequest((generation,), options, TOKENIZER, event_ids=ids)


def recorded(output: str, cut: Cut, reason: FinishReason) -> list[RecordedDelta]:
    """The record of an answer whose outputs were cut at these places, modulo its length."""
    token_ids = TOKENIZER.encode_plain(output)
    places = sorted({0, len(token_ids), *(place % (len(token_ids) + 1) for place in cut)})
    parts = [token_ids[first:last] for first, last in pairwise(places)] or [[]]
    return [RecordedDelta(0, list(part), reason if part is parts[-1] else None) for part in parts]


def deltas_of(
    prepared: PreparedRequest, record: Sequence[RecordedDelta], cursor: StreamCursor, usage: Usage = USAGE
) -> list[Delta]:
    """The deltas that a client gets which resumes at ``cursor``."""
    replayer = Replayer(prepared.first, TOKENIZER, cursor)
    deltas = [*replayer.replay(record, ended=True)]
    if deltas and not deltas[-1].replayed:
        return [*deltas[:-1], replace(deltas[-1], usage=usage)]
    return [*deltas, Delta("", [], usage=usage, replayed=cursor.usage)]


def streamed(prepared: PreparedRequest, record: Sequence[RecordedDelta], after: str = "") -> list[Event]:
    """The events of a stream behind the one with the id ``after``."""
    position, delivered = MESSAGES.read_event_id(after)
    cursor = StreamCursor.parse(position, 1)
    deltas = deltas_of(prepared, record, StreamCursor.parse(position, 1))
    encoder = MESSAGES.encoder(prepared, cursor, delivered)
    return message_events(encoder.opening() + b"".join(map(encoder.encode, deltas)))


def whole(prepared: PreparedRequest, record: Sequence[RecordedDelta]) -> dict[str, Any]:
    builder = MESSAGES.builder(prepared)
    for delta in deltas_of(prepared, record, StreamCursor(1)):
        builder.add(delta)
    message: dict[str, Any] = json.loads(asyncio.run(builder.body(USAGE)))
    return message


REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])


@given(outputs(), CUTS, CUTS, REASONS)
@example(f"<think>hm</think>so {CALLS[0]}{CALLS[1]} then", [], [], FinishReason.STOP)
@settings(max_examples=60, deadline=None)
def test_a_stream_is_the_whole_message_however_it_is_cut(
    output: str, cut: Cut, other: Cut, reason: FinishReason
) -> None:
    prepared = prepared_for()
    events = streamed(prepared, recorded(output, cut, reason))
    assert message_of(events) == whole(prepared, recorded(output, other, reason))


@given(outputs(), CUTS, CUTS, REASONS)
@example(f"<think>hm</think>so {CALLS[0]}{CALLS[1]} then", [], list(range(99)), FinishReason.STOP)
@example(f"<think>hm</think>so {CALLS[0]}{CALLS[1]} then", [20, 60], [], FinishReason.STOP)
@settings(max_examples=50, deadline=None)
def test_a_stream_that_breaks_after_any_event_resumes_with_what_is_missing(
    output: str, cut: Cut, other: Cut, reason: FinishReason
) -> None:
    prepared, first, second = prepared_for(), recorded(output, cut, reason), recorded(output, other, reason)
    events, message = streamed(prepared, first), whole(prepared, first)
    assert [event.event_id is None for event in events] == [False] * (len(events) - 1) + [True]
    for count, event in enumerate(events[:-1], 1):
        assert streamed(prepared, first, event.event_id or "") == events[count:]
        rest = streamed(prepared, second, event.event_id or "")
        assert message_of([*events[:count], *rest]) == message


@given(outputs(), CUTS, CUTS)
@settings(max_examples=30, deadline=None)
def test_an_answer_may_break_again_and_again(output: str, cut: Cut, other: Cut) -> None:
    """Each time after one event more, of outputs that are cut in turns."""
    prepared = prepared_for()
    records = [recorded(output, each, FinishReason.STOP) for each in (cut, other)]
    events: list[Event] = []
    while not events or events[-1].event_id is not None:
        after = events[-1].event_id if events else ""
        events.append(streamed(prepared, records[len(events) % 2], after or "")[0])
    assert message_of(events) == whole(prepared, records[0])


@pytest.mark.parametrize("delivered", range(12))
def test_a_text_goes_on_behind_the_characters_that_its_client_has(delivered):
    """Also where they came in two events, and come in one now."""
    plain = prepared_for(ResponseOptions(api=Api.MESSAGES, reasoning=ReasoningPlacement.INLINE))
    encoder = MESSAGES.encoder(plain, StreamCursor.parse("1", 1), delivered)
    encoder.encode(Delta("He", [1], replayed=True))
    data = encoder.encode(Delta("llo ", [2])) + encoder.encode(Delta("world", [3]))
    texts = [event.data["delta"]["text"] for event in message_events(data)]
    assert "".join(texts) == "llo world"[delivered:]
    assert [event.event_id for event in message_events(data)] == ["2", "3"][2 - len(texts) :]


@given(outputs())
@settings(max_examples=30, deadline=None)
def test_a_token_is_encoded_as_a_delta_of_one_token_is(output: str) -> None:
    token_ids = TOKENIZER.encode_plain(output)
    for options in (OPTIONS, ResponseOptions(reasoning=ReasoningPlacement.INLINE, api=Api.MESSAGES)):
        for ids in (False, True):
            prepared = prepared_for(options, ids=ids)
            encoders = [MESSAGES.encoder(prepared, StreamCursor(1)) for _ in range(2)]
            assert encoders[0].opening() == encoders[1].opening()
            text = TOKENIZER.new_output_stream([], ())
            for token_id in token_ids:
                delta = Delta(text.push([token_id]), [token_id])
                assert encoders[0].encode_token(0, token_id, delta.text) == encoders[1].encode(delta)


def test_text_goes_into_one_block_and_an_empty_answer_has_none():
    plain = prepared_for(ResponseOptions(api=Api.MESSAGES, reasoning=ReasoningPlacement.INLINE))
    assert whole(plain, recorded("<think>a</think>b", [], FinishReason.STOP))["content"] == [
        {"type": "text", "text": "<think>a</think>b"}
    ]
    empty = recorded("", [], FinishReason.STOP)
    assert whole(plain, empty)["content"] == []
    assert [event.data["type"] for event in streamed(plain, empty)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def test_hidden_thinking_leaves_no_block():
    hidden = prepared_for(OPTIONS.model_copy(update={"reasoning": ReasoningPlacement.HIDDEN}))
    record = recorded(f"<think>hm</think>so{CALLS[1]}", [3], FinishReason.STOP)
    assert [block["type"] for block in whole(hidden, record)["content"]] == ["text", "tool_use"]
    assert message_of(streamed(hidden, record)) == whole(hidden, record)


@pytest.mark.parametrize(
    ("output", "reason", "cut", "expected"),
    [
        ("so", FinishReason.STOP, False, "end_turn"),
        (CALLS[0], FinishReason.STOP, False, "tool_use"),
        ("so", FinishReason.LENGTH, False, "max_tokens"),
        ("so", FinishReason.LENGTH, True, "model_context_window_exceeded"),
        (CALLS[0], FinishReason.LENGTH, False, "max_tokens"),
    ],
)
def test_the_stop_reason_is_that_of_the_api(output, reason, cut, expected):
    prepared = prepared_for(OPTIONS.model_copy(update={"limited_by_context": cut}))
    message = whole(prepared, recorded(output, [], reason))
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, None)


@given(CUTS, CUTS)
@settings(max_examples=30, deadline=None)
def test_the_stop_sequence_that_ended_an_answer_is_named(cut: Cut, other: Cut) -> None:
    prepared = prepared_for(stop=("END", "ND"))
    message = whole(prepared, recorded("so END it", cut, FinishReason.STOP))
    assert message["content"] == [{"type": "text", "text": "so "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    events = streamed(prepared, recorded("so END it", other, FinishReason.STOP))
    assert message_of(events) == message
    for count, event in enumerate(events[:-1], 1):
        rest = streamed(prepared, recorded("so END it", cut, FinishReason.STOP), event.event_id or "")
        assert message_of([*events[:count], *rest]) == message


def test_tokens_from_the_prefix_cache_are_told_apart_in_the_usage():
    record = recorded("so", [], FinishReason.STOP)
    events = streamed(prepared_for(), record)
    counted = {"cache_creation_input_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    begun = {"input_tokens": len(prepared_for().first.prompt_token_ids), "output_tokens": 0}
    assert events[0].data["message"]["usage"].items() >= {**begun, "cache_read_input_tokens": 0, **counted}.items()
    usage = {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 9, **counted}
    assert events[-2].data["usage"] == usage
    assert whole(prepared_for(), record)["usage"].items() >= usage.items()


@given(CUTS)
@settings(max_examples=20, deadline=None)
def test_the_usage_tells_tokens_of_thinking_also_where_that_is_not_shown(cut: Cut) -> None:
    answer = recorded(f"<think>hm</think>so {CALLS[0]}", cut, FinishReason.STOP)
    thinking = {"thinking_tokens": len(TOKENIZER.encode_plain("<think>hm</think>"))}
    hidden = OPTIONS.model_copy(update={"reasoning": ReasoningPlacement.HIDDEN})
    for prepared in (prepared_for(), prepared_for(hidden)):
        assert whole(prepared, answer)["usage"]["output_tokens_details"] == thinking
        events = streamed(prepared, answer)
        assert events[0].data["message"]["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
        assert events[-2].data["usage"]["output_tokens_details"] == thinking
    endless = recorded("<think>hm, and on", cut, FinishReason.LENGTH)
    counted = len(TOKENIZER.encode_plain("<think>hm, and on"))
    assert whole(prepared_for(), endless)["usage"]["output_tokens_details"] == {"thinking_tokens": counted}


def test_ids_of_blocks_follow_from_the_requests():
    record = recorded(f"<think>hm</think>{CALLS[0]}{CALLS[1]}", [], FinishReason.STOP)
    blocks = whole(prepared_for(), record)["content"]
    assert whole(prepared_for(), record)["content"] == blocks
    ids = [block.get("id") or block["signature"] for block in blocks]
    assert len(set(ids)) == 3
    other = replace(prepared_for(), generations=(replace(prepared_for().first, request_id="s"),))
    assert not {block.get("id") or block["signature"] for block in whole(other, record)["content"]} & set(ids)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": ', {}),
        ("[1]", {}),
        ('{"a": NaN}', {}),
        ('{"a": -Infinity}', {}),
        ('{"a": 1e999}', {}),
        ('{"a": "\\ud800"}', {}),
        ('{"a": ' * 300 + "1" + "}" * 300, {}),
        (
            '{"a": 1.5e3, "b": "\\ud83d\\ude00", "c": 12345678901234567890}',
            {"a": 1500.0, "b": "😀", "c": 12345678901234567890},
        ),
        ("9" * 5000, {}),
        ('{"a": ' * 100_000, {}),
    ],
)
def test_arguments_that_are_no_object_become_an_empty_input(arguments, expected):
    assert read_input(arguments) == expected


async def test_an_answer_that_has_not_ended_is_never_passed_on_as_a_message():
    prepared = prepared_for()
    builder, encoder = MESSAGES.builder(prepared), MESSAGES.encoder(prepared, StreamCursor(1))
    builder.add(Delta("so", [1]))
    encoder.encode(Delta("so", [1]))
    for end in (lambda: builder.body(USAGE), lambda: _encode(encoder)):
        with pytest.raises(QuireError) as caught:
            await end()
        assert caught.value.code is ErrorCode.INTERNAL


async def _encode(encoder) -> None:
    encoder.encode(Delta("", [], usage=USAGE))


@pytest.mark.parametrize(
    "event_id", ["17", "17e", "17eu", "-", "", "x", "17_", "17_x", "17_1_1", "17_-1", "1_1234567890", "_1", "1e_1"]
)
def test_an_id_of_another_form_has_nothing_behind_its_cursor(event_id):
    assert MESSAGES.read_event_id(event_id) == (event_id, 0)


def test_what_is_behind_the_cursor_is_read_from_an_id():
    assert MESSAGES.read_event_id("17_5") == ("17", 5)
