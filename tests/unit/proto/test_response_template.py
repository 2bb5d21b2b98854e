"""Formats that a tokenizer's ``response_template`` describes are read as transformers reads them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.reasoning import ReasoningFormat, ReasoningParser
from quire_proto.text.response_template import described_format, described_reasoning
from quire_proto.text.stream_scanner import Content, ToolCallArguments, ToolCallStart
from quire_proto.text.tool_parser import new_tool_parser
from transformers.utils.chat_parsing import parse_response

CALLS = {
    "json": {"open_pattern": r"\s*<<call", "close": "call>>", "content": "json"},
    "list": {"open": "<<calls", "close": "calls>>", "content": "json", "transform_each": True},
    "name": {"open_pattern": r"<<call\s*(?P<name>\w+)::", "close": "call>>", "content": "json"},
    "tags": {
        "open_pattern": r"\s*<<do\s*(?P<name>[^>\n]+)>",
        "close_pattern": r"done>>\s*end",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<k=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</>"},
    },
}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}
TRANSFORMS = {
    "json": WHOLE, "list": {"function": {"name": "{name}", "arguments": "{arguments}"}}, "name": FUNCTION,
    "tags": FUNCTION,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]  # fmt: skip
CITIES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='<>\\"'), min_size=1, max_size=6)


def template_of(name):
    call = {**CALLS[name], "transform": TRANSFORMS[name], "repeats": True}
    thought = {"open": "(hm", "close": "hm)", "content": "text"}
    fields = {"reasoning_content": thought, "tool_calls": call, "content": {"content": "text"}}
    return {"start_anchor": "assistant:", "fields": fields}


def written(name, city, days):
    arguments = json.dumps({"city": city, "days": days}, ensure_ascii=False)
    whole = f'{{"name": "get", "arguments": {arguments}}}'
    return {
        "json": f"<<call{whole}call>>",
        "list": f"<<calls[{whole}]calls>>",
        "name": f"<<call get::{arguments}call>>",
        "tags": f"<<do get><k=city>\n{city}\n</><k=days>\n{days}\n</>done>> end",
    }[name]


@pytest.mark.parametrize("name", CALLS)
@settings(deadline=None, max_examples=30)
@given(city=CITIES, days=st.integers(-9, 99))
def test_calls_are_read_as_transformers_reads_them(name, city, days):
    text = "hello" + written(name, city, days)
    theirs = parse_response(text, template_of(name), prefix="", tools=TOOLS)
    calls = theirs["tool_calls"][0] if name == "list" else theirs["tool_calls"]
    form = described_format(template_of(name))
    assert form is not None
    parser = new_tool_parser(form, ["get"], {"get": {"days": ("integer",)}})
    pieces = [*parser.push(text), *parser.finish()]
    assert pieces[:2] == [Content(theirs["content"]), ToolCallStart("get")]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolCallArguments))
    assert [{"name": "get", "arguments": json.loads(arguments)}] == [call["function"] for call in calls]


def test_reasoning_is_described_by_its_marks():
    assert described_reasoning(template_of("json")) == ReasoningFormat("(hm", "hm)")
    parser = ReasoningParser(ReasoningFormat("(hm", "hm)"), opened=False)
    assert [piece.text for piece in parser.push("(hm well hm) so")] == ["well", "so"]


@pytest.mark.parametrize(
    "template",
    [
        None,
        [],
        {"fields": 5},
        {"fields": {"tool_calls": {"content": "json"}}},
        {"fields": {"tool_calls": {"open_pattern": "<a|b>", "close": ">", "content": "json"}}},
        {"fields": {"tool_calls": {"open": "<", "close": ">", "content": "kv-lines"}}},
        {"fields": {"tool_calls": {"open_pattern": "<(?P<name>a)", "close": ">", "content": "xml-inline"}}},
    ],
)
def test_what_cannot_be_read_describes_nothing(template):
    assert described_format(template) is None
    assert described_reasoning(template) is None


def test_a_family_that_the_template_shows_comes_first():
    source = '{% if tools %}{% endif %}<tool_call>{"name", "arguments"}</tool_call>{{ messages[0].content }}'
    assert ChatTemplate(source, {}, "the test", (), template_of("json")).tool_format.name == "hermes"
    bare = "{% if tools %}{% endif %}{{ messages[0].content }}"
    assert ChatTemplate(bare, {}, "the test", (), template_of("json")).tool_format.name == "response_template"
