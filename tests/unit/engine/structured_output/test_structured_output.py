"""Structured output: samples under a grammar match that grammar, and a grammar affects no other request."""

import ast
import json
import os
import re
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import Base64Bytes, SecretStr, StringConstraints, TypeAdapter
from quire_engine.core.step import GrammarError
from quire_engine.structured_output import llguidance, sandbox
from quire_engine.structured_output.compiler import ModelGrammars
from quire_engine.structured_output.json_formats import FORMATS
from quire_engine.structured_output.llguidance import MAX_REASON, Guidance, GuidanceMatcher, is_ebnf, to_llguidance
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.structured_output import Structured, StructuredKind, choice

from tests.support.grammars import (
    EOS,
    MODEL,
    SPECIAL,
    VOCAB_SIZE,
    NoEndError,
    allowed,
    decode,
    draw,
    encode,
    grammar_of,
    guidance,
    schemas,
)

SEEDS = st.integers(0, 2**32)
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: factor (("*" | "/") factor)*
factor: NUMBER | "-" factor | "(" sum ")"
NUMBER: /0|[1-9][0-9]{0,5}/
"""


class Colour(Enum):
    RED = "red"


def schema(value: object) -> Structured:
    return Structured(StructuredKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Structured:
    return Structured(StructuredKind.REGEX, text)


def lark(text: str) -> Structured:
    return Structured(StructuredKind.GRAMMAR, text)


JSON_OBJECT = Structured(StructuredKind.JSON_OBJECT)
EXAMPLES = [JSON_OBJECT, regex("[a-z]+( [a-z]+)*"), choice(["no", "yes", "yes, but"]), lark(ARITHMETIC)]


@pytest.fixture(scope="module")
def model() -> Iterator[ModelGrammars]:
    model = ModelGrammars(MODEL, VOCAB_SIZE, [EOS])
    yield model
    model.close()


# What is drawn


@given(schemas(), SEEDS)
@settings(SLOW, max_examples=60)
def test_json_drawn_under_a_schema_is_valid_under_that_schema(asked: dict[str, object], seed: int) -> None:
    output = decode(draw(grammar_of(schema(asked)), seed))
    Draft202012Validator.check_schema(asked)
    Draft202012Validator(asked).validate(json.loads(output))


@given(SEEDS)
@settings(SLOW, max_examples=30)
def test_json_object_is_any_json_object_with_bounded_space_between(seed: int) -> None:
    output = decode(draw(grammar_of(JSON_OBJECT), seed))
    assert isinstance(json.loads(output), dict)
    outside_of_strings = re.sub(r'"(\\.|[^"\\])*"', '""', output)
    assert not re.search(r"  |\n\s*\n|\n[ \t]{33}", re.sub(r"\n[ \t]*", "\n", outside_of_strings))


def regexes() -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["a", "b", "[0-9]", "[c-f]", "[^a-z]", ".", r"\.", "é", "/", '"', r"\\", " "])

    def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        group = inner.map(lambda each: f"({each})")
        return (
            st.lists(inner, min_size=2, max_size=3).map("".join)
            | st.lists(inner, min_size=2, max_size=3).map("|".join)
            | st.tuples(group, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "+?"])).map("".join)
            | group
        )

    return st.recursive(leaf, combine, max_leaves=8)


@given(regexes(), SEEDS)
@settings(SLOW, max_examples=40)
def test_a_regex_matches_the_whole_of_what_is_drawn_under_it(pattern: str, seed: int) -> None:
    try:
        output = decode(draw(grammar_of(regex(pattern)), seed, max_tokens=300))
    except NoEndError:
        reject()
    assert re.fullmatch(pattern, output)


OPTIONS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=20)


@given(OPTIONS, SEEDS)
@settings(SLOW, max_examples=40)
def test_a_choice_is_one_of_its_options_and_can_be_each(options: list[str], seed: int) -> None:
    grammar = grammar_of(choice(options))
    assert decode(draw(grammar, seed)) in options
    for option in options:
        matcher = grammar.new_matcher()
        matcher.accept_tokens(encode_bytes(option))
        assert EOS in allowed(matcher)


def encode_bytes(text: str) -> list[int]:
    """One token for each byte, so that a text which looks like a special token is none."""
    letters = bytes_to_tokens()
    return [letters[byte] for byte in text.encode()]


def bytes_to_tokens() -> dict[int, int]:
    """The vocabulary's tokens of single bytes, by GPT-2's table of stand-ins for bytes that cannot be printed."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return {byte: vocabulary[letter] for byte, letter in stand_ins.items()}


@given(SEEDS)
@settings(SLOW, max_examples=30)
def test_what_is_drawn_under_a_grammar_can_be_parsed_by_another_parser(seed: int) -> None:
    ast.parse(decode(draw(grammar_of(lark(ARITHMETIC)), seed)), mode="eval")


@pytest.mark.parametrize(
    ("rules", "texts", "others"),
    [
        (r'root ::= "\u0041\x42\U0001F600"', ["AB😀"], ["A", "AB"]),
        (r'root ::= "[\[\]] \"\\ \t\n/"', ['[[]] "\\ \t\n/'], ["[]"]),
        ('root ::= "a\nb"', ["a\nb"], ["ab"]),
        (r"root ::= [a&&b~~c]", ["a", "&", "b", "~", "c"], ["d"]),
        (r"root ::= [+--]", ["+", ",", "-"], [".", "*"]),
        (r"root ::= [--/]", ["-", ".", "/"], [",", "0"]),
        (r"root ::= [a-]", ["a", "-"], ["b"]),
        (r"root ::= [\]\\^]", ["]", "\\", "^"], ["[", "a"]),
        (r'root ::= [^"\\\x7F\x00-\x1F]', ["é", "a", " "], ['"', "\n", "\\"]),
        (r"root ::= [\u0061-\u0063é]", ["b", "é"], ["d", "e"]),
        ("root ::= .", ["x", "\n", "é"], ["xy"]),
        ("root ::= item{2,3}\nitem ::= [0-9]" + "\n" * 60_000, ["12", "123"], ["1", "1234"]),
        ('# "c" |\nroot ::= "a" # the first, or "c" |\n\n  # "c"\n  | "b"\n', ["a", "b"], ["c"]),
        ('root ::= ("yes" | "no")? "." "*"*', ["yes.", "no.**", "."], ["yes", "yes*"]),
        ('root ::= "(" root ")" | other-rule\nother-rule ::= "x"', ["x", "((x))"], ["(x"]),
        ('  root  ::= word "!"\n  word ::= "hello" | "good " day\n  day ::= "night" | "day"', ["good day!"], ["day!"]),
    ],
)  # fmt: skip
def test_a_grammar_in_ebnf_means_what_it_means_elsewhere(
    model: ModelGrammars, rules: str, texts: list[str], others: list[str]
) -> None:
    def is_complete(text: str) -> bool:
        matcher = model.compile(lark(rules)).new_matcher()
        try:
            matcher.accept_tokens(encode_bytes(text))
        except GrammarError:
            return False
        return EOS in allowed(matcher)

    assert [text for text in texts if not is_complete(text)] == []
    assert [text for text in others if is_complete(text)] == []


@pytest.mark.parametrize("rules", ['start: "::="', "start: A\n// root ::= A\nA: /a ::= b/", 'start: "a"\n'])
def test_a_grammar_in_larks_notation_is_not_taken_for_ebnf(rules: str) -> None:
    assert not is_ebnf(rules)
    assert guidance().compile(to_llguidance(lark(rules)))


# Places in a grammar


@given(st.sampled_from(EXAMPLES), SEEDS, st.randoms(use_true_random=False))
@settings(SLOW, max_examples=30)
def test_accepting_tokens_in_parts_equals_accepting_them_at_once(
    structured: Structured, seed: int, random: Random
) -> None:
    grammar = grammar_of(structured)
    output = draw(grammar, seed, budget=80)
    whole, pieces = grammar.new_matcher(), grammar.new_matcher()
    whole.accept_tokens(output)
    start = 0
    while start < len(output):
        end = random.randint(start + 1, len(output))
        pieces.accept_tokens(output[start:end])
        if random.random() < 0.5:
            allowed(pieces)
        start = end
    assert allowed(whole) == allowed(pieces)


@given(st.sampled_from(EXAMPLES), SEEDS, SEEDS, st.randoms(use_true_random=False))
@settings(SLOW, max_examples=30)
def test_outputs_of_one_grammar_do_not_disturb_each_other(
    structured: Structured, one: int, two: int, random: Random
) -> None:
    grammar = grammar_of(structured)
    outputs = [draw(grammar, seed) for seed in (one, two)]
    alone = [masks(grammar.new_matcher(), output) for output in outputs]
    matchers = [grammar.new_matcher(), grammar.new_matcher()]
    together: list[list[list[int]]] = [[allowed(matcher)] for matcher in matchers]
    order = [which for which in (0, 1) for _ in outputs[which]]
    random.shuffle(order)
    for which in order:
        matchers[which].accept_tokens([outputs[which][len(together[which]) - 1]])
        together[which].append(allowed(matchers[which]))
    assert together == alone


def masks(matcher: GuidanceMatcher, output: list[int]) -> list[list[int]]:
    """What is allowed before each token, and at the end."""
    seen = [allowed(matcher)]
    for token_id in output:
        matcher.accept_tokens([token_id])
        seen.append(allowed(matcher))
    return seen


@pytest.mark.parametrize("structured", EXAMPLES, ids=lambda each: str(each.kind))
def test_a_rebuilt_matcher_allows_the_same_tokens(structured: Structured, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammar_of(structured)
    output = draw(grammar, 5, budget=60)
    lasting = masks(grammar.new_matcher(), output)
    renewed = 0
    renew = GuidanceMatcher._reset_matcher

    def count(matcher: GuidanceMatcher) -> None:
        nonlocal renewed
        renewed += 1
        renew(matcher)
        matcher._max_matcher_age = -1.0

    monkeypatch.setattr(llguidance, "MATCHER_RESET_SECONDS", -1.0)
    monkeypatch.setattr(GuidanceMatcher, "_reset_matcher", count)
    assert masks(grammar.new_matcher(), output) == lasting
    assert renewed == len(lasting)


def test_a_mask_can_be_filled_again_for_the_same_place() -> None:
    matcher = grammar_of(JSON_OBJECT).new_matcher()
    assert allowed(matcher) == allowed(matcher)


def test_only_the_end_is_allowed_where_a_grammar_is_complete() -> None:
    matcher = grammar_of(choice(["yes"])).new_matcher()
    assert EOS not in allowed(matcher)
    matcher.accept_tokens(encode("yes"))
    assert allowed(matcher) == [EOS]
    matcher.accept_tokens([EOS])
    assert allowed(matcher) == [EOS]


def test_each_of_several_end_tokens_ends_an_output_and_no_other_special_token_comes() -> None:
    several = Guidance.load(MODEL / "tokenizer.json", VOCAB_SIZE, [0, EOS])
    grammar = several.compile(to_llguidance(regex("ab*")))
    matcher = grammar.new_matcher()
    assert not SPECIAL & set(allowed(matcher))
    matcher.accept_tokens(encode("ab"))
    assert SPECIAL & set(allowed(matcher)) == {0, EOS}
    for end in (0, EOS):
        ended = grammar.new_matcher()
        ended.accept_tokens([*encode("ab"), end])
        assert allowed(ended) == [0, EOS]


def test_tokens_that_only_the_model_has_are_never_allowed() -> None:
    padded = Guidance.load(MODEL / "tokenizer.json", VOCAB_SIZE + 77, [EOS])
    matcher = padded.compile(to_llguidance(regex("(.|\n)+"))).new_matcher()
    assert max(allowed(matcher, VOCAB_SIZE + 77)) < VOCAB_SIZE


def test_a_mask_is_cut_where_the_model_has_fewer_tokens_than_its_tokenizer() -> None:
    smaller = Guidance.load(MODEL / "tokenizer.json", 1000, [EOS])
    words = np.zeros(32, dtype=np.int32)
    smaller.compile(to_llguidance(regex("(.|\n)+"))).new_matcher().fill_bitmask(words.data)
    assert words.any()


@pytest.mark.parametrize("token_id", [-1, 5, EOS, VOCAB_SIZE, 2**31, 2**40])
def test_a_token_that_does_not_match_ends_the_output_with_one_sentence(token_id: int) -> None:
    matcher = grammar_of(regex("[a-z]{3}")).new_matcher()
    with pytest.raises(GrammarError) as error:
        matcher.accept_tokens([*encode("a"), token_id])
    assert re.fullmatch(r"[^\n<]{10,210}\.", str(error.value))


def test_a_grammar_without_an_end_dies_where_nothing_can_follow() -> None:
    matcher = grammar_of(lark('start: "abcdefgh" x\nx: x "c"')).new_matcher()
    matcher.accept_tokens(encode_bytes("abcdefgh"))
    with pytest.raises(GrammarError):
        allowed(matcher)
    with pytest.raises(GrammarError):
        allowed(matcher)


def test_an_output_may_use_so_much_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.02
        return now

    monkeypatch.setattr(llguidance, "thread_time", clock)
    monkeypatch.setattr(llguidance, "BUDGET_SECONDS", 0.1025)
    monkeypatch.setattr(llguidance, "BUDGET_SECONDS_PER_TOKEN", 0.015)
    matcher = grammar_of(regex("a+")).new_matcher()
    a = encode("a")
    for _ in range(20):
        matcher.accept_tokens(a)
    with pytest.raises(GrammarError, match="too long"):
        matcher.accept_tokens(a)  # 5 ms more for each token than it is given


def test_all_outputs_of_a_grammar_share_the_time_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.02
        return now

    monkeypatch.setattr(llguidance, "thread_time", clock)
    monkeypatch.setattr(llguidance, "BUDGET_SECONDS", 0.1025)
    monkeypatch.setattr(llguidance, "BUDGET_SECONDS_PER_TOKEN", 0.015)
    grammar = grammar_of(regex("a+"))
    a = encode("a")
    for _ in range(20):
        grammar.new_matcher().accept_tokens(a)
    with pytest.raises(GrammarError, match="too long"):
        grammar.new_matcher().accept_tokens(a)


# What is refused


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (schema({"not": {"type": "null"}}), "not"),
        (schema({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}), "properties.a.if is not supported"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "array", "contains": {"type": "null"}}), "contains"),
        (schema({"type": "object", "propertyNames": {"anyOf": [{"pattern": "a"}, {"enum": ["b"]}]}}), "propertyNames"),
        (schema({"patternProperties": {letter: {} for letter in "abcd"}}), "patternProperties"),
        (schema({"$defs": {"a": {"not": {}}}, "items": {"anyOf": [{"$ref": "#/$defs/a"}]}}), "$defs.a.not"),
        (schema({"properties": {"not": {"not": {}}}}), " properties.not.not is"),
        (schema({"type": "object", "dependentRequired": {"a": ["b"]}}), "dependentRequired"),
        (schema({"unevaluatedProperties": False}), "unevaluatedProperties"),
        (schema({"$dynamicRef": "#node"}), "dynamicRef"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "string", "pattern": r"(a)\1"}), "backreferences"),
        (schema({"type": "text"}), "text"),
        (schema({"$ref": "https://example.com/schema"}), "https://example.com/schema"),
        (schema({"$ref": "#/$defs/none"}), "/$defs/none"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (schema({"enum": []}), "empty"),
        (schema({"type": "object", "minProperties": 2}), "minProperties"),
        (schema({"properties": {"const": {"items": [{"minProperties": 3}]}}}), "minProperties"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
        (schema({"type": "integer", "multipleOf": 999999937}), "multipleOf"),
        (schema([]), "not a JSON object"),
        (Structured(StructuredKind.JSON_SCHEMA, "false"), "not a JSON object"),
        (Structured(StructuredKind.JSON_SCHEMA, '{"minimum": NaN}'), "NaN"),
        (Structured(StructuredKind.JSON_SCHEMA, '{"type": '), "not JSON"),
        (Structured(StructuredKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
        (Structured(StructuredKind.JSON_SCHEMA, '{"const": "\\ud800"}'), "const has half of a surrogate"),
        (schema({"allOf": [{"anyOf": [{"pattern": f"{i}{j}"} for i in range(30)]} for j in range(9)]}), "large"),
        (regex("(a"), "unclosed group"),
        (regex("a(?=b)"), "look-around"),
        (regex(r"\bword\b"), "lookarounds"),
        (regex("a$b"), "lookarounds"),
        (regex("a{3,2}"), "repetition"),
        (regex("a\\"), "backslash"),
        (regex("(" * 1000 + "a" + ")" * 1000), "nest"),
        (regex("(a?){5000}a{5000}"), "too many"),
        (lark("no rule"), "1(4)"),
        (lark("start: missing"), "missing"),
        (lark('start: a\na: %json {"not": {}}'), "The grammar cannot be used, line 2: "),
        (lark('start: A\nA: "x" A | "y"'), "circular"),
        (lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (lark('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'), "1(1)"),
        (lark('start: %json {"type": "null", "x-guidance": {"lenient": true}, "not": {}}'), "not"),
        (lark("start: s\ns: " + " | ".join("s " * i + '"a"' for i in range(1, 40)) + ' | ""'), "items"),
        (lark("start: start"), "nothing can follow"),
        (lark('start: A\nA: "a" & "b"'), "nothing can follow"),
        (lark('root ::= "a" missing'), "'missing' not found"),
        (lark('other ::= "a"'), "no 'root' rule"),
        (lark('root ::= "a'), "unexpected end"),
        (lark('root ::= "\\q"'), "\\q is not an escape"),
        (lark('root ::= "\\U99999999"'), "chr()"),
        (lark('root ::= "\\ud800"'), "hex escape"),
        (lark("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "nested too deeply"),
        (lark("root ::= root"), "nothing can follow"),
    ],
)  # fmt: skip
def test_an_unusable_grammar_is_refused_with_its_parameter(
    model: ModelGrammars, structured: Structured, words: str
) -> None:
    with pytest.raises(QuireError) as refused:
        model.compile(structured)
    assert refused.value.code is ErrorCode.INVALID
    assert refused.value.param == structured.param
    assert words.lower() in refused.value.message.lower()
    assert len(refused.value.message) < MAX_REASON + 60
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"const": {"minProperties": 3}}, '{"minProperties":3}'),
        ({"enum": [{"minProperties": 3}], "default": {"minProperties": 3}}, '{"minProperties":3}'),
        ({"type": "object", "properties": {"minProperties": {"type": "integer"}}}, '{"minProperties":3}'),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, '{"a":1,"b":2}'),
        ({"nullable": True, "deprecated": True, "type": "null", "x-order": 1}, "null"),
        (True, "[1, {}]"),
    ],
)  # fmt: skip
def test_a_grammar_that_only_looks_unsupported_is_accepted(model: ModelGrammars, asked: object, text: str) -> None:
    matcher = model.compile(schema(asked)).new_matcher()
    matcher.accept_tokens(encode(text))
    assert EOS in allowed(matcher)


# As pydantic writes them, and those of zod by hand.
SAYING_NOTHING = [
    (TypeAdapter(list[bytes]).json_schema(), '["a"]'),
    (TypeAdapter(Path).json_schema(), '"a/b"'),
    (TypeAdapter(SecretStr).json_schema(), '"hush"'),
    (TypeAdapter(Base64Bytes).json_schema(), '"YQ=="'),
    (TypeAdapter(dict[Literal["a", "b"], int]).json_schema(), '{"b":3}'),
    (TypeAdapter(dict[Colour, float]).json_schema(), '{"red":1.5}'),
    (TypeAdapter(dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int]).json_schema(), '{"abc":3}'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, "[1]"),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, '{"a":null}'),
    ({"type": "object", "propertyNames": {"type": "string", "enum": ["a"]}, "properties": {"b": {}}}, '{"a":1}'),
    ({"type": "object", "propertyNames": {"type": "string", "format": "ulid", "pattern": "^[A-Z]$"}}, '{"A":1}'),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, '{"ab":1}'),
    ({"type": "string", "format": "starts_with", "pattern": "^ab.*$"}, '"abc"'),
    ({"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}, '"a1"'),
    *(({"type": "string", "format": name}, '"a"') for name in ("emoji", "nanoid", "jwt", "e164", "base64", "regex")),
    ({"enum": ["a"], "format": "enum"}, '"a"'),
    ({"enum": ["a"], "type": "string", "format": "email"}, '"a"'),
    ({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 1}]}, '"a"'),
    ({"if": {"type": "null"}, "type": "integer", "minContains": 2, "not": False, "dependentRequired": {}}, "3"),
    ({"type": "object", "unevaluatedProperties": True, "properties": {"format": {"then": {}}}}, '{"format":1}'),
]


@pytest.mark.parametrize(("asked", "text"), SAYING_NOTHING, ids=lambda each: str(each)[:60])
def test_json_schema_keywords_without_constraint_are_accepted(
    model: ModelGrammars, asked: dict[str, object], text: str
) -> None:
    matcher = model.compile(schema(asked)).new_matcher()
    matcher.accept_tokens(encode(text))
    assert EOS in allowed(matcher)


@given(st.sampled_from([asked for asked, _ in SAYING_NOTHING]), SEEDS)
@settings(SLOW, max_examples=50)
def test_what_is_drawn_without_those_words_is_valid_under_the_schema_that_has_them(
    asked: dict[str, object], seed: int
) -> None:
    Draft202012Validator(asked).validate(json.loads(decode(draw(grammar_of(schema(asked)), seed))))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_the_library_supports_still_constrains(name: str) -> None:
    matcher = grammar_of(schema({"type": "string", "format": name})).new_matcher()
    with pytest.raises(GrammarError):
        matcher.accept_tokens(encode('" "'))


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3500)) + '\nr3500: "b"'
EBNF_CHAIN = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(3500)) + '\nr3500 ::= "b"'


@pytest.mark.parametrize(
    "structured",
    [
        pytest.param(lark(CHAIN), id="more rules than the stack holds"),
        pytest.param(lark(EBNF_CHAIN), id="rules that take long to be told apart"),
        pytest.param(regex("a*b*" * 15000), id="more memory than is given"),
        pytest.param(regex(".?" * 30000), id="more of both"),
    ],
)
def test_a_grammar_that_would_take_too_much_is_refused_and_the_next_one_is_not(
    model: ModelGrammars, structured: Structured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "ANSWER_TIMEOUT", 1000.0)  # it is the system's limits that end the process
    with pytest.raises(QuireError, match="too much time or memory") as refused:
        model.compile(structured)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, structured.param)
    assert model.compile(JSON_OBJECT).new_matcher()


def test_a_process_that_does_not_answer_in_time_is_ended(model: ModelGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    model.compile(JSON_OBJECT)
    processes = [trial._process for trial in model._sandboxes if trial._process is not None]
    monkeypatch.setattr(sandbox, "ANSWER_TIMEOUT", 0.0)
    with pytest.raises(QuireError, match="in time") as late:
        model.compile(regex(".?" * 30000))
    assert late.value.code is ErrorCode.OVERLOADED, "nobody knows whether it is the grammar's fault"
    monkeypatch.undo()
    assert any(process.poll() is not None for process in processes)
    assert model.compile(JSON_OBJECT).new_matcher()


def test_a_grammar_is_not_refused_for_a_trial_that_ended_for_another_reason(model: ModelGrammars) -> None:
    model.compile(JSON_OBJECT)
    processes = [trial._process for trial in model._sandboxes if trial._process is not None]
    assert processes
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    assert model.compile(JSON_OBJECT).new_matcher()


def test_a_short_text_that_makes_a_large_grammar_is_refused_and_others_are_measured(model: ModelGrammars) -> None:
    with pytest.raises(QuireError, match="too much time or memory"):
        model.compile(regex("a{49000}"))
    sizes = [model.compile(regex(f"b{{{count}}}")).num_bytes for count in (10, 20_000)]
    assert sizes[0] < 4 << 20
    assert sizes[1] > 2 << 20


@given(st.sampled_from(list(StructuredKind)), st.text(max_size=40))
@settings(SLOW, max_examples=50)
def test_any_text_is_a_grammar_or_refused(model: ModelGrammars, kind: StructuredKind, text: str) -> None:
    refused, grammar = None, None
    try:
        grammar = model.compile(Structured(kind, text))
    except QuireError as error:
        refused = error.code
    assert refused is ErrorCode.INVALID or (grammar is not None and allowed(grammar.new_matcher()))


@pytest.mark.parametrize("text", [None, "", "demo", "[]", "{}", '{"version": "1.0"}'])
def test_a_model_without_a_usable_tokenizer_refuses_structured_output_by_name(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    model = ModelGrammars(tmp_path, VOCAB_SIZE, [EOS])
    with pytest.raises(QuireError, match="tokenizer") as refused:
        model.compile(regex("a"))
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, "regex")


def test_a_tokenizer_that_cannot_be_read_now_is_read_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelGrammars(MODEL, VOCAB_SIZE, [EOS], num_sandboxes=1)
    try:
        with monkeypatch.context() as without_descriptors:
            without_descriptors.setattr(Path, "read_text", lambda *_, **__: os.open("/", os.O_WRONLY))
            with pytest.raises(QuireError, match="now") as refused:
                model.compile(JSON_OBJECT)
        assert refused.value.code is ErrorCode.OVERLOADED
        assert refused.value.retry_after
        assert model.compile(JSON_OBJECT).new_matcher()
    finally:
        model.close()


def test_a_model_without_an_end_token_refuses_structured_output() -> None:
    with pytest.raises(QuireError, match="no structured output"):
        ModelGrammars(MODEL, VOCAB_SIZE, []).compile(JSON_OBJECT)
