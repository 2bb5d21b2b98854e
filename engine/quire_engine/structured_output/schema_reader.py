"""Reads JSON Schemas for grammars: ``SchemaReader`` turns schemas that must all hold into a ``Node``, a list of shapes
one of which a value must have.

``allOf``, ``$ref`` and the keywords next to them join schemas. ``anyOf`` and ``oneOf`` multiply the ways to satisfy
them; options of ``oneOf`` are first made mutually exclusive.

Each way is merged exactly: the bounds of numbers, the names of properties and the positions of arrays. Unsatisfiable
parts are thus known before the grammar is written, and a grammar offers only what can be completed. Schemas that cannot
be merged exactly are refused, with the keyword and its place.

Nodes are cached by the schemas that they join, so that reading recursive schemas ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, permutations, product
from typing import Any

from quire_proto.text.schema_references import References, places

from quire_engine.structured_output.expressions import (
    ANY,
    Expression,
    Repeat,
    has_length,
    quoted_text,
    samples,
)
from quire_engine.structured_output.json_formats import FORMATS
from quire_engine.structured_output.json_numbers import (
    INTEGER_DIGITS,
    MAX_REMAINDERS,
    NumberShape,
    exact,
    is_number,
    read_bound,
)
from quire_engine.structured_output.json_patterns import parse_pattern
from quire_engine.structured_output.repetitions import added_by_counts, check_size
from quire_engine.structured_output.schema_choices import TYPES, OverlapError, exclusive
from quire_engine.structured_output.schema_keywords import Schema, SchemaError, unsupported
from quire_engine.structured_output.schema_members import Members, Names, has_name, subsets
from quire_engine.structured_output.schema_shapes import (
    ArrayShape,
    LiteralShape,
    NameClass,
    Node,
    ObjectShape,
    Shape,
    TextShape,
    is_possible,
    leaves,
    same,
    type_of,
)

MAX_WAYS = 512  # to satisfy one schema
MAX_NODES = 6000
MAX_PATTERNS = 3  # of the names in one object
Way = list[Mapping[str, Any]]
"""Schemas whose own keywords must all hold."""
_MAX_PLACE = 200
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMBINING = ("allOf", "anyOf", "oneOf")


class SchemaReader:
    """Reads the schemas within ``root``. ``node`` and ``accepts`` raise ``SchemaError``.

    With ``is_lax``, ``oneOf`` is read as ``anyOf``, so that the reader accepts at least the values that options share.
    """

    def __init__(self, root: Any, *, is_lax: bool = False) -> None:
        self._places = dict(places(root, ()))
        self._references = References(root)
        self._nodes: dict[tuple[int, ...], Node] = {}
        self._unread: list[tuple[Node, list[Any]]] = []
        self._patterns: dict[str, Expression] = {}
        self._added_by_counts = 0
        self._overlaps = None if is_lax else SchemaReader(root, is_lax=True)
        self._exclusive: dict[int, list[Any]] = {}
        self._joined_schemas: list[Any] = []  # keeps them alive: nodes are found by their ids
        self.root = root
        self.reason = ""  # why the first schema that allows no value does not

    def read(self) -> Node:
        """Returns the node of the root. Raises ``SchemaError`` if no value satisfies it."""
        self._check_loops()
        node = self._read([self.root])
        if not node.is_possible:
            raise SchemaError(self.reason or "no value satisfies it: it refers to itself without an end")
        return node

    def _read(self, schemas: Sequence[Any]) -> Node:
        """Returns the node of ``schemas``, after reading all nodes within it."""
        node = self.node(schemas)
        while self._unread:
            next_node, unread = self._unread.pop()
            next_node.shapes += self._shapes(unread)
        self._find_possible()
        return node

    @property
    def nodes(self) -> list[Node]:
        """All nodes."""
        return list(self._nodes.values())

    def node(self, schemas: Sequence[Any]) -> Node:
        """Returns the node of ``schemas``, which must all hold. It is read later."""
        directly = map(self._references.target, schemas)
        joined = {id(each): each for each in directly if each is not True and each != {}}
        key = tuple(joined)
        if key not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                raise SchemaError("its combinations of schemas make a grammar that is too large")
            self._nodes[key] = Node(len(self._nodes))
            self._unread.append((self._nodes[key], list(joined.values())))
        return self._nodes[key]

    def error(self, schema: Any, keyword: str, reason: str) -> SchemaError:
        """Returns the error about a keyword, with its place."""
        place = ".".join((*self._places.get(id(schema), ()), keyword))
        return SchemaError(f"{place[:_MAX_PLACE]} {reason}")

    def accepts(self, schemas: Sequence[Any], value: Any) -> bool:
        """Whether a value satisfies all ``schemas``."""
        return any(self._test_of(way)(value) for way in self._ways(list(schemas)))

    def _impossible(self, schema: Any, keyword: str, reason: str) -> None:
        self.reason = self.reason or f"no value satisfies it: {self.error(schema, keyword, reason)}"

    def _check_loops(self) -> None:
        """Raises ``SchemaError`` for a schema whose validity for a value depends only on itself."""
        done, entered = set[int](), set[int]()
        stack: list[tuple[Any, bool]] = [(schema, False) for schema in self._references.schemas]
        while stack:
            schema, is_left = stack.pop()
            if is_left:
                done.add(id(schema))
                entered.discard(id(schema))
            elif isinstance(schema, list):
                stack += [(each, False) for each in schema]
            elif isinstance(schema, Mapping) and id(schema) not in done:
                if id(schema) in entered:
                    raise self.error(schema, "$ref", "leads back to itself without an end")
                entered.add(id(schema))
                stack.append((schema, True))
                stack += [(schema.get(keyword), False) for keyword in _COMBINING]
                if "$ref" in schema:
                    stack.append((self._references.resolve(schema), False))

    # Ways

    def _ways(self, schemas: list[Any]) -> list[Way]:
        """Returns the ways to satisfy ``schemas``: each is the schemas whose own keywords must all hold."""
        done: list[Way] = []
        open_ways: list[tuple[list[Any], dict[int, Any]]] = [(list(schemas), {})]
        while open_ways:
            pending, taken = open_ways.pop()
            options = self._follow(pending, taken)
            if options is None:
                continue
            if not options:
                done.append(list(taken.values()))
            open_ways += [([option, *pending], dict(taken)) for option in reversed(options)]
            if len(done) + len(open_ways) > MAX_WAYS:
                raise SchemaError("its combinations of anyOf and oneOf make a grammar that is too large")
        return done

    def _follow(self, pending: list[Any], taken: dict[int, Any]) -> list[Any] | None:
        """Takes schemas until it finds options, one of which must hold, and returns them; an empty list if all schemas
        are taken. Returns None if nothing satisfies the schemas.
        """
        while pending:
            schema = pending.pop(0)
            if isinstance(schema, _Options):
                return schema.schemas
            if schema is False:
                return None
            if schema is True or id(schema) in taken:
                continue
            if not isinstance(schema, Mapping):
                raise SchemaError(f"{str(schema)[:40]!r} is not a schema")
            if (found := unsupported(schema)) is not None:
                raise self.error(schema, *found)
            taken[id(schema)] = schema
            pending[:0] = self._joined(schema)
        return []

    def _joined(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        if "$ref" in schema:
            target = self._references.resolve(schema)
            if target is None:
                raise self.error(schema, "$ref", f"leads nowhere: {str(schema['$ref'])[:_MAX_PLACE]}")
            yield target
        for keyword in _COMBINING:
            if keyword in schema:
                options = schema[keyword]
                if not isinstance(options, list) or not options:
                    raise self.error(schema, keyword, "must be a list of schemas")
                if keyword == "allOf":
                    yield from options
                elif keyword == "oneOf" and self._overlaps is not None:
                    yield _Options(self._exclusive_options(schema, self._overlaps))
                else:
                    yield _Options(options)

    def _exclusive_options(self, schema: Mapping[str, Any], overlaps: "SchemaReader") -> list[Any]:
        if id(schema) not in self._exclusive:
            beside = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}

            def join(schemas: Sequence[Any]) -> Node:
                self._joined_schemas += [beside, *schemas]
                return overlaps._read([beside, *schemas])

            try:
                self._exclusive[id(schema)] = exclusive(schema["oneOf"], self._references.target, join)
            except OverlapError as error:
                raise self.error(schema, "oneOf", str(error)) from None
            except SchemaError as error:
                raise self.error(schema, "oneOf", f"has options that may hold for the same values: {error}") from None
        return self._exclusive[id(schema)]

    # Shapes

    def _shapes(self, schemas: list[Any]) -> list[Shape]:
        return [shape for way in self._ways(schemas) for shape in self._shapes_of(way)]

    def _shapes_of(self, way: Way) -> Iterator[Shape]:
        listed = [(schema, keyword) for schema in way for keyword in ("enum", "const") if keyword in schema]
        if listed:
            values = self._listed_values(way, *listed[0])
            if values:
                yield LiteralShape(tuple(values))
            else:
                self._impossible(*listed[0], "has no value that the other keywords allow")
            return
        for kind in self._types(way):
            shape = self._shape_of(kind, way)
            if shape is not None:
                yield shape

    def _listed_values(self, way: Way, schema: Mapping[str, Any], keyword: str) -> list[Any]:
        if keyword == "enum" and (not isinstance(schema["enum"], list) or not schema["enum"]):
            raise self.error(schema, "enum", "must be a list that is not empty")
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        for value in values:
            self._check_value(schema, keyword, value)
        accepts = self._test_of(way, but=(schema, keyword))
        return [value for value in values if accepts(value)]

    def _check_value(self, schema: Mapping[str, Any], keyword: str, value: Any) -> None:
        try:
            for each in leaves(value):
                if is_number(each):
                    exact(each)
                elif isinstance(each, str):
                    quoted_text(each)
        except ValueError as error:
            raise self.error(schema, keyword, str(error)) from None

    def _types(self, way: Way) -> list[str]:
        kinds = dict.fromkeys((*TYPES, "integer"))
        for schema in way:
            if "type" not in schema:
                continue
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            wrong = [each for each in named if each not in (*TYPES, "integer")]
            if wrong or not named:
                raise self.error(schema, "type", f"has no such type: {str(wrong)[:60]}")
            allowed = {*named, "integer"} if "number" in named else set(named)
            kinds = {kind: None for kind in kinds if kind in allowed}
            if not kinds:
                self._impossible(schema, "type", "excludes the types that other keywords allow")
        return [kind for kind in kinds if kind != "integer" or "number" not in kinds]

    def _shape_of(self, kind: str, way: Way) -> Shape | None:
        if kind in ("null", "boolean"):
            return LiteralShape((None,) if kind == "null" else (True, False))
        if kind in ("number", "integer"):
            return self._number(way, is_integer=kind == "integer")
        return {"string": self._text, "array": self._array, "object": self._object}[kind](way)

    def _number(self, way: Way, *, is_integer: bool) -> NumberShape | None:
        shape = NumberShape(step=Fraction(1) if is_integer else None)
        bounds = [(schema, keyword) for schema in way for keyword in _BOUNDS if keyword in schema]
        for schema, keyword in bounds:
            try:
                shape &= read_bound(schema, keyword)
            except ValueError as error:
                raise self.error(schema, keyword, str(error)) from None
        if shape.is_empty:
            if bounds:
                self._impossible(
                    bounds[0][0],
                    " and ".join(keyword for _, keyword in bounds),
                    f"leave no number of at most {INTEGER_DIGITS} digits",
                )
            return None
        if shape.regex() is None and shape.literals() is None and shape.schema() is None:
            schema = next(schema for schema, keyword in bounds if keyword == "multipleOf")
            raise self.error(schema, "multipleOf", f"is only supported up to {MAX_REMAINDERS} of its last digits")
        return shape

    def _count(self, way: Way, least: str, most: str) -> tuple[int, int | None] | None:
        """Returns the bounds of a length or a number of items; None if they exclude each other."""
        low, high = 0, None
        for schema in way:
            for keyword in (least, most):
                value = schema.get(keyword, 0)
                if not is_number(value) or value < 0 or (isinstance(value, float) and not value.is_integer()):
                    raise self.error(schema, keyword, "must be a number of 0 or more")
            low = max(low, int(schema.get(least, 0)))
            if most in schema:
                high = int(schema[most]) if high is None else min(high, int(schema[most]))
        if high is not None and high < low:
            self._impossible(next(each for each in way if most in each), most, f"is below {least}")
            return None
        return low, high

    def _text(self, way: Way) -> TextShape | None:
        count = self._count(way, "minLength", "maxLength")
        if count is None:
            return None
        found: dict[str, tuple[Mapping[str, Any], str]] = {}
        is_listed = any("enum" in schema or "const" in schema for schema in way)  # listed values say more than a format
        for schema in way:
            if "pattern" in schema:
                found[str(schema["pattern"])] = (schema, "pattern")
            if isinstance(schema.get("format"), str) and schema["format"] in FORMATS and not is_listed:
                found[f"^(?:{FORMATS[schema['format']]})$"] = (schema, "format")
        shape = TextShape(*count, tuple(self._pattern(*where, text) for text, where in found.items()))
        if found and not self._has_text(shape, *next(iter(found.values()))):
            self._impossible(*next(iter(found.values())), "matches no text of the length that other keywords allow")
            return None
        return shape

    def _pattern(self, schema: Mapping[str, Any], keyword: str, text: str) -> Expression:
        if text not in self._patterns:
            try:
                self._patterns[text] = parse_pattern(text)
                self._added_by_counts += added_by_counts(self._patterns[text])
                check_size(self._added_by_counts)
            except ValueError as error:
                raise self.error(schema, keyword, f"cannot be used: {error}") from None
        return self._patterns[text]

    def _has_text(self, shape: TextShape, schema: Mapping[str, Any], keyword: str) -> bool:
        """Whether a text has the shape. Raises ``SchemaError`` if that cannot be decided."""
        if len(shape.expressions) == 1:
            return has_length(shape.expressions[0], shape.least, shape.most)
        known = [samples(each) for each in shape.expressions]
        pairs = ("".join(pair) for one, two in permutations(known, 2) for pair in product(one[:8], two[:8]))
        joined = ("".join(texts) for texts in product(*(texts[:2] for texts in known[:8])))
        if any(shape.accepts(text) for text in chain(*known, pairs, joined)):
            return True
        raise self.error(schema, keyword, "is not supported together with the other patterns and formats here")

    def _array(self, way: Way) -> ArrayShape | None:
        count = self._count(way, "minItems", "maxItems")
        if count is None:
            return None
        lists = [self._items(schema) for schema in way]
        longest = max((len(first) for first, _ in lists), default=0)
        first = [
            self.node([first[place] if place < len(first) else rest for first, rest in lists])
            for place in range(longest)
        ]
        return ArrayShape(tuple(first), self.node([rest for _, rest in lists]), *count)

    def _items(self, schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):  # as in older drafts
            first, rest = rest, schema.get("additionalItems", True)
        if not isinstance(first, list):
            raise self.error(schema, "prefixItems", "must be a list of schemas")
        return first, rest

    # Objects

    def _object(self, way: Way) -> ObjectShape | None:
        count = self._count(way, "minProperties", "maxProperties")
        if count is None:
            return None
        maps = [self._members(schema) for schema in way]
        required = list(dict.fromkeys(name for schema in way for name in self._required(schema)))
        allowed = self._property_names(way)
        listed = [name for each in maps for name in each.properties]
        names = dict.fromkeys([*listed, *required, *(allowed.listed or ())])
        properties = {
            name: self.node([part for each in maps for part in each.schemas_of(name)])
            if allowed.accepts(name)
            else self.node([False])
            for name in names
        }
        left_out = next((name for name in required if any(False in each.schemas_of(name) for each in maps)), None)
        if left_out is not None:
            schema = next(schema for schema in way if left_out in self._required(schema))
            self._impossible(schema, "required", f"names {left_out!r}, which no value may have here")
        others = () if allowed.listed is not None else self._others(way, maps, list(names), allowed.expressions)
        if others and count[0] > len(names) + 1:
            schema = max(way, key=lambda each: each.get("minProperties", 0))
            raise self.error(schema, "minProperties", "is only supported for one property more than are listed by name")
        return ObjectShape(properties, frozenset(required), others, *count)

    def _property_names(self, way: Way) -> Names:
        schemas = [schema["propertyNames"] for schema in way if "propertyNames" in schema]
        if not schemas:
            return Names()
        shapes = [shape for each in self._ways(schemas) for shape in self._shapes_of(each)]
        values = [value for shape in shapes if isinstance(shape, LiteralShape) for value in shape.values]
        listed = [value for value in values if isinstance(value, str)]
        texts = [shape for shape in shapes if isinstance(shape, TextShape)]
        if not texts:
            return Names(tuple(listed))
        if len(texts) > 1 or listed:
            schema = next(schema for schema in way if "propertyNames" in schema)
            raise self.error(schema, "propertyNames", "is only supported for a list of names, or one pattern or length")
        return Names(None, (*texts[0].expressions, Repeat(ANY, texts[0].least, texts[0].most)))

    def _members(self, schema: Mapping[str, Any]) -> Members:
        for keyword in ("properties", "patternProperties"):
            if not isinstance(schema.get(keyword, {}), Mapping):
                raise self.error(schema, keyword, "must be an object of schemas")
        patterns = {
            text: (self._pattern(schema, "patternProperties", text), value)
            for text, value in schema.get("patternProperties", {}).items()
        }
        return Members(schema.get("properties", {}), patterns, schema.get("additionalProperties", True))

    def _required(self, schema: Mapping[str, Any]) -> list[str]:
        required = schema.get("required", [])
        if isinstance(required, bool):  # as in the third draft
            return []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self.error(schema, "required", "must be a list of names")
        return required

    def _others(
        self, way: Way, maps: list[Members], names: list[str], allowed: tuple[Expression, ...]
    ) -> tuple[NameClass, ...]:
        """Returns the classes of names that the object does not list, by the patterns that they match."""
        patterns = {text: expression for each in maps for text, (expression, _) in each.patterns.items()}
        if len(patterns) > MAX_PATTERNS:
            schema = next(schema for schema in way if schema.get("patternProperties"))
            raise self.error(schema, "patternProperties", f"is only supported for {MAX_PATTERNS} patterns")
        classes = []
        for chosen in subsets(list(patterns)):
            schemas = [part for each in maps for part in each.schemas_by(chosen)]
            if any(part is False for part in schemas):
                continue
            within = (*(patterns[text] for text in chosen), *allowed)
            without = tuple(each for text, each in patterns.items() if text not in chosen)
            if has_name(within, without, names):
                classes.append(NameClass(within, without, self.node(schemas)))
        return tuple(classes)

    # Values

    def _test_of(self, way: Way, but: tuple[Schema, str] | None = None) -> Callable[[Any], bool]:
        """Returns a test of whether a value satisfies a way; the keyword ``but`` is known to hold."""
        lists = [
            schema[keyword] if keyword == "enum" else [schema[keyword]]
            for schema in way
            for keyword in ("enum", "const")
            if keyword in schema and not (but and schema is but[0] and keyword == but[1])
        ]
        scalars: dict[str, Shape | None] = {}
        kinds = self._types(way)

        def fits(kind: str, value: Any) -> bool:
            if type_of(value) != ("number" if kind == "integer" else kind):
                return False
            if isinstance(value, list | Mapping):
                return self._array_accepts(way, value) if isinstance(value, list) else self._object_accepts(way, value)
            if kind not in scalars:
                scalars[kind] = self._shape_of(kind, way)
            shape = scalars[kind]
            if isinstance(shape, TextShape):
                return shape.accepts(value)
            return shape.accepts(value) if isinstance(shape, NumberShape) else isinstance(shape, LiteralShape)

        def accepts(value: Any) -> bool:
            return all(any(same(value, each) for each in values) for values in lists) and any(
                fits(kind, value) for kind in kinds
            )

        return accepts

    def _array_accepts(self, way: Way, value: list[Any]) -> bool:
        count = self._count(way, "minItems", "maxItems")
        if count is None or len(value) < count[0] or (count[1] is not None and len(value) > count[1]):
            return False
        lists = [self._items(schema) for schema in way]
        return all(
            self.accepts([first[place] if place < len(first) else rest for first, rest in lists], each)
            for place, each in enumerate(value)
        )

    def _object_accepts(self, way: Way, value: Mapping[str, Any]) -> bool:
        count = self._count(way, "minProperties", "maxProperties")
        if count is None or len(value) < count[0] or (count[1] is not None and len(value) > count[1]):
            return False
        if not all(name in value for schema in way for name in self._required(schema)):
            return False
        maps, allowed = [self._members(schema) for schema in way], self._property_names(way)
        return all(map(allowed.accepts, value)) and all(
            self.accepts([part for each in maps for part in each.schemas_of(name)], item)
            for name, item in value.items()
        )

    # Possible values

    def _find_possible(self) -> None:
        """Marks the nodes that some value satisfies. Repeats until nothing changes."""
        changed = True
        while changed:
            changed = False
            for node in self._nodes.values():
                if not node.is_possible and any(map(is_possible, node.shapes)):
                    node.is_possible = changed = True


@dataclass(frozen=True, slots=True)
class _Options:
    """Schemas one of which must hold."""

    schemas: list[Any]
