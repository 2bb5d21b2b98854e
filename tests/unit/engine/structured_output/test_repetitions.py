"""A grammar whose counts make it too large is refused before it is tried, and counts that cost nothing are free."""

import json
from collections.abc import Callable
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.structured_output.json_grammar import MAX_RULES
from quire_engine.structured_output.json_patterns import parse_pattern
from quire_engine.structured_output.llguidance import RejectedError, prepare, to_llguidance
from quire_engine.structured_output.repetitions import MAX_REPEATED, added_by_counts, check_lark, check_regex
from quire_proto.errors import QuireError
from quire_proto.structured_output import Structured, StructuredKind

Written = tuple[str, int, int]
"""An expression, the length of the shortest text that has all its alternatives, and that without counts."""


def _sequence(parts: list[Written]) -> Written:
    texts, lengths, bases = zip(*parts, strict=True)
    return "".join(texts), sum(lengths), sum(bases)


def _repeated(part: Written, least: int, more: int | None) -> Written:
    bounds = str(least) if more == 0 else f"{least}," if more is None else f"{least},{least + more}"
    return f"({part[0]}){{{bounds}}}", max(1, least) * part[1], part[2]


def _either(one: Written, two: Written) -> Written:
    return f"({one[0]}|{two[0]})", one[1] + two[1], one[2] + two[2]


LITERALS = st.sampled_from(["a", "-", r"\.", r"\x61", "[b]"]).map(lambda text: (text, 1, 1))
CLASSES = st.sampled_from(["[a-z]", r"\w", ".", "[^b]", "[xy]"]).map(lambda text: (text, 0, 0))
EXPRESSIONS = st.recursive(
    LITERALS | CLASSES,
    lambda parts: (
        st.lists(parts, min_size=1, max_size=4).map(_sequence)
        | st.builds(_repeated, parts, st.integers(0, 50), st.none() | st.integers(0, 9))
        | st.builds(_either, parts, parts)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_what_counts_add_is_what_they_write_out(expression: Written) -> None:
    text, length, base = expression
    assert added_by_counts(parse_pattern(f"^(?:{text})$")) == length - base
    grammar = text.replace("/", r"\/")
    refusals = [
        _refusal(check_regex, text),
        _refusal(check_lark, f"start: A\nA: /{grammar}/"),
        _refusal(check_lark, f"start: A\nA: B\nB: /{grammar}/ // {{9}}"),
    ]
    if length - base > MAX_REPEATED:
        assert all(f" {length - base:,} " in str(refusal) for refusal in refusals)
    else:
        assert refusals == [None] * 3


def _refusal(check: Callable[[str], None], text: str) -> str | None:
    try:
        check(text)
    except ValueError as error:
        return str(error)
    return None


def nested(*counts: str) -> str:
    text = "a"
    for count in counts:
        text = f"({text}){count}"
    return text


def counted(outer: int, inner: int, most: int) -> dict[str, object]:
    """A schema of objects with optional properties, of which each may have ``most``."""
    object_schema = {"type": "object", "maxProperties": most, "properties": {f"q{j}": {} for j in range(inner)}}
    return {"type": "object", "properties": {f"p{i}": object_schema.copy() for i in range(outer)}}


BOMBS = [
    Structured(StructuredKind.REGEX, nested("{1000}", "{1000}")),
    Structured(StructuredKind.REGEX, nested(*["{10}"] * 9)),
    Structured(StructuredKind.REGEX, nested("{300,400}", "{1000,}", "?")),
    Structured(StructuredKind.REGEX, "a{%s}" % ("9" * 5000)),
    Structured(StructuredKind.REGEX, "|".join(f"{letter}{{9999}}" for letter in "abcdefghij")),
    Structured(StructuredKind.GRAMMAR, 'start: A{1000}\nA: B~100..200\nB: "a"'),
    Structured(
        StructuredKind.GRAMMAR, "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)), 'A30: "a"'])
    ),
    Structured(
        StructuredKind.GRAMMAR,
        "start: " + "|".join(f"A{i}" for i in range(99)) + "".join(f"\nA{i}: /b{{999}}/" for i in range(99)),
    ),
    Structured(StructuredKind.GRAMMAR, 'root ::= word{300}\nword ::= letter{300}\nletter ::= "a"'),
    Structured(StructuredKind.GRAMMAR, 'start: %json {"type": "string", "pattern": "^(a{1000}){1000}$"}'),
    Structured(StructuredKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": nested("{500}", "{500}")})),
    Structured(StructuredKind.JSON_SCHEMA, json.dumps({"patternProperties": {f"^{nested('{500}', '{500}')}$": {}}})),
    Structured(
        StructuredKind.JSON_SCHEMA,
        json.dumps({"anyOf": [{"type": "string", "pattern": f"^{letter}{{9999}}$"} for letter in "abcdefghij"]}),
    ),
    Structured(StructuredKind.JSON_SCHEMA, json.dumps(counted(30, 60, 60))),
    Structured(StructuredKind.JSON_SCHEMA, json.dumps(counted(50, 60, 30))),
    Structured(
        StructuredKind.JSON_SCHEMA,
        json.dumps({"prefixItems": [{"type": "string"}] * (MAX_RULES // 5)} | counted(30, 60, 60)),
    ),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_is_refused_by_its_count_before_it_is_tried(bomb: Structured) -> None:
    began = thread_time()
    with pytest.raises((QuireError, RejectedError), match=r"\d[\d,]+ .*at most [\d,]+ are supported"):
        prepare(to_llguidance(bomb))
    assert thread_time() - began < 0.15, "a trial would take a second or two"


@pytest.mark.parametrize(
    "text", ["[" * 60_000, "(" * 60_000, r"\p{" * 20_000, "{" * 60_000, "a{" * 30_000, '"' * 60_000, "/" * 60_000]
)
def test_reading_counts_takes_linear_time(text: str) -> None:
    began = thread_time()
    check_regex(text)
    check_lark(f"start: {text}")
    assert thread_time() - began < 1


def test_what_costs_nothing_is_not_counted() -> None:
    check_regex("([a-z]{1,1000} ?){1,1000}")
    check_regex(r"\w{1000000}")
    check_regex("(a{1,1000}){1,1000}")
    check_lark('start: (word " "){1000}\nword: LETTER{1,1000}\nLETTER: /[a-z]/ | "0".."9"')
    prepare(to_llguidance(Structured(StructuredKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10**6}))))
