"""The cursor in an event id; ``docs/resuming.md`` defines its form."""

import re
from dataclasses import dataclass
from typing import Self

_CHOICE = re.compile(r"-|([0-9]+)(e?)", re.ASCII)


@dataclass(frozen=True)
class Cursor:
    """For each choice how many tokens were sent, -1 before its first event, and whether its finish reason was; and
    whether the usage was.
    """

    positions: tuple[int, ...]
    ended: tuple[bool, ...]
    usage: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ``ValueError``."""
        words = [_CHOICE.fullmatch(word) for word in text.removesuffix("u").split(".")]
        matches = [word for word in words if word is not None]
        if len(matches) < len(words):
            raise ValueError(f"{text!r} is no cursor")
        positions = tuple(int(match[1] or -1) for match in matches)
        return cls(positions, tuple(match[2] == "e" for match in matches), text.endswith("u"))

    def follows(self, before: Self) -> bool:
        """Whether it is another cursor of the same response, and not behind ``before`` for any choice."""
        pairs = [*zip(self.positions, before.positions, strict=False), *zip(self.ended, before.ended, strict=False)]
        onwards = all(now >= then for now, then in pairs) and self.usage >= before.usage
        return onwards and self != before and len(self.positions) == len(before.positions)
