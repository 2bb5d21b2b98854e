"""JSON numbers as regular expressions: ``NumberShape`` holds a schema's constraints on a number and writes the texts
that satisfy them.

Bounds are read exactly. An integer may have any size. A float is the decimal of its shortest text, as long as doubles
can distinguish such decimals. Texts have at most ``INTEGER_DIGITS`` and ``FRACTION_DIGITS`` digits, so that no number
is endless. All texts of one shape have the same scale, a power of ten, so that an exclusive bound equals the inclusive
bound of its neighbour.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

INTEGER_DIGITS = 40  # integers of 128 bits have 39
FRACTION_DIGITS = 20
MAX_FRACTION_DIGITS = 60  # if bounds need more than the usual
MAX_LITERALS = 512
# Multiples are recognised with one state per remainder.
MAX_REMAINDERS = 4096
_EXACT = 1 << 53  # up to here a double is the decimal that was written
_MOST = Fraction(10**INTEGER_DIGITS)
_BEYOND = _MOST * 10**99  # beyond every text with an exponent
_ANY = rf"-?(?:0|[1-9][0-9]{{0,{INTEGER_DIGITS - 1}}})(?:\.[0-9]{{1,{FRACTION_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"


def exact(value: float) -> Fraction:
    """Returns the value of a number in a schema. Raises ``ValueError`` if it exceeds a double."""
    if isinstance(value, int):
        return Fraction(value)
    if not math.isfinite(value):
        raise ValueError("has a number that is too large")
    return Fraction(value) if abs(value) >= _EXACT else Fraction(Decimal(repr(value)))


def is_number(value: Any) -> bool:
    """Whether ``value`` is a JSON number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Bound:
    """The end of a range, which includes it unless it is ``exclusive``."""

    value: Fraction
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class NumberShape:
    """A schema's constraints on a number: ``low`` and ``high`` are the tightest bounds, and the number is a multiple of
    ``step``.
    """

    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None

    def __and__(self, other: "NumberShape") -> "NumberShape":
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        steps = [step for step in (self.step, other.step) if step is not None]
        return NumberShape(
            max(lows, key=lambda bound: (bound.value, bound.exclusive), default=None),
            min(highs, key=lambda bound: (bound.value, not bound.exclusive), default=None),
            _common_multiple(steps),
        )

    def accepts(self, value: float) -> bool:
        """Whether a number satisfies the constraints."""
        number, low, high = exact(value), self.low, self.high
        if low is not None and (number < low.value or (low.exclusive and number == low.value)):
            return False
        if high is not None and (number > high.value or (high.exclusive and number == high.value)):
            return False
        return self.step is None or (number / self.step).denominator == 1

    def limits(self) -> tuple[int, int, Fraction]:
        """Returns the least and the greatest multiple of a step that satisfy the constraints, and the step. Without a
        constraint on the step, it is the scale of the texts. The greatest is less than the least if no number satisfies
        them.
        """
        step = self.step or Fraction(1, 10 ** self._fraction_digits())
        low = Bound(-_MOST, exclusive=True) if self.low is None or self.low.value < -_MOST else self.low
        high = Bound(_MOST, exclusive=True) if self.high is None or self.high.value > _MOST else self.high
        least, greatest = math.ceil(low.value / step), math.floor(high.value / step)
        least += low.exclusive and least * step == low.value
        greatest -= high.exclusive and greatest * step == high.value
        return least, greatest, step

    @property
    def is_empty(self) -> bool:
        """Whether no number satisfies the constraints."""
        least, greatest, _ = self.limits()
        return least > greatest

    def literals(self) -> list[str] | None:
        """Returns the texts of the numbers that satisfy the constraints, if they are a few multiples; None if a range
        is shorter to write.
        """
        least, greatest, step = self.limits()
        if self.step is None or _power_of_ten(step) is not None or greatest - least >= MAX_LITERALS:
            return None
        return [_decimal(number * step) for number in range(least, greatest + 1)]

    def regex(self) -> str | None:
        """Returns the regular expression of the texts; None if multiples cannot be written as one."""
        least, greatest, step = self.limits()
        power = _power_of_ten(step)
        above = self.low is None or self.low.value < -_BEYOND
        if self.step is None and above and (self.high is None or self.high.value > _BEYOND):
            return _ANY
        if power is None:
            return None
        return "|".join(_signed(least, greatest, power))

    def schema(self) -> dict[str, Any] | None:
        """Returns a schema of multiples for llguidance, with bounds that are multiples too. None if the library would
        read the numbers differently or need too much time.
        """
        least, greatest, step = self.limits()
        unit = 10 ** _decimals(step)
        ends = {"minimum": least * step, "maximum": greatest * step}
        given = {"minimum": self.low, "maximum": self.high}
        if step * unit > MAX_REMAINDERS or any(abs(end) * unit >= _EXACT for name, end in ends.items() if given[name]):
            return None
        kind = "integer" if unit == 1 else "number"
        return {"type": kind, "multipleOf": _plain(step)} | {
            name: _plain(end) for name, end in ends.items() if given[name]
        }

    def _fraction_digits(self) -> int:
        """Returns the number of digits after the point: enough for the bounds, and few enough for a double to
        distinguish an exclusive bound from the next number.
        """
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        digits = min(MAX_FRACTION_DIGITS, max(FRACTION_DIGITS, *(_decimals(bound.value) for bound in bounds), 0))
        for bound in bounds:
            if abs(bound.value) >= _EXACT:
                digits = 0 if bound.exclusive else digits
            elif bound.exclusive and bound.value:
                digits = min(digits, max(0, -math.ceil(math.log10(math.ulp(float(bound.value))))))
        return digits


def read_bound(schema: Mapping[str, Any], keyword: str) -> NumberShape:
    """Returns the constraint of a keyword of ``schema`` on a number. Raises ``ValueError``."""
    value, old_style = schema[keyword], {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
    if value is False and keyword in old_style:
        return NumberShape()
    if value is True and keyword in old_style:
        value = schema.get(old_style[keyword])
    if not is_number(value):
        raise ValueError("must be a number")
    number = exact(value)
    if keyword == "multipleOf":
        if number <= 0:
            raise ValueError("must be above 0")
        return NumberShape(step=number)
    bound = Bound(number, keyword in old_style)
    return NumberShape(low=bound) if keyword in ("minimum", "exclusiveMinimum") else NumberShape(high=bound)


def _common_multiple(steps: list[Fraction]) -> Fraction | None:
    if len(steps) < 2:
        return steps[0] if steps else None
    one, two = steps
    unit = math.lcm(one.denominator, two.denominator)
    return Fraction(math.lcm(int(one * unit), int(two * unit)), unit)


def _decimals(value: Fraction) -> int:
    """Returns the number of digits after the point; ``MAX_FRACTION_DIGITS`` for an endless fraction."""
    return next((n for n in range(MAX_FRACTION_DIGITS) if 10**n % value.denominator == 0), MAX_FRACTION_DIGITS)


def _power_of_ten(step: Fraction) -> int | None:
    text, places = str(step.numerator), _decimals(step)
    if places and step.numerator * 10**places == step.denominator:
        return -places
    return len(text) - 1 if step.denominator == 1 and text.strip("0") == "1" else None


def _decimal(value: Fraction) -> str:
    places = _decimals(value)
    whole, rest = divmod(abs(value.numerator) * 10**places // value.denominator, 10**places)
    return f"{'-' if value < 0 else ''}{whole}" + (f".{rest:0{places}}" if places else "")


def _plain(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _signed(least: int, greatest: int, power: int) -> Iterator[str]:
    """Yields regular expressions of the numbers from ``least`` to ``greatest``, times ten to the ``power``."""
    if least < 0:
        negative = "|".join(_unsigned(max(1, -greatest), -least, power))
        yield f"-(?:{negative})"
    if greatest >= 0:
        yield from _unsigned(max(0, least), greatest, power)


def _unsigned(least: int, greatest: int, power: int) -> Iterator[str]:
    if power > 0:
        if least == 0:
            yield "0"
        if greatest:
            yield f"(?:{_whole(max(1, least), greatest)}){'0' * power}"
        return
    places = -power
    if places == 0:
        yield _whole(least, greatest)
        return
    first, begin = divmod(least, 10**places)
    last, end = divmod(greatest, 10**places)
    top = 10**places - 1
    if first == last:
        yield str(first) + _fraction(begin, end, places)
        return
    yield str(first) + _fraction(begin, top, places)
    if first + 1 < last:
        yield f"(?:{_whole(first + 1, last - 1)})" + _fraction(0, top, places)
    yield str(last) + _fraction(0, end, places)


def _whole(least: int, greatest: int) -> str:
    """Returns the regular expression of integers without leading zeros."""
    parts, full = [], []
    for length in range(len(str(least)), len(str(greatest)) + 1):
        low, high = max(least, 10 ** (length - 1) if length > 1 else 0), min(greatest, 10**length - 1)
        if length > 1 and low == 10 ** (length - 1) and high == 10**length - 1:
            full.append(length)
        else:
            parts.append(_fixed(low, high, length))
    if full:
        parts.append(f"[1-9][0-9]{{{full[0] - 1},{full[-1] - 1}}}")
    return "|".join(parts)


def _fixed(least: int, greatest: int, length: int) -> str:
    """Returns the regular expression of numbers with exactly ``length`` digits, including leading zeros."""
    if length == 0:
        return ""
    if least == 0 and greatest == 10**length - 1:
        return f"[0-9]{{{length}}}"
    return _digit_by_digit(least, greatest, length, _fixed)


def _digit_by_digit(least: int, greatest: int, length: int, rest: Any) -> str:
    """Returns the regular expression of the first digit and the ``rest`` that may follow it. Groups digits with equal
    rests.
    """
    unit = 10 ** (length - 1)
    groups: dict[str, list[int]] = {}
    for digit in range(least // unit, greatest // unit + 1):
        low, high = max(least - digit * unit, 0), min(greatest - digit * unit, unit - 1)
        groups.setdefault(rest(low, high, length - 1), []).append(digit)
    parts = [f"{_digit_class(digits)}{after}" for after, digits in groups.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _digit_class(digits: list[int]) -> str:
    return str(digits[0]) if len(digits) == 1 else f"[{digits[0]}-{digits[-1]}]"


def _fraction(least: int, greatest: int, places: int) -> str:
    """Returns the regular expression of the point and up to ``places`` digits, for fractions of ``least`` to
    ``greatest`` units of the last place. Optional if the fraction may be zero.
    """
    some = _digit_by_digit(least, greatest, places, _shorter)
    return rf"\.{some}" if least else rf"(?:\.{some})?"


def _shorter(least: int, greatest: int, places: int) -> str:
    """Returns the regular expression of at most ``places`` digits, whose missing digits count as zeros."""
    if places == 0:
        return ""
    if least == 0 and greatest == 10**places - 1:
        return f"[0-9]{{0,{places}}}"
    some = _digit_by_digit(least, greatest, places, _shorter)
    return some if least else f"(?:{some})?"
