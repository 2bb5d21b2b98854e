"""Whatever a forced call's grammar lets through is read as calls of the tools that were asked for, by their schemas."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from quire_engine.structured_output.compiler import ModelGrammars
from quire_proto.structured_output import MAX_TEXT, Structured, StructuredKind, choice
from quire_proto.text import tool_grammar
from quire_proto.text.harmony import MARKS as HARMONY_MARKS
from quire_proto.text.harmony import HarmonyParser
from quire_proto.text.reasoning import REASONING_FORMATS, THINK, ReasoningParser
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tool_arguments import parameter_types
from quire_proto.text.tool_formats import HARMONY, HERMES, LLAMA3, TOOL_FORMATS, JsonCall, NamedCall
from quire_proto.text.tool_grammar import (
    FINAL,
    GrammarTooLargeError,
    ReasoningState,
    ToolSpec,
    UnsupportedSchemaError,
    answer_grammar,
    schema_on_line,
    tool_call_grammar,
)
from quire_proto.text.tool_parser import new_tool_parser

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.tool_models import marks_of, with_marks, written

SCHEMAS = {
    "get": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": "string"},
            "mood": {"enum": ["good", "bad"]},
            "code": {"type": "string", "pattern": "^[ab]{1,3}$"},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "short": {"type": "string", "minLength": 1, "maxLength": 4},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "maxLength": 4}},
    },
    "now": {"properties": {}, "additionalProperties": False},
}
VALIDATORS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
TOOLS = [ToolSpec(name, schema) for name, schema in SCHEMAS.items()]
TYPES = {name: parameter_types(schema) for name, schema in SCHEMAS.items()}
THINK_MARKS = ("<think>", "</think>")
FORMATS = pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=[each.name for each in TOOL_FORMATS])
BY_NAME = {each.name: each for each in TOOL_FORMATS}
VOCABULARY = 512


@pytest.fixture(
    scope="module", params=["no marks", pytest.param("added marks", marks=pytest.mark.soak), "special marks"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    tokenizer = byte_level() if request.param == "no marks" else with_marks(special=request.param == "special marks")
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    grammars = ModelGrammars(folder, VOCABULARY, [end], num_sandboxes=1)
    yield tokenizer, end, grammars
    grammars.close()


def tokens(tokenizer, *marks):
    """Those of the marks that are tokens, and their ids."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if token.content in marks}


def compiled(model, **how):
    tokenizer, _, grammars = model
    marks = (*marks_of(how["tool_format"]), *THINK_MARKS, *HARMONY_MARKS)
    text = tool_call_grammar(tokens=tokens(tokenizer, *marks), **how)
    return grammars.compile(Structured(StructuredKind.GRAMMAR, text))


def walk(model, grammar, random, most=400):
    """A text that the grammar lets through, drawn token by token; its end as soon as it may."""
    tokenizer, end, _ = model
    matcher, token_ids = grammar.new_matcher(), []
    mask = bytearray(VOCABULARY // 8)
    bits = np.frombuffer(mask, np.uint8)
    for _ in range(most):
        matcher.fill_bitmask(memoryview(mask))
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if end in allowed and (len(allowed) == 1 or random.random() < 0.5):
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        going_on = [each for each in allowed if each != end]
        closing = [
            each for each in going_on if (tokenizer.id_to_token(each) or "").startswith(('"', "}", "<", "Ċ", ")", "]"))
        ]
        token = random.choice(closing if closing and random.random() < 0.6 else going_on)
        matcher.accept_tokens([token])
        token_ids.append(token)
    return None


def accepts(model, grammar, text):
    """Whether the grammar lets a text through as the tokenizer writes it."""
    tokenizer, end, _ = model
    matcher = grammar.new_matcher()
    mask = memoryview(bytearray(VOCABULARY // 8))
    for token in [*tokenizer.encode(text, add_special_tokens=False).ids, end]:
        matcher.fill_bitmask(mask)
        if not mask[token // 8] >> (token % 8) & 1:
            return False
        matcher.accept_tokens([token])
    return True


def read_calls(tool_format, text):
    """The calls in a text that must have nothing else."""
    parser = new_tool_parser(tool_format, SCHEMAS, TYPES, guided=True)
    calls = []
    for piece in [*parser.push(text), *parser.finish()]:
        assert not isinstance(piece, Content), text
        if isinstance(piece, ToolCallStart):
            calls.append([piece.name, ""])
        elif isinstance(piece, ToolCallArguments):
            calls[-1][1] += piece.text
    return calls


@FORMATS
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_calls_by_their_schemas(model, tool_format, parallel):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=True, parallel=parallel)
    counts = set()
    for seed in range(3):
        text = walk(model, grammar, Random(seed))
        if text is None:
            continue
        calls = read_calls(tool_format, text)
        for name, arguments in calls:
            VALIDATORS[name].validate(json.loads(arguments))
        counts.add(len(calls))
    assert counts == {1} if not parallel else counts


@FORMATS
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_as_models_write_them_are_allowed(model, tool_format, parallel):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=True, parallel=parallel)
    one, two = ("get", {"city": "Rome", "days": 3, "note": "5 < 6", "mood": "good", "short": "no"}), ("now", {})
    assert accepts(model, grammar, allowed(tool_format, [one]))
    assert accepts(model, grammar, allowed(tool_format, [two]))
    assert accepts(model, grammar, allowed(tool_format, [one, two])) is (parallel and tool_format is not HARMONY)
    for wrong in ({"days": 3}, {"city": "Rome", "days": 30}, {"city": "Rome", "mood": "so so"}, {"city": "a", "x": 1}):
        assert not accepts(model, grammar, allowed(tool_format, [("get", wrong)])), wrong


def allowed(tool_format, calls):
    """Calls as a grammar wants them: the first one at the beginning of the output, the last one ended by the end."""
    text = written(tool_format, calls)
    text = text.removeprefix(tool_format.begin) if tool_format.bare else text
    return text.removesuffix("<|call|>") if tool_format is HARMONY else text


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_a_forced_call(model, opened):
    how = {"tool_format": HERMES, "tools": TOOLS, "forced": True, "parallel": False}
    grammar = compiled(model, **how, thinking=ReasoningState(THINK, opened=opened))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{'' if opened else '<think>'}hello {{}}\n</think>\n\n{call}"
    assert accepts(model, grammar, text)
    assert accepts(model, grammar, call) is not opened
    parser = ReasoningParser(opened=opened)
    assert [*parser.push(text), *parser.finish()] == [Reasoning("hello {}"), Content(call)]


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_free_text_too(model, opened):
    how = {"tool_format": HERMES, "tools": TOOLS, "forced": False, "parallel": False}
    grammar = compiled(model, **how, thinking=ReasoningState(THINK, opened=opened))
    for text in ("hello world", "hello " + hermes(call("{}", name="now"))):
        assert accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{text}")
    assert accepts(model, grammar, "hello world") is not opened
    assert not accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{hermes('hello')}")


ANSWERS = {
    "schema": (Structured(StructuredKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, '
     '"required": ["a"], "additionalProperties": false}'), '{"a":5}', '{"a":"x"}'),
    "object": (Structured(StructuredKind.JSON_OBJECT), '{"a":[]}', "[]"),
    "regex": (Structured(StructuredKind.REGEX, "a/[bc]+"), "a/bcb", "a/d"),
    "choice": (choice(["yes", "no\\n"]), "no\\n", "maybe"),
}  # fmt: skip


@pytest.mark.parametrize("marks", REASONING_FORMATS, ids=[each.begin for each in REASONING_FORMATS])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_an_answer_of_a_form(model, marks, name, opened):
    if marks.is_harmony and (opened or name == "regex"):
        pytest.skip("no prompt of Harmony ends in reasoning; and here its end of a message is that of the output too")
    tokenizer, _, grammars = model
    structured, right, wrong = ANSWERS[name]
    known = tokens(tokenizer, marks.begin, marks.end, *(HARMONY_MARKS if marks.is_harmony else ()))
    text = answer_grammar(structured, ReasoningState(marks, opened=opened), tokens=known)
    grammar = grammars.compile(Structured(StructuredKind.GRAMMAR, text))
    header = FINAL if marks.is_harmony else ""
    begin, gap = "" if opened else marks.begin, marks.after or "\n\n"
    thought = f"{begin}Is it {wrong}?{marks.end}{gap}"
    assert accepts(model, grammar, f"{thought}{header}{right}")
    assert not accepts(model, grammar, f"{thought}{header}{wrong}")
    assert accepts(model, grammar, header + right) is not opened
    parser = HarmonyParser(()) if marks.is_harmony else ReasoningParser(marks, opened=opened)
    output = f"{thought}{header}{right}"
    pieces = merge_adjacent([*parser.push(output), *parser.finish()])
    assert pieces == [Reasoning(f"Is it {wrong}?"), Content(right)]


def test_what_a_model_does_not_reason_about_has_its_own_grammar():
    own = Structured(StructuredKind.GRAMMAR, 'start: "a"')
    assert answer_grammar(own, ReasoningState(THINK)) is None
    assert answer_grammar(Structured(StructuredKind.JSON_OBJECT), ReasoningState()) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf is not supported"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties is not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"required": ["a"]}]}}}, "oneOf is not supported"),
        ({"properties": {'a"b': {}}, "required": []}, "the name"),
    ],
)  # fmt: skip
def test_a_schema_that_tags_cannot_be_held_to_is_refused_with_its_tool(schema, words):
    with pytest.raises(UnsupportedSchemaError, match=words) as caught:
        tool_call_grammar(BY_NAME["qwen3-coder"], [ToolSpec("get", schema)], forced=True, parallel=True)
    assert caught.value.tool == "get"


def test_definitions_that_many_parameters_refer_to_are_not_repeated_without_end(monkeypatch):
    definitions = {"n": {"type": "integer"}, "large": {"enum": ["x" * 1000]}}
    schema = {
        "properties": {f"p{i}": {"items": {"$ref": "#/$defs/n"}, "type": "array"} for i in range(200)},
        "$defs": definitions,
    }
    written = []
    write = tool_grammar._schema
    monkeypatch.setattr(
        tool_grammar, "_schema", lambda schema, marks: written.append(write(schema, marks)) or written[-1]
    )
    with pytest.raises(GrammarTooLargeError):
        tool_call_grammar(BY_NAME["qwen3-coder"], [ToolSpec("get", schema)], forced=True, parallel=True)
    assert sum(map(len, written)) < 2 * MAX_TEXT


def call(arguments, key="arguments", name="get"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*bodies):
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize(
    ("text", "parallel", "let_through"),
    [
        ("hello world", True, True),
        ("", True, True),
        ("hello " + hermes(call('{"city": "x"}')), True, True),
        (hermes(call('{"city": "x"}'), call("{}", name="now")), True, True),
        ("hello " + hermes(call('{"city": 5}')), True, False),
        ("hello " + hermes(call('{"city": "x"}')), False, True),
        (hermes(call('{"city": "x"}'), call("{}", name="now")), False, False),
        ("hello <tool_call> world", False, False),
    ],
)
def test_strict_tools_leave_text_free_and_constrain_calls(model, text, parallel, let_through):
    grammar = compiled(model, tool_format=HERMES, tools=TOOLS, forced=False, parallel=parallel)
    assert accepts(model, grammar, text) is let_through


@pytest.mark.parametrize(
    ("text", "let_through"),
    [
        ("hello {", True),
        ("", True),
        (call('{"city": "x"}', "parameters"), True),
        (call('{"city": 5}', "parameters"), False),
        (f"{call('{}', 'parameters', 'now')}; {call('{}', 'parameters', 'now')}", True),
        ("{}", False),
    ],
)
def test_strict_tools_of_llama_too(model, text, let_through):
    grammar = compiled(model, tool_format=LLAMA3, tools=TOOLS, forced=False, parallel=True)
    assert accepts(model, grammar, text) is let_through


REPLY = {
    "type": "object",
    "properties": {"name": {"enum": ["get", "x"]}, "mood": {"type": "string", "maxLength": 5}},
    "required": ["mood"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_a_reply_as_it_may_a_call(model, opened):
    how = {"tool_format": HERMES, "tools": TOOLS, "forced": False, "parallel": True, "reply": REPLY}
    grammar = compiled(model, **how, thinking=ReasoningState(THINK, opened=opened))
    reply = '{"mood":"good"}'
    for answer in (reply, hermes(call("{}", name="now"))):
        assert accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{answer}")
        assert accepts(model, grammar, answer) is not opened
    assert not accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\nhello")


@FORMATS
def test_an_answer_with_a_schema_is_calls_or_json_of_that_schema(model, tool_format):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=False, parallel=True, reply=REPLY)
    seen = set()
    for seed in range(60):
        text = walk(model, grammar, Random(seed)) if len(seen) < 3 or seed < 6 else None
        if text is None:
            continue
        parser = new_tool_parser(tool_format, SCHEMAS, TYPES, guided=True)
        pieces = [*parser.push(text), *parser.finish()]
        kinds = {type(piece) for piece in pieces}
        seen |= kinds
        assert kinds in ({ToolCallStart, ToolCallArguments}, {Content}), text
        if kinds == {Content}:
            content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            Draft202012Validator(REPLY).validate(json.loads(content))
        else:
            names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
            arguments = [piece.text for piece in pieces if isinstance(piece, ToolCallArguments)]
            for name, each in zip(names, arguments, strict=True):
                VALIDATORS[name].validate(json.loads(each))
    assert seen == {ToolCallStart, ToolCallArguments, Content}


@FORMATS
def test_an_answer_with_a_schema_is_nothing_else(model, tool_format):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=False, parallel=True, reply=REPLY)
    header = FINAL if tool_format is HARMONY else tool_format.preface
    for text in ("hello", "{}", '{"mood":"good"} and more', '{"mood":"toolong"}', ""):
        assert not accepts(model, grammar, header + text), text
    assert accepts(model, grammar, header + '{"mood":"good"}')


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_reply_that_has_a_tools_name_is_no_call(cut):
    text = '{"name":"get","mood":"good"}'
    parser = new_tool_parser(LLAMA3, SCHEMAS, guided=True)
    pieces = [piece for at in range(0, len(text), cut) for piece in parser.push(text[at : at + cut])]
    pieces += parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text


@FORMATS
def test_a_forced_call_allows_no_reply(model, tool_format):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=True, parallel=True, reply=REPLY)
    assert not accepts(model, grammar, '{"mood":"good"}')


def test_the_rules_of_a_grammar_name_the_tool_of_their_schema():
    for tool_format in TOOL_FORMATS:
        grammar = tool_call_grammar(tool_format, TOOLS, forced=False, parallel=True, reply=REPLY)
        lines = range(grammar.count("\n") + 3)
        found = dict(each for each in (schema_on_line(grammar, line) for line in lines) if each is not None)
        assert {None, "get"} <= set(found) <= {None, *SCHEMAS}
        assert found[None]["required"] == REPLY["required"]
        if isinstance(tool_format.call, (JsonCall, NamedCall)):
            assert found["get"]["required"] == SCHEMAS["get"]["required"]
