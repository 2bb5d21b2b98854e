"""Calls and thoughts are read the same however the text was cut, and what is no call stays text."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text.call_reader import MAX_CALL_CHARS
from quire_proto.text.reasoning import REASONING_FORMATS, THINK, ReasoningParser, detect_reasoning
from quire_proto.text.response_template import described_marks
from quire_proto.text.schema_references import References
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tool_arguments import parameter_types, python_arguments, to_json
from quire_proto.text.tool_formats import (
    HARMONY,
    HERMES,
    LLAMA3,
    TOOL_FORMATS,
    detect_tool_format,
)
from quire_proto.text.tool_parser import new_tool_parser

from tests.support.tool_models import marks_of, written

NAMES = ("get", "now")
NOW = '{"name": "now", "parameters": {}}'
LLAMA = LLAMA3
FORMATS = pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=[each.name for each in TOOL_FORMATS])
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "part": {"type": "number"},
        "flag": {"type": "boolean"},
        "none": {"type": "null"},
        "list": {"type": "array"},
        "more": {"type": "object"},
        "some": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TYPES = {"get": parameter_types(SCHEMA), "now": {}}
BY_NAME = {each.name: each for each in TOOL_FORMATS}

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
TRIES = settings(max_examples=15, deadline=None)


def texts_of(tool_format):
    """Texts of marks, calls and parts of both."""
    marks = marks_of(tool_format)
    calls = [
        written(tool_format, [("get", {"city": "Rome", "days": 3}), ("now", {})]),
        written(tool_format, [("x", {})]),
    ]
    own = [*marks, *(mark[: len(mark) // 2] for mark in marks), *(mark[len(mark) // 2 :] for mark in marks), *calls]
    own += [call[: len(call) // 2] for call in calls] + [text for text in tool_format.texts if text]
    more = ["get", "now", "(", ")", "'", "city=", "call:", "functions.", "city", "a\n", *FRAGMENTS]
    return st.lists(st.sampled_from(own) | st.sampled_from(more), max_size=12).map("".join)


def read(parser, text, cuts=(), *, ended=True):
    """All that a parser says of a text that is cut at these places, to its end or so far."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(bounds)]
    pieces = [piece for part in parts for piece in parser.push(part)]
    pieces += parser.finish() if ended else []
    assert all(piece.text for piece in pieces if not isinstance(piece, ToolCallStart))
    return merge_adjacent(pieces)


def calls(tool_format, text, cuts=()):
    return read(new_tool_parser(tool_format, NAMES, TYPES), text, cuts)


@FORMATS
@TRIES
@given(st.data(), CUTS)
def test_the_result_does_not_depend_on_the_cuts(tool_format, data, cuts):
    text = data.draw(texts_of(tool_format))
    whole = calls(tool_format, text)
    assert calls(tool_format, text, cuts) == whole
    assert calls(tool_format, text, range(len(text))) == whole


@FORMATS
@TRIES
@given(st.data(), CUTS)
def test_how_far_it_has_come_does_not_depend_on_the_cuts(tool_format, data, cuts):
    """Whoever takes an output up again, with other pieces, goes on where it was."""
    text = data.draw(texts_of(tool_format))
    whole = read(new_tool_parser(tool_format, NAMES, TYPES), text, ended=False)
    assert read(new_tool_parser(tool_format, NAMES, TYPES), text, cuts, ended=False) == whole


@pytest.mark.parametrize("marks", REASONING_FORMATS[1:], ids=[each.begin for each in REASONING_FORMATS[1:]])
@TRIES
@given(TEXTS, CUTS, st.booleans())
def test_how_far_reasoning_has_come_does_not_depend_on_the_cuts(marks, text, cuts, opened):
    text = text.replace("<think>", marks.begin).replace("</think>", marks.end)
    whole = read(ReasoningParser(marks, opened=opened), text, ended=False)
    assert read(ReasoningParser(marks, opened=opened), text, cuts, ended=False) == whole


@FORMATS
@TRIES
@given(st.data())
def test_text_without_calls_is_content_unchanged(tool_format, data):
    text = data.draw(texts_of(tool_format))
    pieces = calls(tool_format, text)
    if tool_format is HARMONY and any(mark in text for mark in ("<|", "to=")):
        return  # its headers are no text
    if not any(isinstance(piece, ToolCallStart) for piece in pieces):
        assert "".join(piece.text for piece in pieces) == text.removeprefix(tool_format.preface)


@FORMATS
@TRIES
@given(st.data())
def test_calls_are_of_offered_tools_and_arguments_follow_them(tool_format, data):
    before = None
    for piece in calls(tool_format, data.draw(texts_of(tool_format))):
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
    call = written(tool_format, [("get", {"city": "y", "days": 3})])
    for end in range(len(call)):
        parser = new_tool_parser(tool_format, NAMES, TYPES)
        pieces = [piece for text in (call[:end], "y" * 2 * MAX_CALL_CHARS) for piece in parser.push(text)]
        emitted = sum(len(piece.text) for piece in pieces if not isinstance(piece, ToolCallStart))
        assert emitted >= MAX_CALL_CHARS, call[:end]


STRINGS = st.text(st.characters(exclude_categories=("C",)), max_size=6) | st.sampled_from(
    ["a\nb", "\n", "5 < 6", "True", "3"]
)
VALUES = {
    "city": STRINGS,
    "days": st.integers(-9, 99),
    "part": st.floats(-9, 9).map(lambda number: round(number, 2)),
    "flag": st.booleans(),
    "none": st.none(),
    "list": st.lists(STRINGS | st.integers(0, 9) | st.booleans(), max_size=3),
    "more": st.dictionaries(
        st.sampled_from("abc"), st.none() | STRINGS | st.lists(st.integers(0, 9), max_size=2), max_size=2
    ),
    "some": st.none() | st.integers(0, 9),
}
GIVEN = st.fixed_dictionaries({}, optional=VALUES).map(lambda given: ("get", given)) | st.just(("now", {}))


@FORMATS
@TRIES
@given(st.lists(GIVEN, min_size=1, max_size=3), st.sampled_from(["", "hello"]), CUTS)
def test_calls_are_what_was_written_in_every_format(tool_format, given_calls, before, cuts):
    before = "" if tool_format.bare or tool_format is HARMONY else before
    text = written(tool_format, given_calls)
    pieces = calls(tool_format, before + text, cuts)
    found: list = []
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            found.append([piece.name, ""])
        elif isinstance(piece, ToolCallArguments):
            found[-1][1] += piece.text
    assert [(name, json.loads(arguments)) for name, arguments in found] == given_calls
    assert [piece.text for piece in pieces if isinstance(piece, Content)] == [before] * bool(before)


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


@pytest.mark.parametrize(
    ("prompt", "opened", "closed"),
    [("a<think>\n", True, False), ("<think>\n\n</think>\n\n", False, True), ("", False, False)],
)
def test_a_prompt_may_open_or_close_the_reasoning(prompt, opened, closed):
    assert (THINK.is_opened(prompt), THINK.is_closed(prompt)) == (opened, closed)


@FORMATS
def test_a_format_is_detected_by_its_signs(tool_format):
    signs = " ".join(sign if isinstance(sign, str) else sign[0] for sign in tool_format.signs)
    calls_and_signs = signs + written(tool_format, [("get", {"city": "Rome"})])
    assert detect_tool_format(calls_and_signs) is tool_format


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"{{ '<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}' }}", "hermes"),
        ("""{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}""", "llama3"),
        ("<tool_call>\n<function=get>\n<parameter=city>", "qwen3-coder"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", "glm"),
        ("[TOOL_CALLS]", "mistral-7b"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("<|tool_call:begin|>", None),
        ("no tools", None),
    ],
)
def test_the_format_is_detected_from_the_template(template, expected):
    found = detect_tool_format(template)
    assert (None if found is None else found.name) == expected


def test_the_format_may_be_what_a_response_template_describes():
    field = {"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "content": "xml-inline"}
    field["content_args"] = {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"}
    described = described_marks({"fields": {"tool_calls": field}})
    assert detect_tool_format("{{ messages }}", described) is BY_NAME["qwen3-coder"]
    hermes = {"open_pattern": r"\s*<tool_call>", "content": "json", "transform": {"function": "{content}"}}
    assert detect_tool_format("{{ messages }}", described_marks({"fields": {"tool_calls": hermes}})) is HERMES


@pytest.mark.parametrize("marks", REASONING_FORMATS, ids=[each.begin for each in REASONING_FORMATS])
def test_reasoning_is_detected_by_its_marks(marks):
    assert detect_reasoning(f"{marks.begin}…{marks.end}") is marks
    assert detect_reasoning("…") is None


START = ToolCallStart("get")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "qwen3-coder",
            "<tool_call><function=get><parameter=city>a</parameter></function></tool_call>",
            '{"city": "a"}',
        ),
        ("qwen3-coder", "<tool_call><function=get><parameter=days>\n3\n</parameter></function>", '{"days": 3}'),
        ("qwen3-coder", "<tool_call><function=get><parameter=days>three</parameter></function>", '{"days": "three"}'),
        ("qwen3-coder", "<tool_call><function=get><parameter=flag>True</parameter></function>", '{"flag": true}'),
        (
            "qwen3-coder",
            "<tool_call><function=get><parameter=more>{'a': None}</parameter></function>",
            '{"more": {"a": null}}',
        ),
        ("qwen3-coder", "<tool_call><function=get><parameter=what>3</parameter></function>", '{"what": "3"}'),
        ("qwen3-coder", "<tool_call><function=get><parameter=city>a", '{"city": "a'),
        ("qwen3-coder", "<tool_call><function=get><parameter=days>3", '{"days": '),
        ("qwen3-coder", "<tool_call><function=get><parameter=city>a</parameter></func", '{"city": "a"'),
        (
            "deepseek-v3.2",
            '<｜DSML｜function_calls><｜DSML｜invoke name="get"><｜DSML｜parameter name="days" string="true">3'
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
            '{"days": "3"}',
        ),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>get<|tool_call_argument_begin|>{}", "{}"),
        ("mistral", "[TOOL_CALLS]get{}", "{}"),
        ("mistral", "[TOOL_CALLS]get[CALL_ID]a1b2c3d4e[ARGS]{}", "{}"),
        ("mistral-7b", '[TOOL_CALLS] [{"name": "get", "arguments": {}, "id": "a}b"}]', "{}"),
        ("granite-3", '<|tool_call|> {"name": "get", "arguments": {}}', "{}"),
        ("internlm", '<|action_start|> <|plugin|>\n{"name": "get", "parameters": {}}<|action_end|>', "{}"),
        (
            "phi-4-mini",
            '<|tool_call|>[{"type": "function", "function": {"name": "get", "arguments": {}}}]<|/tool_call|>',
            "{}",
        ),
        (
            "lfm2",
            "<|tool_call_start|>[get(city='a\\'b', days=-1.5e3, flag=True, list=(1, None))]<|tool_call_end|>",
            '{"city": "a\'b", "days": -1.5e3, "flag": true, "list": [1, null]}',
        ),
        (
            "gemma-4",
            '<|tool_call>call:get{city:<|"|>a,"}b<|"|>,more:{a:[1,true]}}<tool_call|>',
            '{"city": "a,\\"}b", "more": {"a": [1, true]}}',
        ),
        ("gemma-4", '<|tool_call>call:get{city:<|"|>a<|"|>}', '{"city": "a"}'),
        (
            "gemma-4",
            '<|tool_call>call:get{two  words :<|"|>x:y<|"|>,@b:{a-b c:1,é.d:null}}<tool_call|>',
            '{"two  words": "x:y", "@b": {"a-b c": 1, "é.d": null}}',
        ),
        (
            "lfm2",
            "<|tool_call_start|>[get(two words='a=b', @b = {'c d': 1})]",
            '{"two words": "a=b", "@b": {"c d": 1}}',
        ),
        ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "get", "arguments": ""}</tool_call>', "{}"),
        ("functionary-3.2", "get\n{}", "{}"),
        ("harmony", " to=functions.get<|channel|>commentary json<|message|>{}<|call|>", "{}"),
        ("harmony", "<|channel|>commentary to=get <|constrain|>json<|message|>{}", "{}"),
    ],
)
def test_a_call_may_be_written_in_other_ways(name, text, expected):
    assert calls(BY_NAME[name], text) == [START, ToolCallArguments(expected)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", "<tool_call><function=drop><parameter=city>a</parameter></function></tool_call>"),
        ("qwen3-coder", "<tool_call><function=get>hello</function></tool_call>"),
        ("qwen3-coder", "<tool_call><function=get><parameter=" + "y" * 600 + ">a</parameter></function>"),
        ("glm", "<tool_call>get what</tool_call>"),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>none"),
        ("lfm2", "<|tool_call_start|>[get(city=Rome)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get('Rome')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[drop()]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get(city='"),
        ("gemma-4", "<|tool_call>call:get{city:Rome}<tool_call|>"),
        ("llama-4", "[1, 2]"),
        ("mistral", "[TOOL_CALLS]drop[ARGS]{}"),
        ("command-r7b", '<|START_ACTION|>[{"tool_name": "drop", "parameters": {}}]<|END_ACTION|>'),
        ("harmony", "hello <|"),
        ("harmony", "to be or not"),
        ("harmony", " to=functions.drop<|channel|>commentary<|message|>{}"),
    ],
)
def test_what_cannot_be_a_call_stays_text(name, text):
    assert calls(BY_NAME[name], text) == [Content(text)]


def test_what_follows_a_malformed_call_is_content():
    text = "<tool_call><function=get><parameter=city>a</parameter></function> and so on"
    assert calls(BY_NAME["qwen3-coder"], text) == [START, ToolCallArguments('{"city": "a"}'), Content(" and so on")]


def test_a_text_between_tags_is_streamed_as_it_arrives():
    parser = new_tool_parser(BY_NAME["qwen3-coder"], NAMES, TYPES)
    assert parser.push("<tool_call>\n<function=get>\n<parameter=city>\nRo") == [
        START,
        ToolCallArguments('{"city": "Ro'),
    ]
    assert parser.push('"me\n') == [ToolCallArguments('\\"me')]
    assert parser.push("</para") == []
    assert parser.push("meter>\n</function>") == [ToolCallArguments('"}')]


def test_a_value_that_is_too_long_to_be_held_back_is_a_text():
    text = "<tool_call><function=get><parameter=list>[" + "1," * MAX_CALL_CHARS + "</parameter></function></tool_call>"
    found = calls(BY_NAME["qwen3-coder"], text, range(0, len(text), 1000))
    assert found == calls(BY_NAME["qwen3-coder"], text)
    assert json.loads(found[1].text) == {"list": "[" + "1," * MAX_CALL_CHARS}


HARMONY_OUTPUT = (
    "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>It is sunny."
)


@given(CUTS)
def test_harmony_has_reasoning_content_and_calls_in_channels(cuts):
    assert calls(HARMONY, HARMONY_OUTPUT, cuts) == [
        Reasoning("They ask."), Content("I look."), START, ToolCallArguments('{"city": "Rome"}'),
        Content("It is sunny."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("3", ["integer"], "3"),
        ("3", ["string"], '"3"'),
        ("3.0", ["integer"], "3.0"),
        ("3.5", ["integer"], '"3.5"'),
        ("3", ["number"], "3"),
        ("true", ["boolean"], "true"),
        ("False", ["boolean"], "false"),
        ("NaN", ["number"], '"NaN"'),
        ("null", ["null", "string"], "null"),
        ("None", ["null"], "null"),
        ("[1, ", ["array"], '"[1, "'),
        (" {} ", ["object"], "{}"),
        ("[" * 5000, ["array"], json.dumps("[" * 5000)),
        ("", ["integer"], '""'),
        ('"a"', ["string", "quoted"], json.dumps('"a"')),
    ],
)
def test_a_bare_text_is_json_of_the_types_that_the_schema_has(text, types, expected):
    assert to_json(text, types) == expected


def test_a_string_that_a_grammar_wrote_in_quotes_is_one():
    assert to_json('"a"', ["string", "quoted"], guided=True) == '"a"'
    assert to_json("a", ["string", "quoted"], guided=True) == '"a"'


@pytest.mark.parametrize("text", ["x", "x=", "x=[", "x=5)", "x='\\ud83d'", "x=01", "x=1 y=2", "x=" + "[" * 90, "x=1,,"])
def test_what_is_no_literal_of_python_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        python_arguments(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | STRINGS, lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(STRINGS, inner, max_size=3), max_leaves=6))  # fmt: skip
def test_literals_of_python_are_what_they_mean(value):
    assert json.loads(python_arguments(f"x={value!r}")) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"a": {"type": "string"}}}, {}),
        ({"properties": {"a": {}}}, {}),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"a": ("integer", "null")}),
        ({"properties": {"a": {"enum": [1, "x"]}}}, {"a": ("integer", "string")}),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "number"}}}, {"a": ("number",)}),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"$ref": "#/$defs/n"}}},
         {"a": ("quoted", "string")}),
        ({"properties": {"a": {"pattern": "^a"}, "b": {"enum": ["<b>"]}}},
         {"a": ("quoted", "string"), "b": ("quoted", "string")}),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
         {"": ("integer",), "a": ("string",)}),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, {"a": ("quoted", "string")}),
        ({"properties": {"a": True}}, {}),
        ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}}}, {"a": ("quoted", "string")}),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/n"}],
          "$defs": {"n": {"properties": {"b": {"type": "number"}}, "anyOf": [{"$ref": "#"}]}}},
         {"a": ("integer",), "b": ("number",)}),
        ({}, {}),
    ],
)  # fmt: skip
def test_the_types_of_parameters_are_those_of_the_schema(schema, types):
    assert parameter_types(schema) == types


def test_a_schema_that_refers_to_itself_often_is_read_once(monkeypatch):
    reads = []
    resolve = References.resolve
    monkeypatch.setattr(References, "resolve", lambda *given: reads.append(1) or resolve(*given))
    often = {"anyOf": [{"$ref": "#/$defs/n"}] * 30 + [{"type": "integer"}, {"$ref": "#/$defs/m"}]}
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}, "b": often}, "$defs": {"n": often, "m": {"type": "null"}}}
    assert parameter_types(schema) == {"a": ("integer", "null"), "b": ("integer", "null")}
    assert len(reads) < 100
