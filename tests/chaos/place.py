"""Where an event id says that its reader stands; ``docs/resuming.md`` tells how it is written."""

import re
from dataclasses import dataclass
from typing import Self

_CHOICE = re.compile(r"-|([0-9]+)(e?)", re.ASCII)


@dataclass(frozen=True)
class Place:
    """For each choice how many tokens were told, -1 before it has begun, and whether its end was; and whether the
    usage was.
    """

    told: tuple[int, ...]
    ended: tuple[bool, ...]
    usage: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ``ValueError``."""
        words = [_CHOICE.fullmatch(word) for word in text.removesuffix("u").split(".")]
        matches = [word for word in words if word is not None]
        if len(matches) < len(words):
            raise ValueError(f"{text!r} is no place")
        told = tuple(int(match[1] or -1) for match in matches)
        return cls(told, tuple(match[2] == "e" for match in matches), text.endswith("u"))

    def follows(self, before: Self) -> bool:
        """Whether it is another place of the same answer, and not before that one for any choice."""
        pairs = [*zip(self.told, before.told, strict=False), *zip(self.ended, before.ended, strict=False)]
        onwards = all(now >= then for now, then in pairs) and self.usage >= before.usage
        return onwards and self != before and len(self.told) == len(before.told)
