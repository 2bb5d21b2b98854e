"""Each kind of ``Structured`` in llguidance's words, and refusals in words for a client. Compiles nothing.

Whatever the library would ignore, or would read in its own way, is refused here: its settings inside a schema, a number
of properties that repeated names could reach, a backslash with nothing behind it. A ``oneOf`` whose options overlap is
read as ``anyOf``, which is all that a grammar can say.
"""

import json
import re

from llguidance import LLMatcher
from quire_proto.errors import QuireError, invalid
from quire_proto.json_schema import min_properties_is_ambiguous, simplify, unsupported
from quire_proto.structured import Structured, StructuredKind

from quire_engine.structured.ebnf import is_ebnf

# One space, or one line break with its indentation: JSON as models write it, and no room for an endless gap.
WHITESPACE = r"( |\n[ \t]{0,32})"
MAX_REASON = 200
EBNF = "ebnf:"
"""Begins the definition of a grammar in EBNF, which is written in Lark's notation where it is tried."""
_NAMES = {
    StructuredKind.JSON_OBJECT: "json_object",
    StructuredKind.JSON_SCHEMA: "The JSON schema",
    StructuredKind.REGEX: "The regular expression",
    StructuredKind.CHOICE: "The choice",
    StructuredKind.GRAMMAR: "The grammar",
}
_PLACE = re.compile(r"^at (\d+)\(\d+\): ")


def to_llguidance(structured: Structured) -> str:
    """What llguidance compiles for ``structured``, or ``EBNF`` and a grammar. Raises ``QuireError`` INVALID."""
    try:
        return _define(structured)
    except ValueError as error:  # such as half of a surrogate pair, or too many brackets
        raise refusal(structured, str(error)) from None


def refusal(structured: Structured, reason: str) -> QuireError:
    """INVALID, with the parameter at fault, the library's ``reason`` in one bounded sentence, and its place."""
    return invalid(structured.param, f"{_NAMES[structured.kind]} cannot be used{_place(structured, reason)}")


def _place(structured: Structured, reason: str) -> str:
    """The library's ``reason`` behind the line of a grammar, or the keyword's path in a schema, that it is about."""
    said, line = sentence(reason), _PLACE.match(reason)
    if structured.kind is StructuredKind.GRAMMAR and line is not None:
        return f", line {line[1]}: {said}"
    if structured.kind is StructuredKind.JSON_SCHEMA and "Unimplemented" in reason:
        said = unsupported(json.loads(structured.text), reason) or said
    return f": {said}"


def sentence(reason: str) -> str:
    """The one line of a library's message that says what is wrong, at most ``MAX_REASON`` characters."""
    lines = [line for line in map(str.strip, reason.splitlines()) if line] or ["no reason was given"]
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    printable = "".join(character if character.isprintable() else " " for character in _PLACE.sub("", said))
    return (printable if len(printable) <= MAX_REASON else f"{printable[:MAX_REASON]}…").rstrip(".") + "."


def _define(structured: Structured) -> str:
    match structured.kind:
        case StructuredKind.JSON_OBJECT:
            return _json({"type": "object"})
        case StructuredKind.JSON_SCHEMA:
            return _json(_read_schema(structured))
        case StructuredKind.REGEX:
            _check_regex(structured)
            return LLMatcher.grammar_from_regex(structured.text)
        case StructuredKind.CHOICE:
            options = " | ".join(json.dumps(option) for option in structured.options)
            return lark(f"start: OPTION\nOPTION: {options}")
        case StructuredKind.GRAMMAR:
            return lark(structured.text) if not is_ebnf(structured.text) else EBNF + structured.text


def lark(text: str) -> str:
    """The definition of a grammar in Lark's notation."""
    # Wrapped, because a text that begins with a brace would be read as the library's own format.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
    )


def _check_regex(structured: Structured) -> None:
    trailing = len(structured.text) - len(structured.text.rstrip("\\"))
    if trailing % 2:
        raise refusal(structured, "it ends with a backslash that escapes nothing")


def _read_schema(structured: Structured) -> dict[str, object]:
    """The schema as both this module and the library will read it: parsed once, by one parser."""
    try:
        schema = json.loads(structured.text, parse_constant=_refuse_constant)
        counted, simpler = min_properties_is_ambiguous(schema), simplify(schema)
    except ValueError as error:
        raise refusal(structured, f"it is no JSON: {error}") from None
    except RecursionError:
        raise refusal(structured, "it is nested too deeply") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refusal(structured, "it is not a JSON object")
    if "x-guidance" in schema:
        raise refusal(structured, "x-guidance is not supported")
    if counted:
        raise refusal(
            structured, "minProperties above 1 is only supported where so many properties are required by name"
        )
    return dict(simpler)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
