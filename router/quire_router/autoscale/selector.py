"""Label selectors as the Kubernetes API writes them in ``labelSelector``, such as ``model in (a, b), !spare``. Does no
I/O.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

MAX_SELECTOR = 4096  # characters
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_MAX_PREFIX = 253
_TOKEN = re.compile(r"\s*(==|!=|[=!<>(),]|[^\s=!<>(),]+)")
_SIGNS = ("=", "==", "!=", "<", ">", "!", "(", ")", ",")


class SelectorError(ValueError):
    """What was given is no selector. The text is one sentence without its full stop."""


class Operator(Enum):
    """What a requirement says of a label."""

    EXISTS = "exists"
    DOES_NOT_EXIST = "!"
    IN = "in"
    NOT_IN = "notin"
    GREATER = ">"
    LESS = "<"


_SET_OPERATORS = {"in": Operator.IN, "notin": Operator.NOT_IN}
_SIGN_OPERATORS = {
    "=": Operator.IN,
    "==": Operator.IN,
    "!=": Operator.NOT_IN,
    ">": Operator.GREATER,
    "<": Operator.LESS,
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on the label ``key``."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """A label that is not there is in no set, and is no number."""
        value = labels.get(self.key)
        if self.operator is Operator.EXISTS:
            return value is not None
        if self.operator is Operator.DOES_NOT_EXIST:
            return value is None
        if self.operator is Operator.IN:
            return value in self.values
        if self.operator is Operator.NOT_IN:
            return value not in self.values
        return value is not None and self._compares(value)

    def _compares(self, value: str) -> bool:
        number, (bound,) = _integer(value), map(_integer, self.values)
        if number is None or bound is None:
            return False
        return number > bound if self.operator is Operator.GREATER else number < bound


@dataclass(frozen=True, slots=True)
class Selector:
    """Every one of its requirements has to be met; without any, everything is selected."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether something with these labels is selected."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    @classmethod
    def parse(cls, text: str) -> "Selector":
        """Raises ``SelectorError``."""
        if len(text) > MAX_SELECTOR:
            raise SelectorError(f"a selector has at most {MAX_SELECTOR} characters")
        if not text.strip():
            return cls()
        return cls(tuple(_Parser(text).requirements()))


def is_label_value(value: str) -> bool:
    """Whether a label may have this value."""
    return not value or _NAME.fullmatch(value) is not None


class _Parser:
    """Reads requirements off a text, token by token."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        self._place = 0

    def requirements(self) -> list[Requirement]:
        found = [self._requirement()]
        while self._take() == ",":
            found.append(self._requirement())
        self._place -= 1
        self._expect("")
        return found

    def _requirement(self) -> Requirement:
        if self._peek() == "!":
            self._take()
            return Requirement(self._key(), Operator.DOES_NOT_EXIST)
        key = self._key()
        if self._peek() in (",", ""):
            return Requirement(key, Operator.EXISTS)
        return self._comparison(key, self._take())

    def _comparison(self, key: str, word: str) -> Requirement:
        if word in _SET_OPERATORS:
            return Requirement(key, _SET_OPERATORS[word], self._set())
        if word not in _SIGN_OPERATORS:
            raise SelectorError(f"{word!r} is no operator")
        operator, value = _SIGN_OPERATORS[word], self._value()
        if operator in (Operator.GREATER, Operator.LESS) and _integer(value) is None:
            raise SelectorError(f"{value!r} is no integer")
        return Requirement(key, operator, frozenset([value]))

    def _set(self) -> frozenset[str]:
        self._expect("(")
        values = [self._value()]
        while (sign := self._take()) == ",":
            values.append(self._value())
        if sign != ")":
            raise SelectorError("a set of values ends with ')'")
        return frozenset(values)

    def _value(self) -> str:
        """A value, which may be left out."""
        if self._peek() in ("", ",", ")"):
            return ""
        value = self._take()
        if value in _SIGNS or not is_label_value(value):
            raise SelectorError(f"{value!r} cannot be the value of a label")
        return value

    def _key(self) -> str:
        key = self._take()
        prefix, slash, name = key.rpartition("/")
        if not _NAME.fullmatch(name) or (slash and not (len(prefix) <= _MAX_PREFIX and _PREFIX.fullmatch(prefix))):
            raise SelectorError(f"{key!r} cannot be the name of a label")
        return key

    def _expect(self, sign: str) -> None:
        found = self._take()
        if found != sign:
            raise SelectorError(f"{found!r} stands where {sign!r} should" if sign else f"{found!r} is one too many")

    def _peek(self) -> str:
        """The next token; empty where there is none."""
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._place += 1
        return token


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
