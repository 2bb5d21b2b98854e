"""What an output's text is made of, once its marks are read: thoughts, content, and calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass

SPACE = " \t\r\n"  # what JSON calls white space, and all that formats put around their marks


@dataclass(slots=True)
class Content:
    """Text that is meant for the reader. Never empty."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text that the model thinks before it answers. Never empty."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A call begins. All ``Arguments`` until the next one are this call's."""

    name: str


@dataclass(slots=True)
class Arguments:
    """The next part of a call's arguments, JSON as the model writes it. Never empty."""

    text: str


Piece = Content | Reasoning | CallStart | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind in one piece."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is None or isinstance(piece, CallStart) or isinstance(last, CallStart) or type(piece) is not type(last):
            result.append(piece)
        else:
            result[-1] = type(piece)(last.text + piece.text)
    return result


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of ``text``, which does not hold ``mark``, may belong to it: the longest beginning
    of the mark, and the space before.
    """
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    certain = text if at < 0 else text[:at]
    return len(text) - len(certain.rstrip(SPACE))
