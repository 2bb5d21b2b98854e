"""Patterns of JSON Schema: ``parse_pattern`` reads one, in ECMAScript syntax, as an expression that matches the whole
text. Constructs without a finite automaton (look-around, back-references, word boundaries) are refused.
"""

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

from quire_engine.structured_output.expressions import (
    ANYTHING,
    EMPTY,
    MAX_CODE_POINT,
    SURROGATES,
    Anchor,
    Characters,
    Choice,
    Expression,
    InOrder,
    PatternError,
    Ranges,
    Repeat,
    complement,
    normal,
)

_MAX_DEPTH = 60
_MAX_COUNT = 100_000
_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = (
    *((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_NOT_A_LINE_BREAK = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
_CLASSES = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": complement(_DIGIT),
    "W": complement(_WORD),
    "S": complement(_SPACE),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


@lru_cache(maxsize=16)
def _category(name: str) -> Ranges:
    """Returns the characters of a general category of Unicode, such as ``L`` or ``Nd``."""
    found = ((code, code) for code in range(MAX_CODE_POINT + 1) if unicodedata.category(chr(code)).startswith(name))
    ranges = normal(tuple(found))
    if not ranges or len(name) > 2 or name.startswith("Cs"):
        raise PatternError(f"\\p{{{name}}} is not supported")
    return tuple(each for each in ranges if each != SURROGATES)


class _PatternReader:
    """Reads one pattern from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Expression:
        """Returns the whole pattern as an expression."""
        expression = self._choice()
        if self._at < len(self._text):
            raise PatternError("a bracket is closed that was not opened")
        return expression

    def _takes(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expression:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else InOrder(tuple(parts))

    def _one(self) -> Expression:
        character = self._take()
        if character in "^$":
            return Anchor(character == "^")
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._set())
        if character == ".":
            return Characters(_NOT_A_LINE_BREAK)
        if character in "*+?":
            raise PatternError("nothing is repeated")
        return Characters(self._escape() if character == "\\" else _single(ord(character)))

    def _group(self) -> Expression:
        if self._takes("?"):
            if any(self._takes(mark) for mark in ("=", "!", "<=", "<!")):
                raise PatternError("look-around is not supported")
            if self._takes("P<") or self._takes("<"):
                while self._take() != ">":
                    pass
            elif not self._takes(":"):
                raise PatternError("flags are not supported")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError("it is nested too deeply")
        inner = self._choice()
        if not self._takes(")"):
            raise PatternError("unclosed group")
        self._depth -= 1
        return inner

    def _repeated(self, part: Expression) -> Expression:
        if (bounds := self._bounds()) is not None:
            least, most = bounds
            if isinstance(part, Anchor):
                raise PatternError("an anchor is repeated")
            if most is not None and most < least:
                raise PatternError("a repetition has its bounds in the wrong order")
            self._takes("?")
            part = Repeat(part, least, most)
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(mark):
                return bounds
        begin = self._at
        if self._takes("{"):
            least, comma = self._digits(), self._takes(",")
            most = self._digits() if comma else least
            if least is not None and self._takes("}"):
                return least, most
        self._at = begin
        return None

    def _digits(self) -> int | None:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        text = self._text[begin : self._at]
        if len(text) > len(str(_MAX_COUNT)) or (text and int(text) > _MAX_COUNT):
            raise PatternError("a repetition is too long")
        return int(text) if text else None

    def _set(self) -> Ranges:
        negated, ranges = self._takes("^"), list[tuple[int, int]]()
        while not self._takes("]"):
            low = self._member()
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][0]:
                    raise PatternError("a range of characters has no such order")
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges += low
        return complement(tuple(ranges)) if negated else normal(tuple(ranges))

    def _member(self) -> Ranges:
        character = self._take()
        if character != "\\":
            return _single(ord(character))
        return _single(8) if self._takes("b") else self._escape()

    def _escape(self) -> Ranges:
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in "pP":
            return self._property(negated=character == "P")
        if character in _CONTROLS:
            return _single(_CONTROLS[character])
        if character == "x":
            return _single(self._hex(2))
        if character == "u":
            return _single(self._code_point())
        if character.isdigit() or character == "k":
            raise PatternError("backreferences are not supported")
        if character in "bB":
            raise PatternError("word boundaries are not supported")
        if character.isalpha():
            raise PatternError(f"\\{character} is not supported")
        return _single(ord(character))

    def _property(self, *, negated: bool) -> Ranges:
        if not self._takes("{"):
            name = self._take()
        else:
            end = self._text.find("}", self._at)
            name, self._at = self._text[self._at : max(end, self._at)], max(end, self._at) + 1
        ranges = _category(name.rpartition("=")[2])
        return complement(ranges) if negated else ranges

    def _code_point(self) -> int:
        if self._takes("{"):
            end = self._text.find("}", self._at)
            digits, self._at = self._text[self._at : max(end, self._at)], max(end, self._at) + 1
            return _checked(digits)
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._takes("\\u"):
            low = self._hex(4)
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code

    def _hex(self, length: int) -> int:
        digits, self._at = self._text[self._at : self._at + length], self._at + length
        return _checked(digits if len(digits) == length else "")


def _checked(digits: str) -> int:
    try:
        code = int(digits, 16)
    except ValueError:
        raise PatternError("an escape has no such digits") from None
    if not 0 <= code <= MAX_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]:
        raise PatternError("an escape is not a character")
    return code


def _single(code: int) -> Ranges:
    return ((code, code),)


def parse_pattern(text: str) -> Expression:
    """Returns the expression of the whole texts in which ``text`` finds a match. Raises ``PatternError``."""
    return _found(_PatternReader(text).read())


def _found(expression: Expression) -> Expression:
    """Turns an expression that is searched in a text into one of the whole text, according to the anchors at its
    ends.
    """
    options: list[Expression] = []
    for begun, rest in _split(expression, begins=True):
        for ended, middle in _split(rest, begins=False):
            _check_no_anchor(middle)
            parts = [] if begun else [ANYTHING]
            options.append(InOrder((*parts, middle, *([] if ended else [ANYTHING]))))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _split(expression: Expression, *, begins: bool) -> list[tuple[bool, Expression]]:
    """Splits an expression into its alternatives with an anchor at this end (which is removed), and the others."""
    with_anchor, without = list[Expression](), list[Expression]()
    for anchored, each in _alternatives(expression, begins):
        (with_anchor if anchored else without).append(each)
    return [
        (anchored, options[0] if len(options) == 1 else Choice(tuple(options)))
        for anchored, options in ((True, with_anchor), (False, without))
        if options
    ]


def _alternatives(expression: Expression, begins: bool) -> Iterator[tuple[bool, Expression]]:
    match expression:
        case Anchor():
            yield (True, EMPTY) if expression.begins is begins else (False, expression)
        case Choice():
            for option in expression.options:
                yield from _alternatives(option, begins)
        case InOrder() if expression.parts:
            parts = expression.parts
            end, rest = (parts[0], parts[1:]) if begins else (parts[-1], parts[:-1])
            if not _has_anchor(end):
                yield False, expression
                return
            for anchored, each in _alternatives(end, begins):
                whole = (each, *rest) if begins else (*rest, each)
                if anchored:  # a second anchor at the same place changes nothing
                    yield from ((True, inner) for _, inner in _alternatives(InOrder(whole), begins))
                else:
                    yield False, InOrder(whole)
        case _:
            yield False, expression


def _has_anchor(expression: Expression) -> bool:
    match expression:
        case Anchor():
            return True
        case InOrder(parts=parts) | Choice(options=parts):
            return any(map(_has_anchor, parts))
        case Repeat(part=part):
            return _has_anchor(part)
    return False


def _check_no_anchor(expression: Expression) -> None:
    if _has_anchor(expression):
        raise PatternError("^ and $ are only supported at the ends of a text")
