"""Sizes and durations as people write them: the types of settings that hold bytes, GiB or seconds.

A number alone has the unit that the setting names. With a unit behind it, it is converted. Sizes are ``512MiB``,
``1.5G`` or ``2Gi``: as in Kubernetes, ``G`` is 10⁹ and ``Gi`` 2³⁰. Durations are ``500ms``, ``30s`` or ``1h30m``.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

GIB = 1 << 30
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)b?", re.IGNORECASE | re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|min|[smhd])\s*", re.ASCII)
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan|infinity)", re.IGNORECASE | re.ASCII)
_LONGEST = 64  # characters of a value


def read_size(value: object) -> object:
    """Returns the whole bytes of a size with a unit; anything else as it is. Raises ``ValueError`` for an unknown
    unit.
    """
    text = _with_unit(value)
    if text is None:
        return value
    size = _bytes_of(text)
    if size is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with a unit, such as 512MiB, 1.5G or 2Gi")
    return int(size)


def read_gib(value: object) -> object:
    """Returns the GiB of a size with a unit; anything else as it is. Raises ``ValueError`` for an unknown unit."""
    text = _with_unit(value)
    if text is None:
        return value
    size = _bytes_of(text)
    if size is None:
        raise ValueError(f"{text!r} is not a size: write GiB, or a number with a unit, such as 512MiB, 1.5G or 2Gi")
    return float(size / GIB)


def read_duration(value: object) -> object:
    """Returns the seconds of a duration with units; anything else as it is. Raises ``ValueError`` for an unknown
    unit.
    """
    text = _with_unit(value)
    if text is None:
        return value
    seconds = seconds_of(text)
    if seconds is None:
        raise ValueError(f"{text!r} is not a duration: write seconds, or units, such as 500ms, 30s, 5m or 1h30m")
    return seconds


def seconds_of(text: str) -> float | None:
    """Returns the seconds of a duration with units, such as ``1h30m``; None for any other text."""
    if len(text) > _LONGEST or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def _with_unit(value: object) -> str | None:
    """The text of a value that has more than a number in it; None for what pydantic reads by itself."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return None
    text = value.strip()
    return None if not text or _NUMBER.fullmatch(text) else text


def _bytes_of(text: str) -> Fraction | None:
    found = _SIZE.fullmatch(text)
    if found is None or (found["binary"] and not found["prefix"]):
        return None
    base = 1024 if found["binary"] else 1000
    return Fraction(found["number"]) * int(base ** _EXPONENTS[found["prefix"].lower()])


SIZE, GIBIBYTES, DURATION = BeforeValidator(read_size), BeforeValidator(read_gib), BeforeValidator(read_duration)
Bytes = Annotated[int, SIZE]
"""A number of bytes, which may have a unit."""
Gib = Annotated[float, GIBIBYTES]
"""A number of GiB; with a unit, a size of that unit."""
Seconds = Annotated[float, DURATION]
"""A number of seconds; with units, a duration."""
_METAVARS = ((SIZE, "SIZE"), (GIBIBYTES, "GIB"), (DURATION, "SECONDS"))


def unit_metavar(field: FieldInfo) -> str | None:
    """Returns the placeholder of a setting with a unit in the help; None for other settings."""
    found = {*field.metadata, *_validators(field.annotation)}
    return next((metavar for validator, metavar in _METAVARS if validator in found), None)


def _validators(annotation: Any) -> Iterator[Any]:
    """The validators anywhere in a type, such as those of ``Bytes | None``."""
    for part in get_args(annotation):
        if isinstance(part, BeforeValidator):
            yield part
        yield from _validators(part)
