"""What an output must look like: the five kinds of grammar that a request can ask for."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_proto.errors import invalid

MAX_TEXT = 1 << 16
MAX_OPTIONS = 1024


class StructuredKind(StrEnum):
    """How ``Structured.text`` is read."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structured:
    """A grammar to hold an output to.

    ``text`` is empty for JSON_OBJECT (any JSON object), a JSON Schema, a regular expression that the whole output
    matches, a JSON array of strings of which the output is one, or a context-free grammar in Lark's notation. Equal
    values mean equal grammars, so it is the key of what was compiled. Raises ``QuireError`` INVALID for a text that is
    too long, empty where it may not be, or no such array.
    """

    kind: StructuredKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise invalid(self.param, f"{self.kind} has {len(self.text)} characters but must have at most {MAX_TEXT}.")
        if self.kind is StructuredKind.JSON_OBJECT:
            if self.text:
                raise invalid(self.param, "json_object takes no schema; use json_schema.")
        elif not self.text:
            raise invalid(self.param, f"{self.kind} is empty.")
        if self.kind is StructuredKind.CHOICE:
            self._check_options()

    @property
    def param(self) -> str:
        """What REST calls the parameter that asked for it."""
        json_kinds = (StructuredKind.JSON_OBJECT, StructuredKind.JSON_SCHEMA)
        return "response_format" if self.kind in json_kinds else str(self.kind)

    @property
    def options(self) -> list[str]:
        """What a CHOICE chooses from."""
        options: list[str] = json.loads(self.text)
        return options

    def _check_options(self) -> None:
        try:
            options = json.loads(self.text)
        except ValueError:
            options = None
        if not (isinstance(options, list) and all(isinstance(option, str) and option for option in options)):
            raise invalid(self.param, "choice must be a list of strings, none of them empty.")
        if not 1 <= len(options) <= MAX_OPTIONS:
            raise invalid(self.param, f"choice must have 1 to {MAX_OPTIONS} entries.")


def choice(options: list[str]) -> Structured:
    """One of these strings."""
    return Structured(StructuredKind.CHOICE, json.dumps(options, ensure_ascii=False))
