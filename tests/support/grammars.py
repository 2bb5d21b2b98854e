"""Outputs drawn at random among what a grammar allows, and schemas to hold them to."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from quire_engine.core.step import Grammar, GrammarMatcher
from quire_engine.structured_output.llguidance import CompiledGrammar, Guidance, to_llguidance
from quire_proto.structured_output import Structured
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / "demo/model"
VOCAB_SIZE = 1024
EOS = 2
SPECIAL = {0, 1, 2}
MAX_TOKENS = 3000


class NoEndError(AssertionError):
    """Chance did not lead to an end."""


@cache
def guidance() -> Guidance:
    return Guidance.load(MODEL / "tokenizer.json", VOCAB_SIZE, [EOS])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def grammar_of(structured: Structured) -> CompiledGrammar:
    return guidance().compile(to_llguidance(structured))


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def decode(token_ids: Sequence[int]) -> str:
    return tokenizer().decode(token_ids, skip_special_tokens=False)


def allowed(matcher: GrammarMatcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The token ids that may come next."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.fill_bitmask(mask.data)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@cache
def closers() -> frozenset[int]:
    """Tokens that end something in JSON, and those without which a pattern of these schemas cannot end."""
    return frozenset(token_id for mark in '"]}7z' for token_id in encode(mark))


def draw(grammar: Grammar, seed: int, budget: int = 24, max_tokens: int = MAX_TOKENS) -> list[int]:
    """An output of the grammar, without its end: each token any of those allowed. After ``budget`` of them rather one
    that ends something, so that the output ends too. Raises ``NoEndError``.
    """
    random, matcher, output = Random(seed), grammar.new_matcher(), list[int]()
    while len(output) < max_tokens:
        choices = allowed(matcher)
        assert choices, "nothing is allowed, not even the end"
        assert not set(choices) & (SPECIAL - {EOS}), "a special token is allowed"
        if EOS in choices and (len(output) >= budget or random.random() < 0.3):
            return output
        choices = [token_id for token_id in choices if token_id != EOS]
        if not choices:
            return output
        late = len(output) >= budget and random.random() < 0.8
        ending = sorted(closers().intersection(choices)) if late else []
        output.append(random.choice(ending or choices))
        matcher.accept_tokens(output[-1:])
    raise NoEndError(f"no end after {max_tokens} tokens: {decode(output[-50:])!r}")


NAMES = st.sampled_from(
    ["a", "b", "name", "two words", 'quo"te', "ü", "back\\slash", "line\nbreak", "$ref", "😀", "items"]
)
PATTERNS = st.sampled_from(["^[a-z]{1,6}$", "[0-9]{2}", "^(red|green|blue)$", "^a.*z$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$"])
FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"])
SMALL = st.integers(0, 4)
NODE = {"$ref": "#/$defs/node"}
DEFINITIONS = {
    "node": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": NODE, "maxItems": 2}},
        "required": ["value"],
        "additionalProperties": False,
    },
    "short": {"type": "string", "maxLength": 4},
}


def ranges(low: str, high: str) -> st.SearchStrategy[dict[str, Any]]:
    """Neither, one or both of two bounds that leave something between them."""
    return st.tuples(SMALL, SMALL, st.sampled_from([(), (low,), (high,), (low, high)])).map(
        lambda drawn: {name: drawn[0] + (drawn[1] if name == high else 0) for name in (low, high) if name in drawn[2]}
    )


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bound = st.integers(-1000, 1000)
    integer = st.tuples(bound, st.integers(10, 100), st.sampled_from([1, 2, 7])).map(
        lambda drawn: {"type": "integer", "minimum": drawn[0], "maximum": drawn[0] + drawn[1], "multipleOf": drawn[2]}
    )
    number = st.tuples(bound, st.integers(1, 100)).map(
        lambda drawn: {"type": "number", "exclusiveMinimum": drawn[0] / 8, "maximum": drawn[0] / 8 + drawn[1]}
    )
    return (
        integer | number | st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "number", "minimum": 0}])
    )


def leaves() -> st.SearchStrategy[Any]:
    return st.one_of(
        ranges("minLength", "maxLength").map(lambda bounds: {"type": "string", **bounds}),
        PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
        FORMATS.map(lambda name: {"type": "string", "format": name}),
        st.lists(NAMES | st.integers(-5, 5) | st.none() | st.booleans(), min_size=1, unique_by=repr).map(
            lambda values: {"enum": values}
        ),
        NAMES.map(lambda value: {"const": {value: [value]}}),
        numbers(),
        st.sampled_from([{"type": "boolean"}, {"type": ["null", "string"]}, {}, True]),
        st.sampled_from([NODE, {"$ref": "#/$defs/short"}]),
    )


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    plain = st.tuples(items, ranges("minItems", "maxItems")).map(
        lambda drawn: {"type": "array", "items": drawn[0], **drawn[1]}
    )
    fixed = st.lists(items, min_size=1, max_size=3).map(
        lambda each: {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    )
    return plain | fixed


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    further = draw(st.sampled_from([None, False, {"type": "integer"}]))
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if further is not None:
        schema["additionalProperties"] = further
    if len(required) == len(properties):
        schema |= draw(st.sampled_from([{}, {"minProperties": max(1, len(required))}])) if further is not False else {}
    return schema


def unions(options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(options, min_size=1, max_size=3).map(lambda each: {"anyOf": each})


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON Schemas that something satisfies, of what is supported."""
    inner = st.recursive(leaves(), lambda inner: arrays(inner) | objects(inner) | unions(inner), max_leaves=8)
    outer = objects(inner) | arrays(inner) | unions(inner)
    return outer.map(
        lambda schema: {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": DEFINITIONS} | schema
    )
