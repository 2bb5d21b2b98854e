"""JSON Schemas with fewer keywords, for a grammar library that refuses every keyword that it does not support.

``simplify`` removes keywords that constrain nothing, among them ``format``s that are no more than annotations, and
rewrites ``propertyNames`` with keywords that the library supports. What is valid under the result is valid under the
schema.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Formats that llguidance holds strings to. Any other is an annotation, as the standard says of all.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
# Keywords whose value is a schema, a list of them, or a map to them.
_SCHEMAS = frozenset(
    [
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    ]
)
_MAPS = frozenset(["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"])
_ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"]
)
_MAX_REFERENCES = 8
_MAX_NAMES = 256  # that are listed in place of a reference to them, which may occur many times

_MAX_PLACE = 200
_MAX_COUNT = 1 << 16
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
# What a client can do instead of using an unsupported keyword.
_INSTEAD = {"uniqueItems": "leave it out, and drop what the answer has twice"}
# Keywords whose value holds data, not schemas.
_DATA = frozenset(["const", "default", "enum", "examples"])
Schema = Mapping[str, Any]
# When a keyword constrains nothing: a predicate of its value and of the schema that it is in.
_CONSTRAINS_NOTHING: dict[str, Callable[[Any, Schema], bool]] = {
    "format": lambda value, schema: str(value) not in FORMATS or "enum" in schema or "const" in schema,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "unevaluatedItems": lambda value, _: value in (True, {}),
    "unevaluatedProperties": lambda value, _: value in (True, {}),
    "dependentRequired": lambda value, _: value == {},
    "dependentSchemas": lambda value, _: value == {},
    "dependencies": lambda value, _: value == {},
    "not": lambda value, _: value is False,
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
    "minContains": lambda _, schema: "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
}


def simplify(schema: Any) -> Any:
    """The same schema without keywords that constrain nothing. Raises ``RecursionError`` for one that is nested too
    deeply.
    """
    return _simplify(schema, schema)


def unsupported(schema: Any, reason: str) -> str | None:
    """The sentence that says where ``schema`` has the first keyword that llguidance's ``reason`` names as unknown to
    it, such as ``properties.tags.uniqueItems``. None where the reason is another.
    """
    named = _UNIMPLEMENTED.search(reason)
    if named is None:
        return None
    keyword = named[1]
    place = next((".".join(path) for path in _places(schema, keyword, ())), keyword)
    instead = f"; {_INSTEAD[keyword]}" if keyword in _INSTEAD else ""
    return f"{place[:_MAX_PLACE]} is not supported{instead}."


def min_properties_is_ambiguous(schema: Any) -> bool:
    """Whether ``minProperties`` asks somewhere for more than one property beyond those that are required by name.

    The library counts a name that comes twice as two properties, and a JSON parser as one. Raises ``RecursionError``.
    """
    return any(asked > max(1, named) for asked, named in _counted(schema))


def _simplify(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_simplify(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    simpler = {keyword: _within(keyword, value, root) for keyword, value in schema.items()}
    simpler = {keyword: value for keyword, value in simpler.items() if not _constrains_nothing(keyword, simpler)}
    return _with_names(simpler, root) if "propertyNames" in simpler else simpler


def _within(keyword: str, value: Any, root: Any) -> Any:
    if keyword in _MAPS and isinstance(value, dict):
        return {name: _simplify(each, root) for name, each in value.items()}
    return _simplify(value, root) if keyword in _SCHEMAS else value


def _constrains_nothing(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether the schema means the same without the keyword."""
    condition = _CONSTRAINS_NOTHING.get(keyword)
    return condition is not None and condition(schema[keyword], schema)


def _with_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """``propertyNames`` as ``properties`` where it lists names, and as ``patternProperties`` where it has a pattern.
    The schema as it is where neither can be.
    """
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    names = _resolved(schema["propertyNames"], root)
    if names is True:
        return rest
    if not isinstance(names, dict):
        return schema
    words = {keyword: value for keyword, value in names.items() if keyword not in _ANNOTATIONS}
    if words.get("type") == "string":
        del words["type"]
    if not words:
        return rest
    if "patternProperties" in schema:
        return schema
    listed = _list(words)
    if listed is not None:
        return _listed(rest, listed)
    pattern = None if rest.get("properties") else _pattern(words)
    return schema if pattern is None else _matching(rest, pattern)


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that a reference within ``root`` leads to, without keywords that constrain nothing. A reference with
    other keywords beside it is returned as it is.
    """
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference.split("/")[1:]:
            schema = schema.get(name) if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        return schema
    return {keyword: value for keyword, value in schema.items() if not _constrains_nothing(keyword, schema)}


def _list(words: Mapping[str, Any]) -> dict[str, None] | None:
    """The names that ``words`` allow, in their order; None where they do not list them, or too many."""
    names = words.get("enum", [words.get("const")])
    if len(words) != 1 or not isinstance(names, list) or len(names) > _MAX_NAMES:
        return None
    return dict.fromkeys(names) if all(isinstance(name, str) for name in names) else None


def _listed(schema: dict[str, Any], names: Mapping[str, None]) -> dict[str, Any]:
    """An object that may have these properties and no other."""
    properties, others = schema.get("properties"), schema.get("additionalProperties", True)
    known = properties if isinstance(properties, dict) else {}
    kept = {name: each for name, each in known.items() if name in names}
    added = {} if others is False else {name: others for name in names if name not in kept}
    return {**schema, "properties": {**kept, **added}, "additionalProperties": False}


def _pattern(words: Mapping[str, Any]) -> str | None:
    """The regular expression of the names that ``words`` allow; None where one regular expression is not enough."""
    if words.keys() <= {"pattern", "format"} and isinstance(words.get("pattern"), str):
        return str(words["pattern"])  # libraries that write both put the format into the pattern
    if words.keys() <= {"minLength", "maxLength"}:
        least, most = words.get("minLength", 0), words.get("maxLength", "")
        return f"^(?s:.){{{least},{most}}}$" if all(isinstance(each, int) for each in words.values()) else None
    return None


def _matching(schema: dict[str, Any], pattern: str) -> dict[str, Any]:
    """An object whose properties have names that match."""
    others = schema.get("additionalProperties", True)
    return {**schema, "patternProperties": {pattern: others}, "additionalProperties": False}


def _places(schema: Any, keyword: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(schema, list):
        for number, entry in enumerate(schema):
            yield from _places(entry, keyword, (*path, str(number)))
    elif isinstance(schema, dict):
        if keyword in schema:
            yield (*path, keyword)
        for name, value in schema.items():
            if name in _MAPS and isinstance(value, dict):
                for key, each in value.items():
                    yield from _places(each, keyword, (*path, name, key))
            elif name in _SCHEMAS:
                yield from _places(value, keyword, (*path, name))


def _counted(schema: Any) -> Iterator[tuple[int, int]]:
    """For each schema within ``schema`` that has ``minProperties``: that, and how many names it requires."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _counted(entry)
    elif isinstance(schema, dict):
        asked, required = schema.get("minProperties"), schema.get("required")
        if isinstance(asked, int | float):
            yield int(min(asked, _MAX_COUNT)), len(set(map(str, required))) if isinstance(required, list) else 0
        for keyword, value in schema.items():
            if keyword not in _DATA:
                yield from _counted(list(value.values()) if keyword in _MAPS and isinstance(value, dict) else value)
