"""What an output's text is made of, once its marks are read: thoughts, content, and calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(slots=True)
class Content:
    """Text that is meant for the reader. Never empty."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text that the model thinks before it answers. Never empty."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A call begins. All ``ToolCallArguments`` until the next one are this call's."""

    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """The next part of a call's arguments, JSON as the model writes it. Never empty."""

    text: str


OutputPart = Content | Reasoning | ToolCallStart | ToolCallArguments


def merge_adjacent(pieces: Iterable[OutputPart]) -> list[OutputPart]:
    """The same with neighbours of one kind in one piece."""
    result: list[OutputPart] = []
    for kind, group in groupby(pieces, type):
        if kind is ToolCallStart:
            result += group
        else:
            result.append(kind("".join(piece.text for piece in group if not isinstance(piece, ToolCallStart))))
    return result
