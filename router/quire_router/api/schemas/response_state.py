"""``ResponseState``: what is stored of a response of the Responses API beside its tokens, so that it can be written
again, and its conversation go on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from quire_router.api.schemas.response_items import name_in_template

INCLUDES_ENCRYPTED_CONTENT: Final = "encrypts"
"""The field that says whether reasoning comes as ``encrypted_content`` too; no response has it."""


@dataclass(frozen=True, slots=True)
class ResponseState:
    """What is stored of a response beside its tokens. ``repeated`` are the fields of its request that it repeats, and
    ``items`` its conversation without its own output; None where it is not to be gone on from.
    """

    repeated: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]] | None

    def to_text(self) -> str:
        """Returns two lines of JSON, the fields and the items: only who goes on from it reads the second."""
        items = "" if self.items is None else _json(self.items)
        return f"{_json(self.repeated)}\n{items}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns what was written as ``text``. Raises ``ValueError`` for what ``to_text`` has not written."""
        fields, mark, items = text.partition("\n")
        repeated = json.loads(fields) if mark else None
        listed = json.loads(items) if items else None
        if not isinstance(repeated, dict) or not isinstance(listed, list | None):
            raise ValueError("this is not the state of a response")
        return cls(repeated, listed)

    @classmethod
    def read_repeated(cls, text: str) -> Self:
        """As ``read``, without the items."""
        fields, mark, _ = text.partition("\n")
        return cls.read(fields + mark)

    @property
    def includes_encrypted_content(self) -> bool:
        """Whether reasoning comes as ``encrypted_content`` too."""
        return self.repeated.get(INCLUDES_ENCRYPTED_CONTENT) is True

    @property
    def is_summarized(self) -> bool:
        """Whether reasoning comes as its summary."""
        options = self.repeated.get("reasoning")
        return isinstance(options, dict) and options.get("summary") is not None

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """The namespaces of functions that have one, and their names in it, by their names in the template."""
        listed = self.repeated.get("tools")
        spaces = [tool for tool in listed if tool.get("tools")] if isinstance(listed, list) else []
        return {
            name_in_template(space["name"], tool["name"]): (space["name"], tool["name"])
            for space in spaces
            for tool in space["tools"]
        }

    @property
    def response_fields(self) -> dict[str, Any]:
        """The fields that the response has."""
        return {name: value for name, value in self.repeated.items() if name != INCLUDES_ENCRYPTED_CONTENT}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
