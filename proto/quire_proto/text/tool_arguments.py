"""Arguments of tool calls as JSON: bare texts between tags by the types of the tool's schema, literals of Python,
Gemma's notation, and those in a whole call that is JSON itself.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

ParameterTypes = Mapping[str, Collection[str]]
"""The types of a tool's parameters, but for those that are only a string. ``QUOTED`` is among those of a string that a
grammar writes as JSON, in quotes, because its schema asks for more than a bare text can be held to.
"""

NAME_KEYS, ARGUMENTS_KEYS = ("name", "tool_name"), ("arguments", "parameters")
"""The keys of a call in JSON."""
OTHERS = ""
"""What stands in place of a name for all parameters that the schema does not name."""
QUOTED = "quoted"
STRING = "string"
_MAX_DEPTH = 64  # of lists and objects inside of each other
_MAX_REFERENCES = 32  # that lead from one to the next
_INTEGER = re.compile(r"-?\d+(\.0+)?")
_JSON_TYPES = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': STRING}
_TEXT_BOUNDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})


def parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The ``ParameterTypes`` of a tool with this schema. A parameter of which the schema does not say a type is a
    string.
    """
    properties = schema.get("properties")
    found, known = dict[str, tuple[str, ...]](), KnownTypes()
    named = dict(properties) if isinstance(properties, Mapping) else {}
    for name, each in {OTHERS: schema.get("additionalProperties", True), **named}.items():
        types = schema_types(each, schema, known)
        if types <= {STRING} and each is not False and not is_bare_text(resolved(each, schema)):
            types = {STRING, QUOTED}
        if OTHERS in found or (types and types != {STRING}):
            types = types or {STRING}
            found[str(name)] = tuple(sorted(types))
    return found


KnownTypes = dict[str, set[str]]
"""The types of what was referred to, by the references. Without them a schema that refers to itself several times would
be read as often as all ways through it are.
"""


def schema_types(schema: Any, root: Mapping[str, Any], known: KnownTypes, depth: int = 0) -> set[str]:
    """The types that values of a schema within ``root`` may have; empty if it does not say. Adds to ``known``."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    types |= {each for each in declared if isinstance(each, str)} if isinstance(declared, list) else set()
    if types:
        return types | ({"null"} if schema.get("nullable") is True else set())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = {json_type(json.dumps(value)) for value in values}
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = set()  # what it says of itself adds nothing
            known[reference] = schema_types(referred(reference, root), root, known, depth + 1)
        types |= known[reference]
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= schema_types(each, root, known, depth + 1)
    return types


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema that is nothing but a reference, as what it refers to in ``root``."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            break
        schema = referred(str(schema["$ref"]), root)
    return schema


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that ``#/…`` names in ``root``; None if there is none."""
    value: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value if reference.startswith("#") else None


def is_bare_text(schema: Any) -> bool:
    """Whether a grammar can hold a bare text to this schema of a string. Listed texts that could contain a mark cannot
    be bare: in quotes they have escapes.
    """
    if schema is True:
        return True
    if not isinstance(schema, Mapping) or schema.keys() - _TEXT_BOUNDS - _ANNOTATIONS:
        return False
    listed = [*(schema["enum"] if isinstance(schema.get("enum"), list) else []), schema.get("const")]
    return not any(isinstance(text, str) and "<" in text for text in listed)


def json_type(text: str) -> str:
    """The type of a JSON value, by how it begins: an ``integer`` also if it is written as 3.0."""
    return _JSON_TYPES.get(text[:1]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def to_json(text: str, types: Collection[str], *, exact: bool = False) -> str:
    """The JSON of a value that was written as bare text: the text itself if it is JSON, or a literal of Python, of one
    of ``types``, and otherwise a string. With ``exact`` a ``QUOTED`` string is JSON too.
    """
    wanted = set(types) - {STRING, QUOTED} | ({STRING} if exact else set())
    for read in (_checked_json, python_value):
        try:
            value = read(text.strip())
        except ValueError:
            continue
        found = json_type(value)
        if found in wanted or (found == "integer" and "number" in wanted):
            return value
    return json.dumps(text, ensure_ascii=False)


def _checked_json(text: str) -> str:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("too deep") from None
    return text


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def python_value(text: str) -> str:
    """A literal of Python as JSON. Raises ``ValueError`` for anything else."""
    reader = _LiteralReader(text)
    value = reader.value()
    reader.expect("")
    return value


def python_arguments(text: str) -> str:
    """Keyword arguments, ``city="Rome", days=3``, as a JSON object. Raises ``ValueError``."""
    reader = _LiteralReader(text)
    return reader.members("=", "")


def gemma_arguments(text: str, quote: str) -> str:
    """An object in Gemma's notation, ``{city:<quote>Rome<quote>,days:3}``, as JSON. Raises ``ValueError``."""
    reader = _LiteralReader(text, quote)
    reader.expect("{")
    value = reader.members(":", "}")
    reader.expect("")
    return value


def parse_call(body: str, names: Collection[str]) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a whole call of one of ``names``; None if ``body`` is none. Its keys may
    come in any order, in an object ``function`` or not, and the arguments may be an object, a string that holds one,
    or absent.
    """
    try:
        call = json.loads(body)
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = next(call[key] for key in NAME_KEYS if key in call)
        arguments: Any = next((call[key] for key in ARGUMENTS_KEYS if key in call), {})
        is_text = isinstance(arguments, str)
        is_object = isinstance(json.loads(arguments) if is_text else arguments, dict)
        text: str = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of a surrogate pair, which JSON can escape but UTF-8 cannot encode
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None


_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])"
_STRING = r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"""
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}


class _LiteralReader:
    """Reads values one after the other, each once, and writes them as JSON. ``quote`` stands around strings, beside the
    quotes of Python. All methods raise ``ValueError`` for what is no literal.
    """

    def __init__(self, text: str, quote: str = "") -> None:
        bare = rf"{re.escape(quote)}(?P<bare>.*?){re.escape(quote)}|" if quote else ""
        pattern = rf"\s*(?:{bare}(?P<string>{_STRING})|(?P<number>{_NUMBER})|(?P<word>[\w$-][\w$.-]*)|(?P<mark>\S)|$)"
        self._tokens = self._read(text, re.compile(pattern, re.DOTALL))
        self._next = next(self._tokens)
        self._depth = 0

    @staticmethod
    def _read(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
        """Kind and text of each token; at the end, of an empty one."""
        at = 0
        while found := pattern.match(text, at):
            at = found.end()
            kind = found.lastgroup
            if kind is None:
                break
            yield kind, found[kind]
        yield "end", ""

    def _take(self) -> tuple[str, str]:
        taken, self._next = self._next, next(self._tokens, ("end", ""))
        return taken

    def expect(self, mark: str) -> None:
        """Reads ``mark``; the end of the text if it is empty."""
        if self._take() != (("mark", mark) if mark else ("end", "")):
            raise ValueError(f"{mark or 'the end'} was expected")

    def value(self) -> str:
        """One value."""
        kind, text = self._take()
        if kind == "bare":
            return json.dumps(text, ensure_ascii=False)
        if kind == "string":
            return _string_as_json(text)
        if kind == "number":
            return text
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        if kind == "mark" and text in "[({":
            return self.members(":", "}") if text == "{" else self._items("]" if text == "[" else ")")
        raise ValueError(f"{text} is no value")

    def members(self, between: str, end: str) -> str:
        """Names and values up to ``end``, as an object."""
        return "{" + self._separated(lambda: f"{self._name()}{self._after(between)}{self.value()}", end) + "}"

    def _items(self, end: str) -> str:
        return "[" + self._separated(self.value, end) + "]"

    def _separated(self, read: Callable[[], str], end: str) -> str:
        """What ``read`` reads, with commas between, up to ``end``. A comma may stand before it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("too deep")
        parts: list[str] = []
        closing = ("mark", end) if end else ("end", "")
        while self._next != closing:
            parts.append(read())
            if self._next != closing:
                self.expect(",")
        self._take()
        self._depth -= 1
        return ", ".join(parts)

    def _name(self) -> str:
        kind, text = self._take()
        if kind == "string":
            return _string_as_json(text)
        if kind in ("word", "number", "bare"):
            return json.dumps(text, ensure_ascii=False)
        raise ValueError(f"{text} is no name")

    def _after(self, between: str) -> str:
        self.expect(between)
        return ": "


def _string_as_json(text: str) -> str:
    """A string in quotes as JSON; one that could be both JSON's and Python's is read as JSON's."""
    if text[0] == '"':
        try:
            return _encodable(json.loads(text, strict=False))
        except ValueError:
            pass
    return _encodable(_ESCAPE.sub(_unescape, text[1:-1]))


def _encodable(value: str) -> str:
    value.encode()  # raises a ValueError for half of a surrogate pair, which UTF-8 cannot encode
    return json.dumps(value, ensure_ascii=False)


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1 or code.isdigit():
        number = int(code[1:], 16) if code[0] in "xuU" else int(code, 8) if code[0] in "01234567" else -1
        if not 0 <= number <= 0x10FFFF:
            raise ValueError(f"\\{code} is no character")
        return chr(number)
    return _ESCAPED.get(code, code if code in "\\'\"" else f"\\{code}")
