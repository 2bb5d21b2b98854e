"""Each kind of ``Structured`` in llguidance's words, and refusals in words for a client. Compiles nothing.

Whatever the library would ignore, or would read in its own way, is refused here: its settings inside a schema, a number
of properties that repeated names could reach, a backslash with nothing behind it.
"""

import json
import re
from collections.abc import Iterator

from llguidance import LLMatcher
from quire_proto.errors import QuireError, invalid
from quire_proto.structured import MAX_TEXT, Structured, StructuredKind

# One space, or one line break with its indentation: JSON as models write it, and no room for an endless gap.
WHITESPACE = r"( |\n[ \t]{0,32})"
MAX_REASON = 200
_NAMES = {
    StructuredKind.JSON_OBJECT: "json_object",
    StructuredKind.JSON_SCHEMA: "The JSON schema",
    StructuredKind.REGEX: "The regular expression",
    StructuredKind.CHOICE: "The choice",
    StructuredKind.GRAMMAR: "The grammar",
}
_PLACE = re.compile(r"^at \d+\(\d+\): ")
# Keywords whose value holds data, not schemas.
_DATA = {"const", "default", "enum", "examples"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}


def define(structured: Structured) -> str:
    """What llguidance compiles for ``structured``. Raises ``QuireError`` INVALID."""
    try:
        return _define(structured)
    except ValueError as error:  # such as half of a surrogate pair, or too many brackets
        raise refusal(structured, str(error)) from None


def refusal(structured: Structured, reason: str) -> QuireError:
    """INVALID, with the parameter that asked for it and the library's ``reason`` in one bounded sentence."""
    return invalid(structured.param, f"{_NAMES[structured.kind]} cannot be used: {sentence(reason)}")


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
            return _lark(f"start: OPTION\nOPTION: {options}")
        case StructuredKind.GRAMMAR:
            return _lark(structured.text)


def _lark(text: str) -> str:
    # Wrapped, because a text that begins with a brace would be read as the library's own format.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})


def _check_regex(structured: Structured) -> None:
    trailing = len(structured.text) - len(structured.text.rstrip("\\"))
    if trailing % 2:
        raise refusal(structured, "it ends with a backslash that escapes nothing")


def _read_schema(structured: Structured) -> dict[str, object]:
    """The schema as both this module and the library will read it: parsed once, by one parser."""
    try:
        schema = json.loads(structured.text, parse_constant=_refuse_constant)
        counted = list(_counted(schema))
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
    if any(asked > max(1, named) for asked, named in counted):
        raise refusal(
            structured, "minProperties above 1 is only supported where so many properties are required by name"
        )
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _counted(schema: object) -> Iterator[tuple[int, int]]:
    """For each schema within ``schema`` that has ``minProperties``: that, and how many properties it requires by name.

    The library counts a name that comes twice as two properties, and a JSON parser as one.
    """
    if isinstance(schema, list):
        for entry in schema:
            yield from _counted(entry)
    elif isinstance(schema, dict):
        asked, required = schema.get("minProperties"), schema.get("required")
        if isinstance(asked, int | float):
            yield int(min(asked, MAX_TEXT)), len(set(map(str, required))) if isinstance(required, list) else 0
        for keyword, value in schema.items():
            if keyword not in _DATA:
                yield from _counted(list(value.values()) if keyword in _MAPS and isinstance(value, dict) else value)
