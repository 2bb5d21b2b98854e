"""Limits the size of a grammar after its counts are expanded. ``check_regex`` and ``check_lark`` refuse one that is too
large before it is tried; ``check_size`` does so for the patterns of a schema, from their ``added_by_counts``.

The library expands a repeated text: ``(a{1000}){1000}`` is a text of a million bytes to it, which takes more than a
second. Character classes, and repetitions beyond the least count, cost it nothing, so they count as nothing here.
Invalid grammars are left to the library, which says why.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from quire_engine.structured_output.expressions import Characters, Choice, Expression, InOrder, Repeat

MAX_REPEATED = 50_000  # bytes, in addition to the grammar itself: 0.1 s of processor time
_MAX_DIGITS = 9  # digits of a count; longer ones are cut to this length
_REGEX = re.compile(
    r"\\(?:[pP](?:\{[^}]*(?:\}|\Z)|.)|[dDwWsSbBAzZ])|(?P<char>\\(?:[xuU](?:\{[^}]*(?:\}|\Z)|[0-9A-Fa-f]{2})|.))"
    r"|\[(?P<set>\^?\]?(?:\\.|\[[^\]]*(?:\]|\Z)|[^\]\\\[])*+)(?:\]|\Z)"
    r"|(?P<flags>\(\?[A-Za-z-]+\))|(?P<open>\((?:\?(?:P?<\w*>|[A-Za-z-]*:))?)|(?P<close>\))"
    r"|\{(?P<count>\d+)(?:,\d*)?\}|(?P<other>[*+?.^$|])|(?P<plain>.)",
    re.DOTALL,
)
_ONE = re.compile(r"\\?[^\\^]", re.DOTALL)  # a class with one character is that character
_LARK = re.compile(
    r'//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*+"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])*+"'
    r'|"(?P<text>(?:\\.|[^"\\\n])*+)(?:"|$)|/(?P<regex>(?:\\.|[^/\\\n])++)(?:/[a-z]*|$)'
    r"|(?:\{|~[ \t]*)(?P<count>\d+)|(?P<open>[(\[])|(?P<close>[)\]])|(?P<terminal>_*[A-Z]\w*)|[A-Za-z_]\w*",
    re.MULTILINE,
)
_DEFINITION = re.compile(r"^[ \t]*[!?]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes of an expanded ``text``, and how many of them counts have ``added``."""

    text: int = 0
    added: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.text + other.text, self.added + other.added)

    def times(self, count: int) -> "Size":
        """Returns the size after ``count`` repetitions, but at least one."""
        text = max(1, count) * self.text
        return Size(text, text - self.text + self.added)


class _Sum:
    """The size of a sequence with groups, read from left to right. A count applies to the last element."""

    def __init__(self) -> None:
        self._groups: list[tuple[Size, Size]] = []
        self._before = self._last = Size()

    def add(self, size: Size) -> None:
        self._before, self._last = self._before + self._last, size

    def take(self, found: re.Match[str]) -> bool:
        """Processes a count or a parenthesis. Returns whether it was one."""
        if found["count"]:
            self._last = self._last.times(int(found["count"][:_MAX_DIGITS]))
        elif found["open"]:
            self._groups.append((self._before, self._last))
            self._before = self._last = Size()
        elif found["close"]:
            inner = self.total()
            self._before, self._last = self._groups.pop() if self._groups else (Size(), Size())
            self.add(inner)
        else:
            return False
        return True

    def total(self) -> Size:
        return self._before + self._last


def check_regex(text: str) -> None:
    """Raises ``ValueError`` if counts make a regular expression too large."""
    check_size(_regex_size(text).added)


def added_by_counts(expression: Expression) -> int:
    """Returns the bytes that counts add to a pattern."""
    return _expression_size(expression).added


def check_lark(text: str) -> None:
    """Raises ``ValueError`` if counts make a grammar in Lark's notation too large."""
    found = list(_DEFINITION.finditer(text))
    ends = [each.start() for each in found[1:]] + [len(text)]
    bodies = {each[1]: text[each.end() : end] for each, end in zip(found, ends, strict=False)}
    named = {name: {each["terminal"] for each in _LARK.finditer(body)} & bodies.keys() for name, body in bodies.items()}
    sizes: dict[str, Size] = {}
    try:
        for name in TopologicalSorter(named).static_order():
            sizes[name] = _lark_size(bodies[name], sizes)
    except CycleError:
        return
    largest = max((size.text for size in sizes.values()), default=0)
    check_size(max(largest - len(text), sum(size.added for size in sizes.values())))


def check_size(size: int) -> None:
    """Raises ``ValueError`` if counts add too many bytes."""
    if size > MAX_REPEATED:
        raise ValueError(f"its counts make {size:,} characters of it, and at most {MAX_REPEATED:,} are supported")


def _regex_size(text: str) -> Size:
    total = _Sum()
    for found in _REGEX.finditer(text):
        if total.take(found):
            continue
        if found["char"] or found["plain"] or found["set"] is not None:
            literal = found["plain"] or "x"
            one = found["set"] is None or _ONE.fullmatch(found["set"])
            total.add(Size(len(literal.encode("utf-8", "replace")) if one else 0))
        elif not found["other"] or found["other"] in ".^$|":
            total.add(Size())
    return total.total()


def _lark_size(body: str, known: Mapping[str, Size]) -> Size:
    total = _Sum()
    for found in _LARK.finditer(body):
        if total.take(found):
            continue
        if found["regex"]:
            total.add(_regex_size(found["regex"]))
        elif found["terminal"]:  # expanded at each use, unlike a rule
            total.add(Size(known.get(found["terminal"], Size()).text))
        else:
            total.add(Size(len((found["text"] or "").encode("utf-8", "replace"))))
    return total.total()


def _expression_size(expression: Expression) -> Size:
    match expression:
        case Characters(ranges=((low, high),)) if low == high:
            return Size(len(chr(low).encode("utf-8", "replace")))
        case InOrder(parts=parts) | Choice(options=parts):
            return sum(map(_expression_size, parts), Size())
        case Repeat(part=part, least=least):
            return _expression_size(part).times(least)
    return Size()
