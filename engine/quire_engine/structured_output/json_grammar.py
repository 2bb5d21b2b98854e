"""JSON Schemas as grammars in llguidance's dialect of Lark. ``json_grammar`` writes the nodes of a ``SchemaReader`` as
rules, with a terminal for each string, number and name.

The library can compile schemas itself. But it reads their numbers as doubles, spells one name in several ways, and lets
an object begin a property for which no name is left.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_proto.structured_output import AVOID

from quire_engine.structured_output.expressions import (
    CHARACTER,
    Expression,
    all_texts,
    quoted_regex,
    quoted_text,
    samples,
)
from quire_engine.structured_output.json_numbers import NumberShape
from quire_engine.structured_output.schema_keywords import SchemaError
from quire_engine.structured_output.schema_members import MAX_NAMES
from quire_engine.structured_output.schema_reader import SchemaReader
from quire_engine.structured_output.schema_shapes import (
    ArrayShape,
    LiteralShape,
    NameClass,
    Node,
    ObjectShape,
    Shape,
    TextShape,
    is_possible,
)

# One space, or one line break with indentation: JSON as models write it, without endless whitespace.
WHITESPACE = r"( |\n[ \t]{0,32})"
_HEADER = f'%llguidance {{"ignore_once": true}}\n%ignore /{WHITESPACE}/'
_COMMA = '","'
_MAX_STATES = 4000  # of one object whose properties are counted
MAX_RULES = 8000  # take 0.6 s of processor time, and more memory than a grammar may have
_MAX_CHARS = 1 << 22


def json_grammar(schema: Any) -> str:
    """Returns the grammar of the values of ``schema``. Raises ``SchemaError`` if it cannot be enforced or satisfied,
    and ``RecursionError`` if it is nested too deeply.
    """
    avoid = schema.get(AVOID) if isinstance(schema, Mapping) else None
    marks = [each for each in avoid if isinstance(each, str) and each] if isinstance(avoid, list) else []
    reader = SchemaReader(schema)
    return _Writer(marks).grammar(reader.read(), reader.nodes)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Writer:
    """The rules of one grammar."""

    def __init__(self, avoid: Sequence[str]) -> None:
        self._avoid = avoid
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        self._size = 0

    def grammar(self, root: Node, nodes: Sequence[Node]) -> str:
        """Returns the grammar of ``root``, with a rule for each of ``nodes``. Raises ``SchemaError`` for too many
        rules.
        """
        count = sum(_count_rules(shape) for node in nodes if node.is_possible for shape in node.shapes)
        if count > MAX_RULES:
            raise SchemaError(
                f"it makes a grammar of {count:,} rules, and at most {MAX_RULES:,} are supported: an object with "
                "minProperties or maxProperties has one for each property and each number of properties before it"
            )
        for node in nodes:
            if node.is_possible:
                self._rule(f"n{node.number}", " | ".join(self._options(node)))
        terminals = [f"{name}: {value}" for value, name in self._terminals.items()]
        return "\n".join([_HEADER, f"start: n{root.number}", *self._rules, *terminals])

    def _rule(self, name: str, value: str) -> str:
        self._rules.append(f"{name}: {value}")
        self._size += len(value)
        if self._size > _MAX_CHARS:
            raise SchemaError("it makes a grammar that is too large")
        return name

    def _new_rule(self, value: str) -> str:
        return self._rule(f"r{len(self._rules)}", value)

    def _terminal(self, value: str) -> str:
        if value not in self._terminals:
            self._size += len(value)
            self._terminals[value] = f"T{len(self._terminals)}"
        return self._terminals[value]

    def _options(self, node: Node) -> Iterator[str]:
        """Yields the alternatives of a node: rules of arrays and objects, and one terminal for the rest."""
        scalars: list[str] = []
        for shape in filter(is_possible, node.shapes):
            if isinstance(shape, ArrayShape):
                yield self._array(shape)
            elif isinstance(shape, ObjectShape):
                yield self._object(shape)
            else:
                yield from self._scalar(shape, scalars)
        if scalars:
            yield self._terminal(" | ".join(dict.fromkeys(scalars)))

    def _scalar(self, shape: Shape, scalars: list[str]) -> Iterator[str]:
        """Adds terminals of a shape to ``scalars``. Yields alternatives that are not terminals."""
        if isinstance(shape, LiteralShape):
            for value in shape.values:
                if isinstance(value, list | Mapping):
                    yield " ".join(map(_quoted, self._pieces(value)))
                else:
                    scalars += map(_quoted, self._pieces(value))
        elif isinstance(shape, TextShape):
            scalars.append(self._text(shape))
        elif isinstance(shape, NumberShape):
            literals, regex = shape.literals(), shape.regex()
            if literals is not None:
                scalars += map(_quoted, literals)
            elif regex is not None:
                scalars.append(f"/{regex}/")
            else:
                settings = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
                yield self._new_rule(f"%json {json.dumps({**(shape.schema() or {}), **settings})}")

    def _pieces(self, value: Any) -> Iterator[str]:
        """Yields the texts of a value, between which whitespace is allowed."""
        if isinstance(value, Mapping):
            yield "{"
            for place, (name, each) in enumerate(value.items()):
                yield from ([","] if place else [])
                yield self._string(name)
                yield ":"
                yield from self._pieces(each)
            yield "}"
        elif isinstance(value, list):
            yield "["
            for place, each in enumerate(value):
                yield from ([","] if place else [])
                yield from self._pieces(each)
            yield "]"
        else:
            yield self._string(value) if isinstance(value, str) else json.dumps(value)

    def _string(self, text: str) -> str:
        """Returns a string in JSON, with escapes for texts that must be avoided."""
        written = quoted_text(text)
        for mark in self._avoid:
            written = written.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")
        return written

    def _text(self, shape: TextShape) -> str:
        parts = [f'/"{quoted_regex(each)}"/' for each in shape.expressions]
        if not parts or shape.least or shape.most is not None:
            bounds = f"{shape.least},{'' if shape.most is None else shape.most}"
            parts.append(f'/"{CHARACTER}{{{bounds}}}"/')
        if self._avoid and shape.expressions:
            known = [text for each in shape.expressions for text in samples(each) if shape.accepts(text)]
            if known and not any(self._is_plain(text) for text in known):
                raise SchemaError(f"pattern is not supported where it asks for {self._avoid[0]}")
        return " & ".join([*parts, *self._exclusions()])

    def _is_plain(self, text: str) -> bool:
        return not any(mark in quoted_text(text) for mark in self._avoid)

    def _exclusions(self) -> Iterator[str]:
        for mark in self._avoid:
            yield f"~/(?s:.*){_literal_regex(mark)}(?s:.*)/"

    # Arrays

    def _array(self, shape: ArrayShape) -> str:
        impossible = (place for place, each in enumerate(shape.first) if not each.is_possible)
        first = shape.first[: next(impossible, len(shape.first))]
        ends = [] if shape.most is None else [shape.most]
        if len(first) < len(shape.first) or not shape.rest.is_possible:
            ends.append(len(first))
        most = min(ends, default=None)
        first = first[:most]
        following = self._more_items(shape, len(first), most)
        for place in range(len(first) - 1, -1, -1):
            comma = '"," ' if place else ""
            empty = ' | ""' if place >= shape.least else ""
            following = self._new_rule(f"{comma}n{first[place].number} {following}{empty}")
        return f'"[" {following} "]"'

    def _more_items(self, shape: ArrayShape, count: int, most: int | None) -> str:
        """Returns the rule for the items after the first ``count``."""
        item, least = f"n{shape.rest.number}", max(0, shape.least - count)
        left = None if most is None else most - count
        if left == 0:
            return '""'
        if count:
            return _times(f"({_COMMA} {item})", least, left)
        several = f"{item} {_times(f'({_COMMA} {item})', max(0, least - 1), None if left is None else left - 1)}"
        return several if least else f"({several})?"

    # Objects

    def _object(self, shape: ObjectShape) -> str:
        members = [
            (f'{_quoted(self._string(name))} ":" n{node.number}', name in shape.required)
            for name, node in shape.properties.items()
            if node.is_possible
        ]
        others = [each for each in shape.others if each.value.is_possible]
        other = ""
        if others:
            own = list(shape.properties)
            other = self._new_rule(" | ".join(f'{self._name(each, own)} ":" n{each.value.number}' for each in others))
        top = _max_counted(shape, len(members))
        if top * len(members) > _MAX_STATES:
            raise SchemaError("minProperties and maxProperties are not supported for that many properties")
        ways: list[str | None] = [self._more_members(shape, other, count) for count in range(top + 1)]
        for place in range(len(members) - 1, -1, -1):
            member, is_required = members[place]
            ways = [
                self._from_member(member, is_required, shape, ways, count) for count in range(min(place, top) + 1)
            ] + [None] * max(0, top - place)
        return f'"{{" {ways[0]} "}}"'

    def _from_member(
        self, member: str, is_required: bool, shape: ObjectShape, ways: Sequence[str | None], count: int
    ) -> str | None:
        """Returns the rule of this member and the following ones, after ``count`` members; None if no completion
        exists.
        """
        options = []
        after = ways[min(count + 1, len(ways) - 1)]
        if after is not None and (shape.most is None or count < shape.most):
            comma = '"," ' if count else ""
            options.append(f"{comma}{member} {after}")
        without = ways[count]
        if not is_required and without is not None:
            options.append(without)
        return self._new_rule(" | ".join(options)) if options else None

    def _more_members(self, shape: ObjectShape, other: str, count: int) -> str | None:
        """Returns the rule for properties after the object's own members, of which it has ``count``; None if no
        completion exists. Names may repeat, so only one of the other properties is sure to count.
        """
        least = max(0, shape.least - count)
        left = None if shape.most is None else shape.most - count
        if least > bool(other) or (left is not None and left < least):
            return None
        if not other or left == 0:
            return '""'
        if count:
            return _times(f"({_COMMA} {other})", least, left)
        several = f"{other} {_times(f'({_COMMA} {other})', 0, None if left is None else left - 1)}"
        return several if least else f"({several})?"

    def _name(self, each: NameClass, own: Sequence[str]) -> str:
        """Returns the terminal of the names in a class."""
        if len(each.within) == 1 and not each.without:
            texts = all_texts(each.within[0], MAX_NAMES)
            if texts is not None:
                return self._terminal(" | ".join(_quoted(self._string(text)) for text in texts if text not in own))
        parts = [_name_regex(expression) for expression in each.within] or [f'/"{CHARACTER}*"/']
        parts += [f"~{_name_regex(expression)}" for expression in each.without]
        if own:
            parts.append(f"~({' | '.join(_quoted(quoted_text(name)) for name in own)})")
        return self._terminal(" & ".join([*parts, *self._exclusions()]))


def _name_regex(expression: Expression) -> str:
    return f'/"{quoted_regex(expression)}"/'


def _literal_regex(text: str) -> str:
    return "".join(each if each.isalnum() and each.isascii() else f"\\x{{{ord(each):x}}}" for each in text)


def _times(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    if most is None:
        return f"{item}*" if least == 0 else f"{item}{{{least},}}"
    return f"{item}{{{least},{most}}}"


def _count_rules(shape: Shape) -> int:
    """Returns how many rules a shape needs at most, in addition to its nodes' rules."""
    if isinstance(shape, ArrayShape):
        return len(shape.first)
    if not isinstance(shape, ObjectShape):
        return 0
    num_members = sum(node.is_possible for node in shape.properties.values())
    top = _max_counted(shape, num_members)
    most = top if shape.most is None else min(top, shape.most)
    return 1 + sum(min(place, most) + 1 for place in range(num_members))


def _max_counted(shape: ObjectShape, num_members: int) -> int:
    """Returns up to which number properties have to be counted: 1 to know if there is one, or the bounds."""
    is_counted = shape.least or shape.most is not None
    return min(num_members, max(shape.least, shape.most or 0) + 1 if is_counted else 1)
