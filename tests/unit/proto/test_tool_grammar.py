"""Whatever a forced call's grammar lets through is read as calls of the tools that were asked for, by their schemas."""

import json
from pathlib import Path
from random import Random

import jsonschema
import pytest
from quire_engine.structured_output.compiler import ModelGrammars
from quire_proto.structured_output import Structured, StructuredKind
from quire_proto.text.reasoning import ReasoningParser
from quire_proto.text.stream_scanner import Content, Reasoning, ToolCallArguments, ToolCallStart
from quire_proto.text.tool_formats import ToolFormat, new_tool_parser
from quire_proto.text.tool_grammar import ReasoningState, ToolSpec, schema_on_line, tool_call_grammar

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.tool_models import with_marks

SCHEMAS = {
    "get": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "maxLength": 4}},
    },
    "now": {"properties": {}, "additionalProperties": False},
}
TOOLS = [ToolSpec(name, schema) for name, schema in SCHEMAS.items()]
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
VOCABULARY = 400


@pytest.fixture(scope="module", params=["no marks", "added marks", "special marks"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    tokenizer = byte_level() if request.param == "no marks" else with_marks(special=request.param == "special marks")
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    grammars = ModelGrammars(folder, VOCABULARY, [end], num_sandboxes=1)
    yield tokenizer, end, grammars
    grammars.close()


def added(tokenizer):
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content in MARKS]


def compiled(model, **how):
    tokenizer, _, grammars = model
    return grammars.compile(Structured(StructuredKind.GRAMMAR, tool_call_grammar(special=added(tokenizer), **how)))


def walk(model, grammar, random, most=400):
    """A text that the grammar lets through, drawn token by token; its end as soon as it may."""
    tokenizer, end, _ = model
    matcher, token_ids = grammar.new_matcher(), []
    mask = memoryview(bytearray(VOCABULARY // 8))
    for _ in range(most):
        matcher.fill_bitmask(mask)
        allowed = [each for each in range(VOCABULARY) if mask[each // 8] >> (each % 8) & 1]
        if end in allowed and (len(allowed) == 1 or random.random() < 0.5):
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        going_on = [each for each in allowed if each != end]
        closing = [each for each in going_on if (tokenizer.id_to_token(each) or "").startswith(('"', "}", "<", "Ċ"))]
        token = random.choice(closing if closing and random.random() < 0.5 else going_on)
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
    parser = new_tool_parser(tool_format, SCHEMAS, exact=True)
    calls = []
    for piece in [*parser.push(text), *parser.finish()]:
        assert not isinstance(piece, Content), text
        if isinstance(piece, ToolCallStart):
            calls.append([piece.name, ""])
        elif isinstance(piece, ToolCallArguments):
            calls[-1][1] += piece.text
    return calls


@pytest.mark.parametrize("tool_format", list(ToolFormat))
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_calls_by_their_schemas(model, tool_format, parallel):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=True, parallel=parallel)
    counts = set()
    for seed in range(12):
        text = walk(model, grammar, Random(seed))
        if text is None:
            continue
        calls = read_calls(tool_format, text)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        counts.add(len(calls))
    assert counts == {1} if not parallel else 1 in counts and max(counts) > 1


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_a_forced_call(model, opened):
    how = {"tool_format": ToolFormat.HERMES, "tools": TOOLS, "forced": True, "parallel": False}
    grammar = compiled(model, **how, thinking=ReasoningState(marked=True, opened=opened))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{'' if opened else '<think>'}hello {{}}\n</think>\n\n{call}"
    assert accepts(model, grammar, text)
    assert accepts(model, grammar, call) is not opened
    parser = ReasoningParser(opened=opened)
    assert [*parser.push(text), *parser.finish()] == [Reasoning("hello {}"), Content(call)]


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_free_text_too(model, opened):
    how = {"tool_format": ToolFormat.HERMES, "tools": TOOLS, "forced": False, "parallel": False}
    grammar = compiled(model, **how, thinking=ReasoningState(marked=True, opened=opened))
    for text in ("hello world", "hello " + hermes(call("{}", name="now"))):
        assert accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{text}")
    assert accepts(model, grammar, "hello world") is not opened
    assert not accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{hermes('hello')}")


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
    grammar = compiled(model, tool_format=ToolFormat.HERMES, tools=TOOLS, forced=False, parallel=parallel)
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
    grammar = compiled(model, tool_format=ToolFormat.LLAMA3, tools=TOOLS, forced=False, parallel=True)
    assert accepts(model, grammar, text) is let_through


REPLY = {
    "type": "object",
    "properties": {"name": {"enum": ["get", "x"]}, "mood": {"type": "string", "maxLength": 5}},
    "required": ["mood"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_precede_a_reply_as_it_may_a_call(model, opened):
    how = {"tool_format": ToolFormat.HERMES, "tools": TOOLS, "forced": False, "parallel": True, "reply": REPLY}
    grammar = compiled(model, **how, thinking=ReasoningState(marked=True, opened=opened))
    reply = '{"mood":"good"}'
    for answer in (reply, hermes(call("{}", name="now"))):
        assert accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\n{answer}")
        assert accepts(model, grammar, answer) is not opened
    assert not accepts(model, grammar, f"{'' if opened else '<think>'}hello\n</think>\n\nhello")


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_an_answer_with_a_schema_is_calls_or_json_of_that_schema(model, tool_format):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=False, parallel=True, reply=REPLY)
    seen = set()
    for seed in range(60):
        text = walk(model, grammar, Random(seed))
        if text is None:
            continue
        parser = new_tool_parser(tool_format, SCHEMAS, exact=True)
        pieces = [*parser.push(text), *parser.finish()]
        kinds = {type(piece) for piece in pieces}
        seen |= kinds
        assert kinds in ({ToolCallStart, ToolCallArguments}, {Content}), text
        if kinds == {Content}:
            content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            jsonschema.validate(json.loads(content), REPLY)
        else:
            names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
            arguments = [piece.text for piece in pieces if isinstance(piece, ToolCallArguments)]
            for name, each in zip(names, arguments, strict=True):
                jsonschema.validate(json.loads(each), SCHEMAS[name])
    assert seen == {ToolCallStart, ToolCallArguments, Content}


@pytest.mark.parametrize("text", ["hello", "{}", '{"mood":"good"} and more', '{"mood":"toolong"}', ""])
@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_an_answer_with_a_schema_is_nothing_else(model, tool_format, text):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=False, parallel=True, reply=REPLY)
    assert not accepts(model, grammar, text)
    assert accepts(model, grammar, '{"mood":"good"}')


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_reply_that_has_a_tools_name_is_no_call(cut):
    text = '{"name":"get","mood":"good"}'
    parser = new_tool_parser(ToolFormat.LLAMA3, SCHEMAS, exact=True)
    pieces = [piece for at in range(0, len(text), cut) for piece in parser.push(text[at : at + cut])]
    pieces += parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_a_forced_call_allows_no_reply(model, tool_format):
    grammar = compiled(model, tool_format=tool_format, tools=TOOLS, forced=True, parallel=True, reply=REPLY)
    assert not accepts(model, grammar, '{"mood":"good"}')


def test_the_rules_of_a_grammar_name_the_tool_of_their_schema():
    for tool_format in ToolFormat:
        grammar = tool_call_grammar(tool_format, TOOLS, forced=False, parallel=True, reply=REPLY)
        lines = range(grammar.count("\n") + 3)
        found = dict(each for each in (schema_on_line(grammar, line) for line in lines) if each is not None)
        assert set(found) == {None, *SCHEMAS}
        assert found[None]["required"] == REPLY["required"]
        assert found["get"]["required"] == SCHEMAS["get"]["required"]
