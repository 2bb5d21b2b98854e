"""Options of ``oneOf`` as options of an ``anyOf``: ``exclusive`` narrows them until no value satisfies two.

A grammar cannot count the options that a value satisfies. Options that overlap are therefore narrowed by a difference:
a property whose values differ becomes required, or a property that only one of them requires is excluded from the
other. Other types that they share are excluded from both. Each value that remains satisfies exactly one option.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from quire_engine.structured_output.schema_shapes import (
    ArrayShape,
    LiteralShape,
    Node,
    ObjectShape,
    Shape,
    TextShape,
    is_possible,
    type_of,
)

TYPES = ("null", "boolean", "number", "string", "array", "object")
Join = Callable[[Sequence[Any]], Node]


class OverlapError(ValueError):
    """Options that cannot be separated; the text says which, and what to do."""


def exclusive(options: Sequence[Any], target: Callable[[Any], Any], join: Join) -> list[Mapping[str, Any]]:
    """Returns ``options``, each with the constraints that separate it from the others. ``target`` follows references.
    ``join`` reads schemas that must all hold. Raises ``OverlapError`` if an option would have no value left.
    """
    name = discriminator([target(option) for option in options])
    if name is not None:
        return [{"allOf": [option, {"required": [name]}]} for option in options]
    narrowed = [[option] for option in options]
    for one, two in combinations(range(len(options)), 2):
        shared = [shape for shape in join([options[one], options[two]]).shapes if is_possible(shape)]
        if not shared:
            continue
        for place, reason in zip((one, two), _apart(options[one], options[two], shared, join), strict=True):
            narrowed[place].append(reason)
            if not join(narrowed[place]).is_possible:
                raise OverlapError(
                    f"has options {one + 1} and {two + 1} that hold for the same values: use anyOf, or make them differ"
                )
    return [{"allOf": schemas} for schemas in narrowed]


def discriminator(options: Sequence[Any]) -> str | None:
    """Returns the property that has different constants in each option, if all options are objects. None if there is
    none.
    """
    if not all(isinstance(option, Mapping) and option.get("type") == "object" for option in options):
        return None
    for name in options[0].get("properties", ()):
        constants = [_constants(option, name) for option in options]
        if all(constants) and len(set().union(*constants)) == sum(map(len, constants)):
            return str(name)
    return None


def _constants(option: Mapping[str, Any], name: str) -> set[str]:
    """Returns the strings that a property may be, if the schema lists them."""
    schema = option.get("properties", {}).get(name)
    if not isinstance(schema, Mapping):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    listed = values if isinstance(values, list) else []
    return set(listed) if all(isinstance(value, str) for value in listed) else set()


def _apart(first: Any, second: Any, shared: Sequence[Shape], join: Join) -> tuple[Any, Any]:
    """Returns the constraints that narrow each of two options so that none of the ``shared`` values is left."""
    kinds = {kind for shape in shared for kind in _types(shape)}
    objects = [shape for shape in shared if isinstance(shape, ObjectShape)]
    is_listed = any(isinstance(shape, LiteralShape) and "object" in _types(shape) for shape in shared)
    apart = _objects_apart(first, second, objects, join) if objects and not is_listed else None
    if apart is not None:
        kinds.discard("object")
    left = [kind for kind in TYPES if kind not in kinds]
    types: Any = ({"type": left} if left else False) if kinds else {}
    one, two = apart or ({}, {})
    return ({"allOf": [one, types]}, {"allOf": [two, types]})


def _types(shape: Shape) -> Collection[str]:
    match shape:
        case LiteralShape(values=values):
            return {type_of(value) for value in values}
        case ObjectShape():
            return {"object"}
        case ArrayShape():
            return {"array"}
        case TextShape():
            return {"string"}
    return {"number"}


def _objects_apart(first: Any, second: Any, shared: Sequence[ObjectShape], join: Join) -> tuple[Any, Any] | None:
    """Returns the constraints that separate the objects of two options; None if there are none."""
    for name in _excluded(shared):  # no object of both has it
        required = {"required": [name]}
        if _has_object(join([first, required])) and _has_object(join([second, required])):
            return required, required
    if not any(node.is_possible for shape in shared for node in shape.properties.values()) and not any(
        each.value.is_possible for shape in shared for each in shape.others
    ):  # only the empty object belongs to both
        return {"minProperties": 1}, {"minProperties": 1}
    ours, theirs = _required(join([first])), _required(join([second]))
    without = next((name for name in theirs if name not in ours), None)
    within = next((name for name in ours if name not in theirs), None)
    if without is None or within is None:
        return None
    return {"properties": {without: False}}, {"properties": {within: False}}


def _excluded(shared: Sequence[ObjectShape]) -> Iterator[str]:
    for name in shared[0].properties:
        nodes = [shape.properties.get(name) for shape in shared]
        if all(node is not None and not node.is_possible for node in nodes):
            yield name


def _has_object(node: Node) -> bool:
    return any(isinstance(shape, ObjectShape) and is_possible(shape) for shape in node.shapes)


def _required(node: Node) -> list[str]:
    """Returns the properties that every object of a node has."""
    objects = [shape for shape in node.shapes if isinstance(shape, ObjectShape) and is_possible(shape)]
    names = objects[0].properties if objects else ()
    return [name for name in names if all(name in each.required for each in objects)]
