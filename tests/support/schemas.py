"""Random JSON Schemas with all keywords, as people and generators write them, and answers that grammars let through."""

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st
from quire_engine.core.step import Grammar

from tests.support.grammars import EOS, NoEndError, allowed, closers, tokenizer

NAMES = [
    "a", "b", "x1", "x-y", "two words", 'quo"te', "ü", "back\\slash", "line\nbreak", "$ref", "😀", "", "</p>", "\u2028",
    "\x01",
]  # fmt: skip
TEXTS = [*NAMES, "</parameter>", "<|end|>", "é" * 3, "a" * 20, "\\u0041", "null", "1", " ", "\t"]
PATTERNS = [
    "^[a-z]{1,6}$", "[0-9]{2}", "^(red|green|blue)$", "^a.*z$", "^x", "^(a|b)$", "^x-", "", ".*", r"^\d+(\.\d+)?$",
    r"^[^\"\\]*$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "a|b$", "^(?:a|ü)+$", r"^\S+$", r"^[\w.-]{1,5}$", "^.{2,4}$", "^$",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 7, 0.5, -0.1, 1e-7, 0.1, 1e20, 1e22, -1e20, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63),
    2**63, 2**64 - 1, 2**64, 10**30, 3.4028234663852886e38, -3.4028234663852886e38, 1.7976931348623157e308, 1.0, 100,
    1234567890123456789, 9007199254740993, 0.30000000000000004, 12.75, 99.999,
]  # fmt: skip
FORMATS = [
    "date",
    "time",
    "date-time",
    "uuid",
    "ipv4",
    "ipv6",
    "email",
    "hostname",
    "duration",
    "uri",
    "int64",
    "uuid4",
]
ANNOTATIONS = [
    {},
    {},
    {"title": "T"},
    {"description": 'say "</p>"', "default": None},
    {"nullable": False},
    {"examples": [1]},
]
REFUSED = [
    {"not": {"type": "null"}}, {"uniqueItems": True, "type": "array"}, {"contains": {"type": "null"}, "type": "array"},
    {"if": {"type": "string"}, "then": {"minLength": 1}}, {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False}, {"propertyNames": {"anyOf": [{"pattern": "a"}, {"pattern": "b"}]}},
    {"minProperties": 5},
    {"type": "string", "pattern": "(?=a)b"}, {"$ref": "#/$defs/none"}, {"multipleOf": 999999937},
]  # fmt: skip
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value"],
    "additionalProperties": False,
}
DEFINITIONS: dict[str, Any] = {
    "node": NODE,
    "short": {"type": "string", "maxLength": 4},
    "a/b~c d": {"$anchor": "anchored", "type": ["integer", "null"], "minimum": 3},
    "named": {"$id": "https://example.com/named.json", "enum": ["x", 1, None]},
    "list": {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#/$defs/list"}}, "required": ["next"]}]},
}
REFERENCES = [
    *("#/$defs/node", "#/$defs/short", "#/$defs/a~1b~0c%20d", "#anchored", "#/$defs/list"),
    "https://example.com/named.json",
]
PROPERTY_NAMES = [{"enum": ["a", "b", "x1"]}, {"pattern": "^[a-z]"}, {"minLength": 1}, {"type": "string"}]


def values() -> st.SearchStrategy[Any]:
    scalars = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
        max_leaves=3,
    )


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number", ["number", "null"]]))}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw(st.integers(0, 2)) == 0:
            schema[keyword] = draw(st.sampled_from(NUMBERS) | st.integers(-200, 200) | st.integers(-(2**70), 2**70))
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 5, 7, 10, 100, 3, 0.5, 0.25]))
    return schema


@st.composite
def texts(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for keyword, options in (("pattern", PATTERNS), ("format", FORMATS)):
        if draw(st.integers(0, 2)) == 0:
            schema[keyword] = draw(st.sampled_from(options))
    for keyword, most in (("minLength", 4), ("maxLength", 9)):
        if draw(st.integers(0, 2)) == 0:
            schema[keyword] = draw(st.integers(0, most))
    return schema


def leaves() -> st.SearchStrategy[Any]:
    return st.one_of(
        numbers(),
        texts(),
        st.lists(values(), min_size=1, max_size=4).map(lambda each: {"enum": each}),
        values().map(lambda value: {"const": value}),
        st.sampled_from([{"type": "boolean"}, {"type": ["null", "string"]}, {}, True, False, {"type": "null"}]),
        st.sampled_from(REFERENCES).map(lambda name: {"$ref": name}),
    )


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(items, min_size=1, max_size=3))
    if draw(st.integers(0, 3)):
        schema["items"] = draw(items)
    for keyword, most in (("minItems", 3), ("maxItems", 4)):
        if draw(st.integers(0, 2)) == 0:
            schema[keyword] = draw(st.integers(0, most))
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = st.sampled_from(NAMES)
    schema: dict[str, Any] = {"type": "object", "properties": draw(st.dictionaries(names, inner, max_size=4))}
    if draw(st.booleans()):
        known = sorted(schema["properties"]) or ["a"]
        schema["required"] = draw(st.lists(st.sampled_from([*known, "other"]), unique=True, max_size=3))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | inner)
    if draw(st.integers(0, 2)) == 0:
        patterns = [each for each in PATTERNS if each]  # jsonschema takes an empty one for none: it fits every name
        schema["patternProperties"] = draw(st.dictionaries(st.sampled_from(patterns), inner, max_size=2))
    for keyword, most in (("minProperties", 3), ("maxProperties", 4)):
        if draw(st.integers(0, 4)) == 0:
            schema[keyword] = draw(st.integers(0, most))
    if draw(st.integers(0, 4)) == 0:
        schema["propertyNames"] = draw(
            st.sampled_from([{"enum": ["a", "b", "x1"]}, {"pattern": "^[a-z]"}, {"minLength": 1}])
        )
    return schema


@st.composite
def combined(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema = dict(draw(inner.filter(lambda each: isinstance(each, dict))))
    keyword = draw(st.sampled_from(["anyOf", "allOf", "oneOf"]))
    schema[keyword] = draw(st.lists(inner, min_size=1, max_size=3))
    return schema


def any_schemas(max_leaves: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas with any keywords, most of which something satisfies; some have a keyword that is refused."""

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keyword = st.sampled_from(["anyOf", "oneOf"])
        options = st.tuples(keyword, st.lists(inner, min_size=1, max_size=3)).map(lambda each: {each[0]: each[1]})
        annotated = st.tuples(inner.filter(lambda each: isinstance(each, dict)), st.sampled_from(ANNOTATIONS))
        return (
            arrays(inner)
            | objects(inner)
            | objects(inner)
            | options
            | combined(inner)
            | annotated.map(lambda two: two[1] | two[0])
        )

    refused = st.sampled_from(REFUSED)
    leaf = st.integers(0, 40).flatmap(lambda chance: refused if chance == 0 else leaves())
    schema = st.recursive(leaf, grown, max_leaves=max_leaves).filter(lambda each: isinstance(each, dict))
    return schema.map(lambda each: {"$defs": DEFINITIONS} | each)


def keywords(schema: Any) -> Iterator[str]:
    """All names within a schema."""
    if isinstance(schema, dict):
        for name, each in schema.items():
            yield name
            yield from keywords(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from keywords(each)


def walk(grammar: Grammar, random: Random, budget: int = 30, most: int = 1500) -> str:
    """A text that the grammar lets through. Choices are made by the first character, so that a rare one is as likely as
    a letter; after ``budget`` tokens rather by what ends something. Raises ``NoEndError`` if it comes to no end.
    """
    matcher, output = grammar.new_matcher(), list[int]()
    while len(output) < most:
        choices = allowed(matcher)
        assert choices, f"nothing can follow {_decoded(output)!r}"
        if EOS in choices and (choices == [EOS] or random.random() < 0.5):
            return _decoded(output)
        choices = [token for token in choices if token != EOS]
        late = len(output) >= budget and random.random() < 0.8
        ending = sorted(closers().intersection(choices)) if late else []
        output.append(random.choice(ending or _like(choices, random)))
        matcher.accept_tokens(output[-1:])
    raise NoEndError(f"no end after {most} tokens: {_decoded(output[-60:])!r}")


def _like(choices: Sequence[int], random: Random) -> list[int]:
    firsts = [(tokenizer().id_to_token(token) or " ")[0] for token in choices]
    chosen = random.choice(sorted(set(firsts)))
    return [token for token, first in zip(choices, firsts, strict=True) if first == chosen]


def _decoded(output: Sequence[int]) -> str:
    return tokenizer().decode(output, skip_special_tokens=False)


def as_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
