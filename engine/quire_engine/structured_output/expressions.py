"""Regular expressions as data: the texts that an expression matches, and their spelling in JSON. Each character has one
spelling, so that sets of JSON strings can be intersected and subtracted as texts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product

Ranges = tuple[tuple[int, int], ...]
MAX_CODE_POINT = 0x10FFFF
_MAX_LENGTH = 4096  # of texts whose lengths are counted
SURROGATES = (0xD800, 0xDFFF)
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\\\"}
"""The regular expression after the backslash, for characters with a short escape in JSON."""
_ESCAPED = (*range(32), 34, 92)
_ESCAPES = r'\\["\\bfnrt]|\\u00(?:0[0-7be-f]|1[0-9a-f])'
CHARACTER = rf'(?:[^"\\\x00-\x1f]|{_ESCAPES})'
"""Any character of a JSON string."""


class PatternError(ValueError):
    """A pattern or a text that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character from these ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class InOrder:
    """Expressions one after another."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of several expressions."""

    options: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An expression repeated ``least`` to ``most`` times; without a limit if ``most`` is None."""

    part: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    begins: bool


Expression = Characters | InOrder | Choice | Repeat | Anchor
EMPTY = InOrder(())


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    result, at = [], 0
    for low, high in normal((*ranges, SURROGATES)):
        if at < low:
            result.append((at, low - 1))
        at = high + 1
    if at <= MAX_CODE_POINT:
        result.append((at, MAX_CODE_POINT))
    return tuple(result)


def normal(ranges: Ranges) -> Ranges:
    """Returns the ranges sorted and without overlaps."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


ANY = Characters(complement(()))
ANYTHING = Repeat(ANY, 0, None)


# What an expression matches


def matches(expression: Expression, text: str) -> bool:
    """Whether the expression matches the whole ``text``."""
    return len(text) in _ends(expression, text, frozenset([0]))


def _ends(expression: Expression, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Returns the positions at which the expression may end in ``text`` if it begins at one of ``starts``."""
    match expression:
        case Characters(ranges=ranges):
            return frozenset(at + 1 for at in starts if at < len(text) and _includes(ranges, ord(text[at])))
        case InOrder(parts=parts):
            for part in parts:
                starts = _ends(part, text, starts) if starts else starts
            return starts
        case Choice(options=options):
            return frozenset().union(*(_ends(option, text, starts) for option in options))
        case Repeat():
            return _repeated_ends(expression, text, starts)
    raise AssertionError(expression)


def _repeated_ends(repeat: Repeat, text: str, starts: frozenset[int]) -> frozenset[int]:
    found = starts if repeat.least == 0 else frozenset[int]()
    count = 0
    while starts and (repeat.most is None or count < repeat.most):
        before, starts, count = starts, _ends(repeat.part, text, starts), count + 1
        if count >= repeat.least:
            if starts <= found:
                break
            found |= starts
        elif starts == before:  # the part also matches the empty text, so more repetitions change nothing
            return found | starts
    return found


def _includes(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def span(expression: Expression) -> tuple[int, float] | None:
    """Returns the lengths of the shortest and of the longest text that the expression matches; None if it matches
    none.
    """
    match expression:
        case Characters(ranges=ranges):
            return (1, 1) if ranges else None
        case InOrder(parts=parts):
            spans = [span(part) for part in parts]
            known = [each for each in spans if each is not None]
            return (sum(low for low, _ in known), sum(high for _, high in known)) if len(known) == len(spans) else None
        case Choice(options=options):
            found = [each for each in map(span, options) if each is not None]
            return (min(low for low, _ in found), max(high for _, high in found)) if found else None
        case Repeat(part=part, least=least, most=most):
            inner = span(part)
            if inner is None:
                return None if least else (0, 0)
            return inner[0] * least, inner[1] * (math.inf if most is None else most) if inner[1] else 0
    raise AssertionError(expression)


def lengths(expression: Expression, most: int) -> int:
    """Returns the lengths of the texts that the expression matches, up to ``most``, as a bit mask."""
    mask = (2 << most) - 1
    match expression:
        case Characters(ranges=ranges):
            return 2 & mask if ranges else 0
        case InOrder(parts=parts):
            return _sums([lengths(part, most) for part in parts], mask)
        case Choice(options=options):
            found = 0
            for option in options:
                found |= lengths(option, most)
            return found
        case Repeat(part=part, least=least, most=highest):
            return _multiples(lengths(part, most), least, highest, mask)
    raise AssertionError(expression)


def _sums(parts: list[int], mask: int) -> int:
    found = 1
    for part in parts:
        total, shift = 0, 0
        while part >> shift:
            step = part >> shift
            shift += (step & -step).bit_length() - 1
            total |= found << shift
            shift += 1
        found = total & mask
    return found


def _multiples(part: int, least: int, most: int | None, mask: int) -> int:
    found, power, count = 1 if least == 0 else 0, 1, 0
    while power and (most is None or count < most):
        before, power, count = power, _sums([power, part], mask), count + 1
        if count >= least:
            if power | found == found:
                break
            found |= power
        elif power == before:
            return found | power
    return found


def has_length(expression: Expression, least: int, most: int | None) -> bool:
    """Whether the expression matches a text of ``least`` to ``most`` characters."""
    known = span(expression)
    if known is None or known[1] < least or (most is not None and known[0] > most):
        return False
    if most is None or any(least <= end <= most for end in known):
        return True
    return lengths(expression, min(most, _MAX_LENGTH)) >> least > 0


def all_texts(expression: Expression, limit: int) -> list[str] | None:
    """Returns every text that the expression matches; None if there are more than ``limit``."""
    match expression:
        case Characters(ranges=ranges):
            count = sum(high - low + 1 for low, high in ranges)
            return [chr(code) for low, high in ranges for code in range(low, high + 1)] if count <= limit else None
        case InOrder(parts=parts):
            return _bounded((all_texts(part, limit) for part in parts), limit)
        case Choice(options=options):
            found: dict[str, None] = {}
            for option in options:
                texts = all_texts(option, limit)
                if texts is None or len(found) + len(texts) > limit:
                    return None
                found |= dict.fromkeys(texts)
            return list(found)
        case Repeat(part=part, least=least, most=most) if most is not None and most <= limit:
            return all_texts(Choice(tuple(InOrder((part,) * count) for count in range(least, most + 1))), limit)
    return None


def _bounded(parts: Iterator[list[str] | None], limit: int) -> list[str] | None:
    found = [""]
    for texts in parts:
        if texts is None or len(found) * len(texts) > limit:
            return None
        found = [begun + text for begun in found for text in texts]
    return list(dict.fromkeys(found))


def samples(expression: Expression, limit: int = 64) -> list[str]:
    """Returns some of the texts that the expression matches."""
    return list(islice(dict.fromkeys(_samples(expression)), limit))


def _samples(expression: Expression) -> Iterator[str]:
    match expression:
        case Characters(ranges=ranges):
            preferred = [code for code in map(ord, "a2A0z-_/ .") if _includes(ranges, code)]
            yield from map(chr, [*preferred[:3], *(low for low, _ in ranges[:2])])
        case InOrder(parts=parts):
            yield from map("".join, islice(product(*(list(islice(_samples(part), 3)) for part in parts)), 256))
        case Choice(options=options):
            for option in options:
                yield from islice(_samples(option), 8)
        case Repeat(part=part, least=least, most=most):
            for count in (least, least + 1, least + 2):
                if most is None or count <= most:
                    yield from (text * count for text in islice(_samples(part), 3))


# As regular expressions of strings in JSON


def quoted_regex(expression: Expression) -> str:
    """Returns the regular expression of the texts in JSON spelling, without the quotes."""
    match expression:
        case Characters(ranges=ranges):
            return _quoted_set(ranges)
        case InOrder(parts=parts):
            return "".join(map(quoted_regex, parts))
        case Choice(options=options):
            return f"(?:{'|'.join(map(quoted_regex, options))})"
        case Repeat(part=part, least=least, most=most):
            return f"(?:{quoted_regex(part)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(expression)


def quoted_text(text: str) -> str:
    """Returns a text in JSON spelling, with quotes. Raises ``PatternError`` for half of a surrogate pair."""
    spelt = []
    for character in text:
        code = ord(character)
        if SURROGATES[0] <= code <= SURROGATES[1]:
            raise PatternError("has half of a surrogate pair")
        spelt.append(_spelling(code)[0] if code in _ESCAPED else character)
    return f'"{"".join(spelt)}"'


def _spelling(code: int) -> tuple[str, str]:
    """Returns the JSON spelling of an escaped character, and the regular expression that matches it."""
    short = _SHORT.get(code)
    text = f"\\{short[-1]}" if short else f"\\u{code:04x}"
    return text, text.replace("\\", "\\\\")


def _quoted_set(ranges: Ranges) -> str:
    if ranges == ANY.ranges:
        return CHARACTER
    escapes = [_spelling(code)[1] for code in _ESCAPED if _includes(ranges, code)]
    plain = complement((*complement(ranges), (0, 31), (34, 34), (92, 92)))
    parts = [f"[{''.join(map(_class_range, plain))}]"] if plain else []
    parts += [_ESCAPES] if len(escapes) == len(_ESCAPED) else escapes
    return f"(?:{'|'.join(parts)})" if parts else r"[^\x00-\x{10ffff}]"


def _class_range(each: tuple[int, int]) -> str:
    low, high = (_class_character(code) for code in each)
    return low if low == high else f"{low}-{high}"


def _class_character(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 128 else f"\\x{{{code:x}}}"
