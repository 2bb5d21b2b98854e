"""Keywords of JSON Schema that no grammar can enforce, and where they constrain nothing."""

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
# Keywords that are not supported: each with a predicate of its value and its schema that says when it means nothing.
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
# What a client can do instead of using an unsupported keyword.
_INSTEAD = {"uniqueItems": "leave it out, and drop what the answer has twice"}


class SchemaError(ValueError):
    """A schema that cannot be used; the text is a sentence about its keyword."""


def unsupported(schema: Schema) -> tuple[str, str] | None:
    """The first keyword of ``schema`` that constrains and is not supported, and why; None if there is none."""
    for keyword in schema:
        condition = _UNSUPPORTED.get(keyword)
        if condition is not None and not condition(schema[keyword], schema):
            instead = f"; {_INSTEAD[keyword]}" if keyword in _INSTEAD else ""
            return keyword, f"is not supported{instead}"
    return None
