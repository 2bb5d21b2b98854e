"""Structured output: the five kinds of grammar that a request can constrain its output to."""

import json
from dataclasses import dataclass
from enum import StrEnum

from quire_proto.errors import invalid

MAX_TEXT = 1 << 16
MAX_OPTIONS = 1024
AVOID = "x-avoid"
"""A key of a whole schema: texts that no string and no name may contain as it is written."""


class StructuredKind(StrEnum):
    """The kind of grammar, which says what ``Structured.text`` is."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structured:
    """A grammar that constrains an output.

    ``text`` is empty for JSON_OBJECT (any JSON object), a JSON Schema, a regular expression that the whole output
    matches, a JSON array of strings of which the output is one, or a context-free grammar in Lark's notation. Equal
    values mean equal grammars, so it is the key of compiled grammars. Raises ``QuireError`` INVALID if the text is too
    long, empty for a kind that needs one, or not such an array.
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
        """The REST name of the parameter that sets it."""
        json_kinds = (StructuredKind.JSON_OBJECT, StructuredKind.JSON_SCHEMA)
        return "response_format" if self.kind in json_kinds else str(self.kind)

    @property
    def options(self) -> list[str]:
        """The strings of a CHOICE."""
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
    """The grammar of a CHOICE between ``options``."""
    return Structured(StructuredKind.CHOICE, json.dumps(options, ensure_ascii=False))
