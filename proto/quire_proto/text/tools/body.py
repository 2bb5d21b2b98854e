"""One call as JSON, ``{"name": ..., "arguments": {...}}``: where it begins, where its parts end, and what it says.
Knows none of the marks that formats put around it.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

LONGEST_HEAD = 512  # characters up to the arguments of a call that is told while it comes
LONGEST_BODY = 65_536  # characters of one that can only be told when it has ended

_GAP = r"[ \t\r\n]*"
_NAME = re.compile(rf'{_GAP}\{{{_GAP}"name"{_GAP}:{_GAP}"([^"\\]*)"')
_ARGUMENTS = re.compile(rf'{_GAP},{_GAP}"(?:arguments|parameters)"{_GAP}:{_GAP}(?=\{{)')
_KEY = re.compile(rf'{_GAP}(?:\{{{_GAP}(?:"([^"]*)"|[^" \t\r\n])|[^{{ \t\r\n])')
_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class Doubt(Enum):
    """What cannot be said of the beginning of a body: nothing yet, or that it is a call that can be told at once."""

    EARLY = auto()
    NO_CALL = auto()


@dataclass(frozen=True, slots=True)
class Head:
    """A call whose arguments begin after ``length`` characters."""

    name: str
    length: int


def read_head(body: str, names: Collection[str]) -> Head | Doubt:
    """The head of a call of one of ``names``; EARLY while it may still become one. A body that says what a call says
    in another order stays EARLY until it can be read as a whole. Looks at ``LONGEST_HEAD`` characters.
    """
    body = body[:LONGEST_HEAD]
    name = _NAME.match(body)
    if name is None:
        key = _KEY.match(body)
        return Doubt.NO_CALL if key is not None and key[1] not in _KEYS else Doubt.EARLY
    if name[1] not in names:
        return Doubt.NO_CALL
    arguments = _ARGUMENTS.match(body, name.end())
    return Doubt.EARLY if arguments is None else Head(name[1], arguments.end())


def read_body(body: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a whole call of one of ``names``, in any order and with arguments as an object, as text
    that holds one, or absent. None for what is no such call.
    """
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        is_text = isinstance(arguments, str)
        is_object = isinstance(json.loads(arguments) if is_text else arguments, dict)
        text = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None


class ObjectEnd:
    """Looks for the end of one JSON object in text that comes in pieces, by its brackets alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Where the object ends in ``text``, of which nothing before ``start`` is looked at; None while it goes on.
        What cannot be JSON, because a mark begins outside of its strings, ends it too.
        """
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            if found[0] == "<":
                return found.start()
            at = found.end()
            self._take(found[0])
            if self._depth == 0 and not self._in_string:
                return at
        return None

    def _take(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in "{[" else -1
