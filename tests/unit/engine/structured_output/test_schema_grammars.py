"""A grammar accepts what its schema accepts: what is drawn is valid, nothing gets stuck, and the rest is refused."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from quire_engine.core.step import GrammarError
from quire_engine.structured_output.llguidance import CompiledGrammar, RejectedError
from quire_proto.structured_output import Structured, StructuredKind

from tests.support.grammars import EOS, NoEndError, allowed, encode, grammar_of
from tests.support.schemas import any_schemas, as_text, keywords, walk

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))


def compiled(schema: Any) -> CompiledGrammar:
    return grammar_of(Structured(StructuredKind.JSON_SCHEMA, as_text(schema)))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.new_matcher()
    try:
        matcher.accept_tokens(encode(text))
    except GrammarError:
        return False
    return EOS in allowed(matcher)


def check(schema: dict[str, Any], seed: int) -> None:
    """Draws some answers under a schema, which is refused by the name of a keyword or holds for all of them."""
    grammar, reason = None, ""
    try:
        grammar = compiled(schema)
    except RejectedError as refused:
        reason = str(refused)
    if grammar is None:
        assert any(name and name in reason for name in keywords(schema)), reason
        return
    validator = Draft202012Validator(schema)
    for number in range(2):
        try:
            text = walk(grammar, Random(seed + number))
        except NoEndError:
            continue
        errors = [each for each in validator.iter_errors(json.loads(text)) if not _is_rounded(each)]
        assert not errors, (text, errors[0].message)


def _is_rounded(error: Any) -> bool:
    """Whether the validator divides doubles: 0.3 is a multiple of 0.1, but not for it."""
    return error.validator == "multipleOf" and isinstance(error.validator_value, float)


@given(any_schemas(max_leaves=5), st.integers(0, 2**32))
@settings(SLOW, max_examples=120)
def test_answers_under_a_random_schema_are_valid_or_the_schema_is_refused_by_its_keyword(
    schema: dict[str, Any], seed: int
) -> None:
    check(schema, seed)


@pytest.mark.soak
@given(any_schemas(max_leaves=12), st.integers(0, 2**32))
@settings(SLOW, max_examples=10_000)
def test_so_are_those_under_many_more(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
CLOSED = {"type": "object", "additionalProperties": False}


def tagged(kind: str) -> dict[str, Any]:
    """What pydantic writes for a class whose tag has a default."""
    return {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, "x": {"type": "integer"}}}


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"], **CLOSED}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"enum": [1234567890123456789]}, ["1234567890123456789"], ["1234567890123456768"]),
        ({"const": 2**64 - 1}, ["18446744073709551615"], ["18446744073709552000"]),
        ({"const": -(2**63)}, ["-9223372036854775808"], ["-9223372036854775807"]),
        ({"const": 1e22}, ["1e+22"], ["1"]),
        (INT64, ["-9223372036854775808", "9223372036854775807", "0"], ["9223372036854775808", "-9223372036854775809"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["18446744073709551615"],
         ["18446744073709551616", "-1"]),
        ({"type": "number", "minimum": 0, "maximum": 1e20}, ["0.5", "100000000000000000000"],
         ["-1", "100000000000000000001"]),
        ({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}, ["1.5", "0"], ["4e99"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.06", "1", "1.0"], ["0", "0.0", "1.1"]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, ["1.5", "1.01"], ["1", "1.0", "2", "2.0"]),
        ({"type": "number", "minimum": 0.25, "maximum": 0.75}, ["0.25", "0.250", "0.7"], ["0.24", "0.76", "0"]),
        ({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740999}, ["9007199254740995"],
         ["9007199254741000"]),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}, ["2", "3"], ["1"]),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0}, ["0.05", "3"], ["0.005", "-1"]),
        ({**CLOSED, "properties": {"a": {}, "b": {}}, "patternProperties": {"^(a|b)$": {}}},
         ["{}", '{"a":1,"b":2}'], ['{"c":1}']),
        ({**CLOSED, "properties": {"s": {}}, "patternProperties": {"^s$": {"type": "null"}}}, ['{"s":null}'],
         ['{"s":1}']),
        ({"patternProperties": {"^x": {"type": "integer"}}}, ['{"x":1}', '{"y":"z"}'],
         ['{"x":"a"}', '{"\\u0078":"a"}']),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"b":"x"}'], ['{"a":"x"}', '{"\\u0061":"x"}']),
        ({"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}}, ['{"a":1,"c":2}'], ['{"a":1}']),
        ({"enum": ['say "hi"', "a</b>\\", "é😀\n"]}, ['"say \\"hi\\""', '"a</b>\\\\"', '"é😀\\n"'], ['"é"']),
        ({"type": "string", "minLength": 2, "maxLength": 2}, ['"é😀"', '"\\n\\""'], ['"é"', '"abc"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "date", "pattern": r"^(\d\d[2468][048]-02-29|\d{4}-01-[12]\d)$"},
         ['"2024-02-29"', '"2023-01-15"'], ['"2023-02-29"', '"2024-03-01"']),
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "[0-9]$"}]}, ['"ab1"'], ['"ab"', '"b1"']),
        (TREE, ['{"v":1,"next":{"v":2}}'], ['{"next":{}}']),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "null"}}}, ["null"], ["1"]),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 1}}}, ["1"], ["2"]),
        ({"$id": "https://a.b/c", "$ref": "d", "$defs": {"a": {"$id": "https://a.b/d", "const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}, ['"a"'], ['"ab"', "1"]),
        ({"allOf": [{"minimum": 2}, {"type": "integer"}], "maximum": 3}, ["2", "3"], ["1", "4", "2.5"]),
        ({"type": "object", "properties": {"a": {"const": 1}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a":1}', '{"b":2}'], ["{}"]),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":2}'],
         ["{}", '{"a":1,"b":2}', '{"b":2,"a":1}']),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}, ['"a"', "1"], ["null"]),
        ({"oneOf": [tagged("cat"), tagged("dog")]}, ['{"kind":"cat"}', '{"kind":"dog","x":1}'], ["{}", '{"x":1}']),
        ({"oneOf": [{**CLOSED, "properties": {"a": {}}}, {**CLOSED, "properties": {"b": {}}}]},
         ['{"a":1}', '{"b":null}'], ["{}", '{"a":1,"b":1}']),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}, TREE]},
         ["3", "4", '{"v":1}'], ["3.5"]),
    ],
    ids=lambda each: json.dumps(each)[:70] if isinstance(each, dict) else "",
)  # fmt: skip
def test_a_schema_means_what_the_standard_says(schema: Any, texts: list[str], others: list[str]) -> None:
    grammar = compiled(schema)
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, r"\$ref leads back to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself without an end"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
            "required names 'b', which no value may have here",
        ),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "multipleOf leave no number"),
        ({"type": "string", "pattern": "^(aa)+$", "minLength": 3, "maxLength": 3}, "pattern matches no text"),
        ({"type": "string", "enum": ["a"], "maxLength": 0}, "enum has no value"),
        ({"items": {"type": "string", "pattern": "a(?!b)"}}, "items.pattern cannot be used: look-around"),
        ({"const": 1e400}, "too large"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf has options 1 and 2 that hold for the same"),
        ({"items": {"oneOf": [{}, {"const": 1}, {"type": "null"}]}}, "items.oneOf has options 1 and 2"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems is below minItems"),
        ({"type": "integer", "minimum": "1"}, "minimum must be a number"),
        ({"required": "a"}, "required must be a list"),
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused_by_its_keyword(schema: Any, words: str) -> None:
    text = as_text(schema).replace("Infinity", "1e400")
    with pytest.raises(RejectedError, match=words):
        grammar_of(Structured(StructuredKind.JSON_SCHEMA, text))


def test_a_number_has_an_end() -> None:
    """A small model would write zeros for ever."""
    grammar = compiled({"type": "number"})
    assert not accepts(grammar, "0." + "0" * 40)
    assert accepts(grammar, "0.30000000000000004")
