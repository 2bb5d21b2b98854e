"""One call as JSON, ``{"name": ..., "arguments": {...}}``: where its parts end, and what it says. Knows none of the
marks that formats put around it.
"""

import json
import re
from collections.abc import Collection

MAX_CALL_CHARS = 65_536  # characters of a call that can only be told when it has ended

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


def parse_call(body: str, names: Collection[str]) -> tuple[str, str] | None:
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
        text.encode()  # halves of surrogate pairs can be escaped in JSON, and cannot be sent
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None


class JsonObjectScanner:
    """Looks for the end of one JSON object in text that comes in pieces, by its brackets alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int, stop: int) -> int | None:
        """Where the object ends between ``start`` and ``stop``, of which nothing else is looked at; None while it goes
        on. What cannot be JSON, because a mark begins outside of its strings, ends it too.
        """
        at = start
        while at < stop:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at, stop)
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
