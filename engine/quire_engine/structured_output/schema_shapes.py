"""The constraints of schemas on values: a ``Node`` is a list of shapes, one for each type and each way to satisfy its
schemas.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_engine.structured_output.expressions import Expression, matches
from quire_engine.structured_output.json_numbers import NumberShape


@dataclass(frozen=True, slots=True)
class LiteralShape:
    """One of ``values``."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TextShape:
    """A string of ``least`` to ``most`` characters that all ``expressions`` match."""

    least: int = 0
    most: int | None = None
    expressions: tuple[Expression, ...] = ()

    def accepts(self, text: str) -> bool:
        """Whether a text satisfies the shape."""
        fits = self.least <= len(text) and (self.most is None or len(text) <= self.most)
        return fits and all(matches(each, text) for each in self.expressions)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """``least`` to ``most`` items: first ``first``, then ``rest``."""

    first: tuple["Node", ...]
    rest: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class NameClass:
    """The names that match all expressions of ``within``, match none of ``without``, and are not an object's own."""

    within: tuple[Expression, ...]
    without: tuple[Expression, ...]
    value: "Node"


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The object's own ``properties`` in their order, then properties of ``others``; ``least`` to ``most`` in all."""

    properties: Mapping[str, "Node"]
    required: frozenset[str]
    others: tuple[NameClass, ...]
    least: int
    most: int | None


Shape = LiteralShape | NumberShape | TextShape | ArrayShape | ObjectShape


@dataclass(eq=False, slots=True)
class Node:
    """The values that satisfy some schemas: all values of its ``shapes``. ``is_possible``: there is at least one."""

    number: int
    shapes: list[Shape] = field(default_factory=list)
    is_possible: bool = False


def is_possible(shape: Shape) -> bool:
    """Whether a value can have the shape, given the nodes found possible so far."""
    match shape:
        case ArrayShape(first=first, rest=rest, least=least):
            return all(each.is_possible for each in first[:least]) and (least <= len(first) or rest.is_possible)
        case ObjectShape():
            return object_fits(shape)
    return True


def object_fits(shape: ObjectShape) -> bool:
    """Whether an object can have the shape: its required properties are possible, and their number fits."""
    if not all(shape.properties[name].is_possible for name in shape.required):
        return False
    own = sum(node.is_possible for node in shape.properties.values())
    more = any(each.value.is_possible for each in shape.others)
    return shape.least <= own + more and (shape.most is None or len(shape.required) <= shape.most)


def type_of(value: Any) -> str:
    """Returns the type of a value in JSON Schema; integers are numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal in JSON: ``1`` equals ``1.0`` but not ``true``."""
    if type_of(one) != type_of(two):
        return False
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    return bool(one == two)


def leaves(value: Any) -> Iterator[Any]:
    """Yields the names and the scalars within a value."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield value
