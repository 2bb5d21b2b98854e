"""A range of lengths in tokens, drawn from evenly."""

import random
from typing import NamedTuple


class Lengths(NamedTuple):
    """From ``least`` to ``most``, both included."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> "Lengths":
        """``128`` or ``100..1024``. Raises ``ValueError`` for what is neither."""
        least, _, most = text.partition("..")
        try:
            lengths = cls(int(least), int(most or least))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor a range such as 100..1024.") from None
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"{text!r} must begin at 1 or above, and not end below its beginning.")
        return lengths

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"
