"""Values of tool calls survive the notation of every format: what a grammar lets through is read as it was meant, and
an output that is cut anywhere shows no part of a mark.
"""

import json
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from quire_engine.structured_output.compiler import ModelGrammars
from quire_proto.errors import QuireError
from quire_proto.structured_output import Structured, StructuredKind
from quire_proto.text.reasoning import ReasoningParser
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tool_arguments import parameter_types
from quire_proto.text.tool_formats import HARMONY, TOOL_FORMATS, TaggedCall
from quire_proto.text.tool_grammar import GrammarTooLargeError, ToolSpec, UnsupportedSchemaError, tool_call_grammar
from quire_proto.text.tool_parser import new_tool_parser

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.schemas import NAMES, NUMBERS, numbers, texts
from tests.support.tool_models import marks_of, written
from tests.unit.proto.test_tool_grammar import VOCABULARY, walk

BY_NAME = {each.name: each for each in TOOL_FORMATS}
FORMATS = pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=list(BY_NAME))
TAGGED = pytest.mark.parametrize(
    "tool_format", [each for each in TOOL_FORMATS if isinstance(each.call, TaggedCall)], ids=lambda each: each.name
)
FEW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    tokenizer = byte_level()
    folder = write_model_folder(tmp_path_factory.mktemp("model"), tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    grammars = ModelGrammars(folder, VOCABULARY, [end], num_sandboxes=1)
    yield tokenizer, end, grammars
    grammars.close()


def nasty(tool_format):
    """Texts that look like the format's own notation."""
    marks = [*marks_of(tool_format), *(text.strip() for text in tool_format.texts if text.strip())]
    return ["", " ", "\n", "a < b", '"', "'", "\\", "null", "5", "}", "]", *marks, *(f"a{mark}b\n" for mark in marks)]


@st.composite
def parameters(draw, tool_format):
    """The schema of a tool whose values may look like marks."""
    value = st.sampled_from(nasty(tool_format)) | st.sampled_from([None, True, *NUMBERS])
    listed = st.lists(value, min_size=1, max_size=3)
    leaf = st.one_of(
        listed.map(lambda values: {"enum": values}),
        st.lists(st.sampled_from(nasty(tool_format)), min_size=1, max_size=2).map(
            lambda values: {"type": "string", "enum": values}
        ),
        value.map(lambda each: {"const": each}),
        numbers(),
        texts(),
        st.sampled_from([{"type": "boolean"}, {"type": ["string", "null"]}, {"type": "string"}, {"minLength": 1}]),
        st.just({"type": "object", "properties": {"s": {"type": "string"}}, "additionalProperties": False}),
        st.just({"type": "array", "items": {"$ref": "#/$defs/short"}, "maxItems": 2}),
    )
    properties = draw(st.dictionaries(st.sampled_from([*NAMES, "city", "days"]), leaf, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    others = draw(st.sampled_from([False, True, {"type": "integer"}]))
    definitions = {"$defs": {"short": {"type": "string", "maxLength": 4}}}
    return {"properties": properties, "required": required, "additionalProperties": others, **definitions}


def read(tool_format, text, schema, *, guided, cuts=(), cut=False):
    """The content of an output, and its calls."""
    parser = new_tool_parser(tool_format, ["get"], {"get": parameter_types(schema)}, guided=guided)
    bounds = sorted({0, len(text), *(each for each in cuts if each < len(text))})
    pieces = [piece for start, end in pairwise(bounds) for piece in parser.push(text[start:end])]
    pieces = merge_adjacent([*pieces, *parser.finish(cut=cut)])
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [each.text for each in pieces if isinstance(each, ToolCallArguments)]
    return content, calls, sum(isinstance(piece, ToolCallStart) for piece in pieces)


def check(model, tool_format, schema, seed):
    try:
        text = tool_call_grammar(tool_format, [ToolSpec("get", schema)], forced=True, parallel=False)
        grammar = model[2].compile(Structured(StructuredKind.GRAMMAR, text))
    except (UnsupportedSchemaError, GrammarTooLargeError, QuireError):
        return
    for number in range(2):
        output = walk(model, grammar, Random(seed + number))
        if output is None:
            continue
        content, calls, count = read(tool_format, output, schema, guided=True)
        assert (content, count) == ("", 1), output
        errors = [*Draft202012Validator(schema).iter_errors(json.loads(calls[0]))]
        assert not errors, (output, errors[0].message)


@FORMATS
@FEW
@given(st.data(), st.integers(0, 2**32))
def test_a_forced_call_is_read_as_a_call_by_its_schema(model, tool_format, data, seed):
    check(model, tool_format, data.draw(parameters(tool_format)), seed)


@pytest.mark.soak
@FORMATS
@settings(FEW, max_examples=300)
@given(st.data(), st.integers(0, 2**32))
def test_so_is_each_of_many_more(model, tool_format, data, seed):
    check(model, tool_format, data.draw(parameters(tool_format)), seed)


@FORMATS
def test_a_listed_value_that_contains_a_mark_is_called_whole(model, tool_format):
    for mark in marks_of(tool_format):
        for value in (f"a{mark}b", {"x": [mark]}):
            schema = {"properties": {"e": {"enum": [value]}}, "required": ["e"], "additionalProperties": False}
            text = tool_call_grammar(tool_format, [ToolSpec("get", schema)], forced=True, parallel=False)
            output = walk(model, model[2].compile(Structured(StructuredKind.GRAMMAR, text)), Random(1))
            content, calls, count = read(tool_format, output, schema, guided=True)
            assert (content, count, json.loads(calls[0])) == ("", 1, {"e": value}), output


DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
ONE = {"type": "array", "minItems": 1, "maxItems": 1}
REFERRING = {
    "to another property": {"properties": {"a": DIGIT, "b": {**ONE, "items": {"$ref": "#/properties/a"}}}},
    "to the whole": {"properties": {"a": DIGIT, "b": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}},
    "from the root": {"$ref": "#/definitions/f", "definitions": {"f": {"properties": {"a": DIGIT, "b": DIGIT}}}},
    "to a place of its own": {"properties": {"a": DIGIT, "b": {"$ref": "#/components/n"}}, "components": {"n": DIGIT}},
    "with an escape": {"properties": {"a": DIGIT, "b": {"$ref": "#/$defs/n%20[1]~1"}}, "$defs": {"n [1]/": DIGIT}},
    "by an anchor": {"properties": {"a": DIGIT, "b": {"$ref": "#n"}}, "$defs": {"n": {**DIGIT, "$anchor": "n"}}},
    "by a name": {"properties": {"a": DIGIT, "b": {"$ref": "n"}}, "$defs": {"n": {**DIGIT, "$id": "n"}}, "$id": "x:f"},
    "by a name of its own": {
        "properties": {
            "a": DIGIT,
            "b": {"$id": "http://x/b", "$ref": "#/$defs/n", "minLength": 1, "$defs": {"n": {"maxLength": 3}}},
        }
    },
    "from a property of that name": {
        "properties": {"a": DIGIT, "b": {"type": "object", "properties": {"default": {"$ref": "#/properties/a"}}}}
    },
}


@pytest.mark.parametrize("how", REFERRING)
@pytest.mark.parametrize("name", ["qwen3-coder", "lfm2", "gemma-4"])
def test_a_parameter_is_held_to_what_it_refers_to(model, name, how):
    def closed(schema):
        return {**schema, "required": ["a", "b"], "additionalProperties": False} if "properties" in schema else schema

    schema = closed(REFERRING[how]) | {"definitions": {"f": closed(REFERRING["from the root"]["definitions"]["f"])}}
    text = tool_call_grammar(BY_NAME[name], [ToolSpec("get", schema)], forced=True, parallel=False)
    grammar = model[2].compile(Structured(StructuredKind.GRAMMAR, text))
    outputs = [output for seed in range(12) if (output := walk(model, grammar, Random(seed))) is not None]
    assert outputs
    for output in outputs:
        content, calls, _ = read(BY_NAME[name], output, schema, guided=True)
        assert (content, [*Draft202012Validator(schema).iter_errors(json.loads(calls[0]))]) == ("", []), output


@pytest.mark.parametrize(
    "wrong",
    [
        {"$ref": "#/$defs/none"},
        {"type": "string", "minLength": 3, "maxLength": 1},
        {"type": "string", "maxLength": -1},
        {"type": []},
    ],
)
def test_a_parameter_that_no_value_satisfies_is_refused_by_its_keyword(model, wrong):
    schema = {"properties": {"a": wrong}, "required": ["a"]}
    text = tool_call_grammar(BY_NAME["qwen3-coder"], [ToolSpec("get", schema)], forced=True, parallel=False)
    with pytest.raises(QuireError, match=r"\$ref|Length|type"):
        model[2].compile(Structured(StructuredKind.GRAMMAR, text))


# Written freely


STRINGS = {"properties": {name: {"type": "string"} for name in ("city", "note")}}


@TAGGED
@settings(FEW, max_examples=25)
@given(st.data())
def test_a_value_ends_where_another_argument_or_the_end_of_the_call_follows(tool_format, data):
    end = tool_format.call.value_marks[0]
    parts = st.lists(st.sampled_from(["a", " ", "\n", "<", end, f"{end}\n", f"{end}x", end[:4], "é"]), max_size=5)
    value = data.draw(parts.map("".join)) + "z"
    arguments = {"city": value, "note": "b"}
    text = written(tool_format, [("get", arguments)])
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    for each in ((), cuts, range(len(text))):
        content, calls, count = read(tool_format, text, STRINGS, guided=False, cuts=each)
        assert (content, count) == ("", 1)
        assert json.loads(calls[0]) == arguments


SECTIONS = ("minimax-m2", "deepseek-v4", "qwen3-coder", "step3", "hunyuan-3", "kimi-k2", "deepseek-v3", "deepseek-v3.1")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_call_is_read_where_the_mark_of_its_section_is_missing(name):
    tool_format, call = BY_NAME[name], ("get", {"city": "Rome", "note": "b"})
    text = f"So:\n\n{written(tool_format, [call]).removeprefix(tool_format.begin)}"
    for cuts in ((), range(len(text))):
        content, calls, count = read(tool_format, text, STRINGS, guided=False, cuts=cuts)
        assert (content, count, json.loads(calls[0])) == ("So:", 1, call[1])
        assert read(tool_format, text, STRINGS, guided=True, cuts=cuts)[2] == 0
    other = text.replace("get", "drop")
    assert read(tool_format, other, STRINGS, guided=False, cuts=range(len(other)))[0] == other


def test_calls_that_share_a_section_where_each_has_its_own_are_calls():
    text = "<tool_call>\n<function=get>\n</function>\n<function=get>\n</function>\n</tool_call>"
    assert read(BY_NAME["qwen3-coder"], text, STRINGS, guided=False)[::2] == ("", 2)


# Cut off


@FORMATS
@pytest.mark.parametrize("before", ["", "So:\n\n"])
def test_a_call_that_is_cut_anywhere_leaves_no_part_of_a_mark_in_the_content(tool_format, before):
    if before and (tool_format.bare or tool_format is HARMONY):
        before = ""
    arguments = {"city": "Rome", "note": "b"}
    calls = [("get", arguments)] * (1 if tool_format is HARMONY else 2)
    text = before + written(tool_format, calls)
    for stop in range(len(before), len(text) + 1):
        whole = read(tool_format, text[:stop], STRINGS, guided=False, cut=True)
        assert whole == read(tool_format, text[:stop], STRINGS, guided=False, cut=True, cuts=range(stop))
        content = whole[0]
        assert before.startswith(content.rstrip()) or _has_no_mark(tool_format, content), (text[:stop], content)


def _has_no_mark(tool_format, content):
    """Whether a call that begins without a mark was cut before it could be told from an answer."""
    return tool_format.bare and not any(mark[:2] in content for mark in marks_of(tool_format))


@FORMATS
def test_a_text_that_ends_by_itself_is_complete(tool_format):
    for text in ("a <", "a <tool", "one [", "proof", "plan A"):
        assert read(tool_format, text, STRINGS, guided=False)[0] == text
    for text in ("proof", "plan A", "a b"):
        assert read(tool_format, text, STRINGS, guided=False, cut=True)[0] == text


@pytest.mark.parametrize("text", ["<think>a</think>b", "a</thi", "<thi", "<think>a</"])
def test_reasoning_that_is_cut_has_no_part_of_a_mark(text):
    parser = ReasoningParser(opened=False)
    pieces = [*parser.push(text), *parser.finish(cut=True)]
    assert all("<" not in piece.text for piece in pieces if isinstance(piece, Content | Reasoning) and text != "a</thi")
