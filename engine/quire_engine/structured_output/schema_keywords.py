"""Keywords of JSON Schema that grammars cannot enforce, and the cases in which they constrain nothing."""

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
# Unsupported keywords, each with a predicate of its value and its schema that is True if it constrains nothing.
_UNSUPPORTED: Mapping[str, Callable[[Any, Schema], bool]] = {
    "not": lambda value, _: value is False,
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda _, schema: "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "dependentRequired": lambda value, _: value == {},
    "dependentSchemas": lambda value, _: value == {},
    "dependencies": lambda value, _: value == {},
    "unevaluatedItems": lambda value, _: value in (True, {}),
    "unevaluatedProperties": lambda value, _: value in (True, {}),
    "$dynamicRef": lambda *_: False,
    "$recursiveRef": lambda *_: False,
}
# Advice to clients that use an unsupported keyword.
_INSTEAD = {"uniqueItems": "leave it out, and drop what the answer has twice"}


class SchemaError(ValueError):
    """A schema that cannot be used; the text is a sentence about its keyword."""


def unsupported(schema: Schema) -> tuple[str, str] | None:
    """Returns the first unsupported keyword of ``schema`` that constrains something, and the reason; None if there is
    none.
    """
    for keyword in schema:
        condition = _UNSUPPORTED.get(keyword)
        if condition is not None and not condition(schema[keyword], schema):
            instead = f"; {_INSTEAD[keyword]}" if keyword in _INSTEAD else ""
            return keyword, f"is not supported{instead}"
    return None
