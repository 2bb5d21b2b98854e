"""``StreamCursor``: where the reader of an answer stands, as an event id says it. Does no I/O."""

import re
from typing import Self

from quire_router.core.generation import Delta

_CURSOR = re.compile(r"(?:-|[0-9]{1,9}e?)(?:\.(?:-|[0-9]{1,9}e?))*u?", re.ASCII)


class StreamCursor:
    """For each choice how many of its tokens were told, and whether its end was; and whether the usage was.

    Written as ``17`` or ``17e`` for a choice, ``-`` for one that has not begun, with dots between choices, and ``u`` at
    the end once the usage was told. Positions are tokens because they mean the same at every router: the pieces that
    an answer comes in do not.
    """

    __slots__ = ("_delivered", "_ended", "_words", "usage")

    def __init__(self, choices: int) -> None:
        self._delivered: list[int | None] = [None] * choices
        self._ended = [False] * choices
        self._words = ["-"] * choices
        self.usage = False

    @classmethod
    def parse(cls, text: str, choices: int) -> Self:
        """The mark that was written as ``text``; an empty one is the beginning. Raises ``ValueError`` for what is no
        mark of an answer of so many choices.
        """
        mark = cls(choices)
        if not text:
            return mark
        words = text.removesuffix("u").split(".")
        if not _CURSOR.fullmatch(text) or len(words) != choices:
            raise ValueError("this is no place in the answer")
        mark.usage = text.endswith("u")
        for index, word in enumerate(words):
            if word != "-":
                mark._delivered[index] = int(word.removesuffix("e"))
                mark._ended[index] = word.endswith("e")
                mark._write(index)
        return mark

    def __str__(self) -> str:
        return ".".join(self._words) + ("u" if self.usage else "")

    def position(self, index: int) -> int:
        """How many tokens of a choice were told."""
        return self._delivered[index] or 0

    def begun(self, index: int) -> bool:
        """Whether anything of a choice was told, if only that it begins."""
        return self._delivered[index] is not None

    def ended(self, index: int) -> bool:
        """Whether the end of a choice was told."""
        return self._ended[index]

    def slice(self, first: int, choices: int) -> Self:
        """Where the reader stands in so many choices from ``first`` on, as a mark of its own; of the usage it says
        nothing.
        """
        return self.parse(".".join(self._words[first : first + choices]), choices)

    def open(self, index: int) -> None:
        """The choice's beginning was told."""
        if self._delivered[index] is None:
            self._delivered[index] = 0
            self._write(index)

    def advance(self, delta: Delta) -> None:
        """A piece was told, but not the usage in it."""
        index = delta.index
        self._delivered[index] = (self._delivered[index] or 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended[index] = True
        self._write(index)

    def _write(self, index: int) -> None:
        self._words[index] = f"{self._delivered[index]}e" if self._ended[index] else str(self._delivered[index])
