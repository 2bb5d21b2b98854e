"""Arguments of tool calls as JSON: bare texts between tags by the types of the tool's schema, literals of Python,
Gemma's notation, and those in a whole call that is JSON itself.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from quire_proto.text.schema_references import ANNOTATIONS, References

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
_MAX_DEPTH = 64  # of lists, objects and schemas inside of each other
_INTEGER = re.compile(r"-?\d+(\.0+)?")
_JSON_TYPES = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': STRING}
_TEXT_BOUNDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_COMBINING = ("anyOf", "oneOf", "allOf")


def parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The ``ParameterTypes`` of a tool with this schema. A parameter of which the schema does not say a type is a
    string.
    """
    found, known = dict[str, tuple[str, ...]](), SchemaTypes(schema)
    named, others = known.properties()
    for name, schemas in {OTHERS: others or [True], **named}.items():
        types = set().union(*map(known.of, schemas))
        is_bare = all(is_bare_text(known.target(each)) for each in schemas if each is not False)
        if types <= {STRING} and not is_bare:
            types = {STRING, QUOTED}
        if OTHERS in found or (types and types != {STRING}):
            types = types or {STRING}
            found[str(name)] = tuple(sorted(types))
    return found


class SchemaTypes:
    """The types that the schemas within ``root`` ask for. Each that is referred to is read once: else a schema that
    refers to itself several times would be read as often as there are ways through it.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, set[str]] = {}

    @cached_property
    def references(self) -> References:
        """Where the references of ``root`` lead; not read where there are none."""
        return References(self._root)

    def target(self, schema: Any) -> Any:
        """A schema that is nothing but a reference, as what it refers to."""
        return self.references.target(schema) if isinstance(schema, Mapping) and "$ref" in schema else schema

    def properties(self) -> tuple[dict[str, list[Any]], list[Any]]:
        """The schemas of each property that ``root``, or a part that it combines, names; and those of all others."""
        named, others = dict[str, list[Any]](), list[Any]()
        unread, seen = [self._root], set[int]()
        while unread:
            schema: Any = self.target(unread.pop())
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            properties = schema.get("properties")
            for name, each in properties.items() if isinstance(properties, Mapping) else ():
                named.setdefault(name, []).append(each)
            if "additionalProperties" in schema:
                others.append(schema["additionalProperties"])
            if "$ref" in schema:
                unread.append(self.references.resolve(schema))
            unread += [each for key in _COMBINING if isinstance(schema.get(key), list) for each in schema[key]]
        return named, others

    def of(self, schema: Any, depth: int = 0) -> set[str]:
        """The types that values of a schema may have; empty if it does not say."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return set()
        declared = schema.get("type")
        types = {declared} if isinstance(declared, str) else set()
        types |= {each for each in declared if isinstance(each, str)} if isinstance(declared, list) else set()
        if types:
            return types | ({"null"} if schema.get("nullable") is True else set())
        listed = schema.get("enum")
        values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
        types = {json_type(json.dumps(value)) for value in values}
        if "$ref" in schema:
            target = self.references.resolve(schema)
            if id(target) not in self._known:
                self._known[id(target)] = set()  # what it says of itself adds nothing
                self._known[id(target)] = self.of(target, depth + 1)
            types |= self._known[id(target)]
        for key in _COMBINING:
            for each in schema[key] if isinstance(schema.get(key), list) else ():
                types |= self.of(each, depth + 1)
        return types


def is_bare_text(schema: Any) -> bool:
    """Whether a grammar can hold a bare text to this schema of a string. Listed texts that could contain a mark cannot
    be bare: in quotes they have escapes.
    """
    if schema is True:
        return True
    if not isinstance(schema, Mapping) or schema.keys() - _TEXT_BOUNDS - ANNOTATIONS:
        return False
    if schema.get("type", STRING) not in (STRING, [STRING]):
        return False
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not all(isinstance(bound, int) or bound is math.inf for bound in (least, most)) or not 0 <= least <= most:
        return False
    listed = [*(schema["enum"] if isinstance(schema.get("enum"), list) else []), schema.get("const")]
    return not any(isinstance(text, str) and "<" in text for text in listed)


def json_type(text: str) -> str:
    """The type of a JSON value, by how it begins: an ``integer`` also if it is written as 3.0."""
    return _JSON_TYPES.get(text[:1]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def to_json(text: str, types: Collection[str], *, guided: bool = False) -> str:
    """The JSON of a value that was written as bare text: the text itself if it is JSON, or a literal of Python, of one
    of ``types``, and otherwise a string. With ``guided`` a ``QUOTED`` string is JSON too.
    """
    wanted = set(types) - {STRING, QUOTED} | ({STRING} if guided else set())
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
    reader = _LiteralReader(text, between="=")
    return reader.members("=", "")


def gemma_arguments(text: str, quote: str) -> str:
    """An object in Gemma's notation, ``{city:<quote>Rome<quote>,days:3}``, as JSON. Raises ``ValueError``."""
    reader = _LiteralReader(text, quote, between=":")
    reader.expect("{")
    value = reader.members(":", "}")
    reader.expect("")
    return value


def parse_call(body: str, names: Collection[str]) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a whole call of one of ``names``; None if ``body`` is none. Its keys may
    come in any order, in an object ``function`` or not, and the arguments may be an object, a string that holds one,
    or absent, null or empty.
    """
    try:
        call = json.loads(body)
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = next(call[key] for key in NAME_KEYS if key in call)
        arguments: Any = next((call[key] for key in ARGUMENTS_KEYS if call.get(key) not in (None, "")), {})
        is_text = isinstance(arguments, str)
        is_object = isinstance(json.loads(arguments) if is_text else arguments, dict)
        text: str = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of a surrogate pair, which JSON can escape but UTF-8 cannot encode
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None


_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])"
_STRING = r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"""
_IN_NAME = r"""[^"'{}\[\](),:=<>]"""
_INSIDE = rf"(?!\s){_IN_NAME}"
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}


class _LiteralReader:
    """Reads values one after the other, each once, and writes them as JSON. ``quote`` stands around strings, beside the
    quotes of Python, and ``between`` behind names without quotes, which may have spaces. All methods raise
    ``ValueError`` for what is no literal.
    """

    def __init__(self, text: str, quote: str = "", *, between: str = "") -> None:
        bare = rf"{re.escape(quote)}(?P<bare>.*?){re.escape(quote)}|" if quote else ""
        name = rf"(?P<name>{_INSIDE}(?:{_IN_NAME}*{_INSIDE})?)(?=\s*{between})|" if between else ""
        pattern = (
            rf"\s*(?:{bare}{name}(?P<string>{_STRING})|(?P<number>{_NUMBER})|(?P<word>[\w$-][\w$.-]*)|(?P<mark>\S)|$)"
        )
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
        raise ValueError(f"{text} is not a value")

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
        if kind in ("name", "word", "number", "bare"):
            return json.dumps(text, ensure_ascii=False)
        raise ValueError(f"{text} is not a name")

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
            raise ValueError(f"\\{code} is not a character")
        return chr(number)
    return _ESCAPED.get(code, code if code in "\\'\"" else f"\\{code}")
