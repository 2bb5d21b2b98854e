"""Calls and thoughts are read the same however the text was cut, and what is no call stays text."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.text.reasoning import ReasoningParser, opens_reasoning
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tool_formats import ToolFormat, detect_tool_format, new_tool_parser
from quire_proto.text.tool_parser import MAX_CALL_CHARS

NAMES = ("get", "now")
NOW = '{"name": "now", "parameters": {}}'
HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA3
FORMATS = pytest.mark.parametrize("tool_format", list(ToolFormat))

FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "_call>",
    "<|python_tag|>",
    "<|python",
    "_tag|>",
    "<",
    ">",
    "{",
    "}",
    "[",
    "]",
    '{"name": "get", "arguments": {',
    '{"name":"now","parameters":{}}',
    '{"name": "other", "arguments": {}}',
    '{"arguments": {"a": 1}, "name": "get"}',
    '"',
    "\\",
    '"a": "}"',
    '"\\""',
    ":",
    ",",
    ";",
    "\n",
    " ",
    "\n\n",
    "é",
    "x",
    "hello",
    '{"a": 1}',
    '{"name": "get", "arguments": "{}"}',
    '{"name": "get"}',
    "<think>",
    "</think>",
    "</th",
    "ink>",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def read(parser, text, cuts=(), *, ended=True):
    """All that a parser says of a text that is cut at these places, to its end or so far."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(bounds)]
    pieces = [piece for part in parts for piece in parser.push(part)]
    pieces += parser.finish() if ended else []
    assert all(piece.text for piece in pieces if not isinstance(piece, ToolCallStart))
    return merge_adjacent(pieces)


def calls(tool_format, text, cuts=()):
    return read(new_tool_parser(tool_format, NAMES), text, cuts)


@FORMATS
@given(TEXTS, CUTS)
def test_the_result_does_not_depend_on_the_cuts(tool_format, text, cuts):
    whole = calls(tool_format, text)
    assert calls(tool_format, text, cuts) == whole
    assert calls(tool_format, text, range(len(text))) == whole


@FORMATS
@given(TEXTS, CUTS)
def test_how_far_it_has_come_does_not_depend_on_the_cuts(tool_format, text, cuts):
    """Whoever takes an output up again, with other pieces, goes on where it was."""
    for opened in (True, False):
        whole = read(ReasoningParser(opened=opened), text, ended=False)
        assert read(ReasoningParser(opened=opened), text, cuts, ended=False) == whole
    whole = read(new_tool_parser(tool_format, NAMES), text, ended=False)
    assert read(new_tool_parser(tool_format, NAMES), text, cuts, ended=False) == whole


@FORMATS
@given(TEXTS)
def test_text_without_calls_is_content_unchanged(tool_format, text):
    pieces = calls(tool_format, text)
    if not any(isinstance(piece, ToolCallStart) for piece in pieces):
        assert "".join(piece.text for piece in pieces) == text


@FORMATS
@given(TEXTS)
def test_calls_are_of_offered_tools_and_arguments_follow_them(tool_format, text):
    before = None
    for piece in calls(tool_format, text):
        if isinstance(piece, ToolCallStart):
            assert piece.name in NAMES
        if isinstance(piece, ToolCallArguments):
            assert isinstance(before, ToolCallStart)
        before = piece


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=6)
    | st.sampled_from(["</tool_call>", '"}', "\\", "<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
WORDS = st.text(st.characters(exclude_characters="<{", exclude_categories=("C", "Z")), min_size=1, max_size=8)


@st.composite
def written_calls(draw, key):
    """A call as a model may write it, and what it means."""
    name, arguments = draw(st.sampled_from(NAMES)), draw(OBJECTS)
    text = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    gap = draw(st.sampled_from(["", " ", "\n"]))
    return f'{gap}{{{gap}"name":{gap}"{name}",{gap}"{key}": {text}{gap}}}{gap}', (
        ToolCallStart(name),
        ToolCallArguments(text),
    )


@given(st.lists(WORDS | written_calls("arguments"), max_size=5), CUTS)
def test_hermes_calls_and_content_are_what_was_written(items, cuts):
    text, expected = "", []
    for item in items:
        if isinstance(item, str):
            text += item
            expected.append(Content(item))
        else:
            text += f"\n<tool_call>{item[0]}</tool_call>"
            expected += item[1]
    assert calls(HERMES, text, cuts) == merge_adjacent(expected)


@given(st.lists(written_calls("parameters"), max_size=4), st.sampled_from([";", "; ", "\n", " ;\n"]), CUTS)
def test_llama_calls_are_what_was_written(items, gap, cuts):
    text = gap.join(body for body, _ in items)
    expected = [piece for _, meaning in items for piece in meaning]
    assert calls(LLAMA, text, cuts) == expected
    if items:
        assert calls(LLAMA, f"well <|python_tag|>{text}", cuts) == [Content("well"), *expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<tool_call>{"arguments": {"a": "é"}, "name": "get"}</tool_call>',
            [ToolCallStart("get"), ToolCallArguments('{"a": "é"}')],
        ),
        (
            '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [ToolCallStart("get"), ToolCallArguments('{"a": 1}')],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCallStart("now"), ToolCallArguments("{}")]),
        ('<tool_call>{"name": "now"}', [ToolCallStart("now"), ToolCallArguments("{}")]),
        ('<tool_call>{"name": "get", "arguments": {"a": 1}', [ToolCallStart("get"), ToolCallArguments('{"a": 1}')]),
        ('<tool_call>{"name": "get", "arguments": {"a": ', [ToolCallStart("get"), ToolCallArguments('{"a": ')]),
        (
            '<tool_call>{"name": "get", "arguments": {"a": 1</tool_call> b',
            [ToolCallStart("get"), ToolCallArguments('{"a": 1'), Content(" b")],
        ),
        (
            '<tool_call>{"name": "get", "arguments": {}}}</tool_call>',
            [ToolCallStart("get"), ToolCallArguments("{}"), Content("}</tool_call>")],
        ),
        ('<tool_call>{"name": "get", "arguments": 5}</tool_call>', None),
        ('<tool_call>{"name": "drop", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "get", "arguments": {}', [ToolCallStart("get"), ToolCallArguments("{}")]),
        ("<tool_call>get()</tool_call>", None),
        ('<tool_call>{"arguments": {}, "name": "drop"}</tool_call>', None),
        ('<tool_call>{"name": "now"}</tool_call> b ', [ToolCallStart("now"), ToolCallArguments("{}"), Content(" b ")]),
        ('<tool_call>{"name": "now"}</tool_call>\n', [ToolCallStart("now"), ToolCallArguments("{}")]),
        ('say "<tool_call>"', None),
        (
            '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [Content("<tool_call>"), ToolCallStart("now"), ToolCallArguments("{}")],
        ),
        ('{"name": "get", "parameters": {}}', None),
    ],
)
def test_malformed_hermes_calls_are_repaired_or_stay_text(text, expected):
    assert calls(HERMES, text) == ([Content(text)] if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "get", "parameters": {"a": 1}}', [ToolCallStart("get"), ToolCallArguments('{"a": 1}')]),
        ('{"type": "function", "name": "now", "parameters": {}}', [ToolCallStart("now"), ToolCallArguments("{}")]),
        (
            '{"name": "now", "arguments": {}}\nDone.',
            [ToolCallStart("now"), ToolCallArguments("{}"), Content("\nDone.")],
        ),
        (f"{NOW}; <|python_tag|>{NOW}", [ToolCallStart("now"), ToolCallArguments("{}")] * 2),
        ('{"name": "Bob", "parameters": {}}', None),
        ('{"city": "Rome"}', None),
        ('Sure: {"name": "get", "parameters": {}}', None),
        ("<|python_tag|>print(1)", None),
        ('{"name": "get", "parameters": 5}', None),
    ],
)
def test_malformed_llama_calls_are_repaired_or_stay_text(text, expected):
    assert calls(LLAMA, text) == ([Content(text)] if expected is None else expected)


def test_a_call_is_streamed_as_it_arrives():
    parser = new_tool_parser(HERMES, NAMES)
    assert parser.push('Hi\n<tool_call>\n{"name": "get", "arguments":') == [Content("Hi")]
    assert parser.push(' {"a"') == [ToolCallStart("get"), ToolCallArguments('{"a"')]
    assert parser.push(": 1") == [ToolCallArguments(": 1")]
    assert parser.push("}}\n</tool_call>") == [ToolCallArguments("}")]
    assert parser.finish() == []


def test_a_call_may_begin_with_long_whitespace():
    begin = '<tool_call>{"name": "get", "arguments":' + " " * 400
    assert new_tool_parser(HERMES, NAMES).push(begin + '{"a"') == [ToolCallStart("get"), ToolCallArguments('{"a"')]


@FORMATS
def test_the_held_back_text_is_bounded(tool_format):
    parser = new_tool_parser(tool_format, NAMES)
    begin = '<tool_call>{"name": "x' if tool_format is HERMES else '{"type": "'
    emitted = "".join(piece.text for _ in range(2) for piece in parser.push(begin + "y" * MAX_CALL_CHARS))
    assert len(emitted) >= MAX_CALL_CHARS


@given(TEXTS, CUTS, st.booleans())
def test_reasoning_does_not_depend_on_the_cuts(text, cuts, opened):
    whole = read(ReasoningParser(opened=opened), text)
    assert read(ReasoningParser(opened=opened), text, cuts) == whole
    assert read(ReasoningParser(opened=opened), text, range(len(text))) == whole


@given(TEXTS, st.booleans())
def test_reasoning_equals_that_of_the_whole_text_at_once(text, opened):
    thoughts, rest, marked = [], text, opened
    while marked or rest.lstrip(" \n").startswith("<think>"):
        thought, _, rest = re.sub(r"^[ \n]*<think>", "", rest).partition("</think>")
        ended = thought + "</think>" in text
        thoughts.append(re.sub(r"^[ \n]+|[ \n]+$" if ended else r"^[ \n]+", "", thought))
        marked = False
    has_reasoning = opened or bool(thoughts)
    expected = [Reasoning("".join(thoughts)), Content(rest.lstrip(" \n") if has_reasoning else rest)]
    assert read(ReasoningParser(opened=opened), text) == [piece for piece in expected if piece.text]


def test_reasoning_is_streamed_as_it_arrives():
    assert ReasoningParser(opened=False).push("\n<think>\nwell ") == [Reasoning("well")]
    parser = ReasoningParser(opened=True)
    assert parser.push("\nfirst") == [Reasoning("first")]
    assert parser.push(" then\n</thi") == [Reasoning(" then")]
    assert parser.push("nk>\n\nSo <think> is a mark.") == [Content("So <think> is a mark.")]
    assert parser.finish() == []


@pytest.mark.parametrize(("prompt", "opened"), [("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_a_prompt_may_open_the_reasoning(prompt, opened):
    assert opens_reasoning(prompt) is opened


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"{{ '<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}' }}", HERMES),
        ("""{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}""", LLAMA),
        ("<tool_call>\n<function=get>", None),
        ("<tool_call>{name}<arg_key>", None),
        ("[TOOL_CALLS]", None),
    ],
)
def test_the_format_is_detected_from_the_template(template, expected):
    assert detect_tool_format(template) is expected
