"""The response format in a request: OpenAI's fields and vLLM's, and the one constraint that they mean."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.structured_output import Structured, StructuredKind, choice
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest

from tests.support.scripted_api import MODEL, chat, completion, open_stage, script_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é", 1.0, None]}}, "required": ["b"]}
AS_TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"enum":["é",1.0,null]}},"required":["b"]}'
JSON = Structured(StructuredKind.JSON_SCHEMA, AS_TEXT)
REGEX = Structured(StructuredKind.REGEX, "a+")
GRAMMAR = Structured(StructuredKind.GRAMMAR, 'start: "a"')
CHOICE = choice(["yes", "no"])
ENVELOPE = {"name": "a_b-C9", "schema": SCHEMA}
SAYINGS = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Structured(StructuredKind.JSON_OBJECT)),
    ({"response_format": {"type": "json_schema", "json_schema": ENVELOPE}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": ENVELOPE | {"strict": True}}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": ENVELOPE | {"strict": False}}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": ENVELOPE | {"description": "x"}}}, JSON),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": AS_TEXT}}, JSON),
    ({"structured_outputs": {"json_object": True}}, Structured(StructuredKind.JSON_OBJECT)),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, GRAMMAR),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA, indent=2)}, JSON),
    ({"guided_regex": "a+"}, REGEX),
    ({"guided_choice": ["yes", "no"]}, CHOICE),
    ({"guided_grammar": 'start: "a"'}, GRAMMAR),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, REGEX),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, REGEX),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": True, "structural_tag": None}}, REGEX),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": 'root ::= "a"'}, Structured(StructuredKind.GRAMMAR, 'root ::= "a"')),
]
OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def asked(fields) -> Structured | None:
    request = CompletionRequest.from_json(json.dumps(completion(**fields)).encode())
    assert ChatRequest.from_json(json.dumps(chat(**fields)).encode()).structured == request.structured
    return request.structured


@pytest.mark.parametrize(("fields", "meaning"), SAYINGS, ids=lambda value: str(value)[:60])
def test_every_spelling_of_a_constraint_means_the_same(fields, meaning):
    assert asked(fields) == meaning


NO_FORM = ({"type": "text"}, "xgrammar")
OTHERS = [{"guided_choice": ["x"]}, {"guided_grammar": "x"}, {"structured_outputs": {"regex": "x"}}]
PAIRS = [(first, other) for first, meaning in SAYINGS if meaning for other in OTHERS if not first.keys() & other.keys()]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda value: str(value)[:60])
def test_two_constraints_at_once_are_named_together(first, second):
    with pytest.raises(QuireError, match="exclude each other") as refusal:
        asked(first | second)
    assert all(name in refusal.value.message for name in (*first, *second) if first.get(name) not in NO_FORM)


GUIDED = [(fields, meaning) for fields, meaning in SAYINGS if meaning]
AGAIN = [
    (first, other, meaning)
    for first, meaning in GUIDED
    for other, same in GUIDED
    if meaning == same and not first.keys() & other.keys()
]


@pytest.mark.parametrize(("first", "second", "meaning"), AGAIN, ids=lambda value: str(value)[:60])
def test_one_constraint_may_be_given_in_several_servers_spellings(first, second, meaning):
    assert asked(first | second) == meaning


@given(OBJECTS)
def test_a_schema_keeps_its_order_and_its_values_however_it_is_spaced(schema):
    as_object = asked({"guided_json": schema}).text

    assert as_object == asked({"guided_json": json.dumps(schema, indent=3)}).text
    assert list_of(json.loads(as_object)) == list_of(json.loads(json.dumps(schema)))


def list_of(value):
    """Objects as lists, whose order counts when they are compared."""
    if isinstance(value, dict):
        return [(key, list_of(inner)) for key, inner in value.items()]
    return [list_of(inner) for inner in value] if isinstance(value, list) else (type(value), value)


def test_a_model_of_pydantic_is_a_schema():
    class Answer(BaseModel):
        number: int
        why: list[str]

    schema = json.loads(asked({"guided_json": Answer.model_json_schema()}).text)
    assert schema == Answer.model_json_schema()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"structured_outputs": {"regex": "x" * 65_537}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"x": "y" * 65_536}}}, "structured_outputs.json"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"regex": ""}, "regex"),
        ({"ebnf": ""}, "ebnf"),
        ({"ebnf": "x" * 65_537}, "ebnf"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_field_at_fault_is_named(fields, param):
    with pytest.raises(QuireError) as refusal:
        asked(fields)
    assert refusal.value.param == param


def test_a_text_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(QuireError, match="at most 65536"):
        asked({"guided_json": "{" + " " * 65_536 + "}"})


# The openai client's own helpers


class Sum(BaseModel):
    """What the client wants to read."""

    words: str
    total: int
    parts: list[int]


SUM = Sum(words="three and four é", total=7, parts=[3, 4])
QUESTION = [{"role": "user", "content": "hi"}]


async def test_the_clients_parse_helper_sends_a_schema_and_reads_the_answer():
    async with open_stage(script_of(SUM.model_dump_json())) as stage, stage.openai() as api:
        answer = await api.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Sum, n=2)

    assert [choice.message.parsed for choice in answer.choices] == [SUM, SUM]
    structured = stage.runner.generations[0].params.structured
    assert structured.kind is StructuredKind.JSON_SCHEMA
    assert list(json.loads(structured.text)["properties"]) == ["words", "total", "parts"]


async def test_the_clients_stream_helper_reads_the_same():
    async with (
        open_stage(script_of(SUM.model_dump_json())) as stage,
        stage.openai() as api,
        api.chat.completions.stream(model=MODEL, messages=QUESTION, response_format=Sum) as stream,
    ):
        completed = await stream.get_final_completion()

    assert completed.choices[0].message.parsed == SUM


async def test_a_refused_schema_is_the_clients_bad_request_error():
    refusal = QuireError(ErrorCode.INVALID, "The schema has a form that is not supported.", param="response_format")
    async with open_stage([refusal]) as stage, stage.openai() as api:
        with pytest.raises(openai.BadRequestError, match="form that is not supported") as error:
            await api.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Sum)

    assert error.value.param == "response_format"
