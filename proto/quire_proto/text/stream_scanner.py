"""Text that comes in pieces and is held back until it is known what it is, at the cost of what is looked at: nothing is
copied or searched again because more has come.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

SPACE = " \t\r\n"  # what JSON calls white space, and all that formats put around their marks
MAX_MARKER_SPACE = 4096  # characters of white space that may belong to a mark behind them

_SPACES = re.compile(f"[{SPACE}]*")


class TextBuffer:
    """Text that is kept until it is taken."""

    __slots__ = ("_length", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, text: str) -> None:
        """Keeps ``text`` behind what is kept."""
        if text:
            self._parts.append(text)
            self._length += len(text)

    def take(self) -> str:
        """All of it, which is then no longer kept."""
        if not self._parts:
            return ""
        text = "".join(self._parts)
        self._parts, self._length = [], 0
        return text


class StreamReader:
    """What is to be read: ``text`` from ``at`` on, and then what was put behind it. ``position`` counts the characters
    from the output's beginning to there.
    """

    __slots__ = ("_later", "at", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.position = 0
        self._later: list[tuple[str, int]] = []

    def push(self, text: str) -> None:
        """The next piece; all that came before has been read."""
        self.text, self.at = text, 0

    def more(self) -> bool:
        """Whether there is anything to read at ``at``."""
        while self.at == len(self.text) and self._later:
            self.text, self.at = self._later.pop()
        return self.at < len(self.text)

    def go(self, at: int) -> None:
        """Reads on at ``at``."""
        self.position += at - self.at
        self.at = at

    def take(self, at: int) -> str:
        """The text up to ``at``, where reading goes on."""
        text = self.text[self.at : at]
        self.go(at)
        return text

    def space(self, end: int | None = None) -> int:
        """Where white space that begins here ends, ``end`` at the latest."""
        spaces = _SPACES.match(self.text, self.at, len(self.text) if end is None else end)
        return self.at if spaces is None else spaces.end()

    def put_back(self, text: str) -> None:
        """What was read last is to be read again."""
        if text:
            if self.at < len(self.text):
                self._later.append((self.text, self.at))
            self.text, self.at = text, 0
            self.position -= len(text)


class MarkerSearch:
    """Looks for a mark. ``held`` is the end of what was read, as far as it may be the mark's beginning."""

    __slots__ = ("_mark", "held")

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.held = ""

    def read(self, source: StreamReader, end: int | None = None) -> tuple[str, bool]:
        """Text that is not the mark, and whether the mark stands behind it. Reads all up to ``end``, or to the end of
        the mark, or no more than what it held.
        """
        end = len(source.text) if end is None else end
        if self.held:
            return self._read_on(source, end)
        at = source.text.find(self._mark, source.at, end)
        if at >= 0:
            before = source.take(at)
            source.go(at + len(self._mark))
            return before, True
        text = source.take(end)
        return self._hold(text)

    def take(self) -> str:
        """What is held, which is then no longer held."""
        held, self.held = self.held, ""
        return held

    def _read_on(self, source: StreamReader, end: int) -> tuple[str, bool]:
        """Looks where the mark may have begun before: at what is held and as much of the text as can belong to it."""
        held, stop = self.take(), min(end, source.at + len(self._mark) - 1)
        window = held + source.text[source.at : stop]
        at = window.find(self._mark)
        if at >= 0:
            source.go(source.at + at + len(self._mark) - len(held))
            return window[:at], True
        if stop < end:
            return held, False
        source.go(stop)
        return self._hold(window)

    def _hold(self, text: str) -> tuple[str, bool]:
        kept = partial_marker_length(text, self._mark)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept], False


class MarkerMatch:
    """A mark that stands here or does not. ``held`` is as much of it as was read."""

    __slots__ = ("_mark", "held")

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.held = ""

    def read(self, source: StreamReader) -> bool | None:
        """Whether the mark is here; None while it may be. Where it is not, what was held is put back."""
        text = source.take(min(len(source.text), source.at + len(self._mark) - len(self.held)))
        self.held += text
        if self._mark.startswith(self.held):
            if len(self.held) < len(self._mark):
                return None
            self.held = ""
            return True
        source.put_back(self.take())
        return False

    def take(self) -> str:
        """What is held, which is then no longer held."""
        held, self.held = self.held, ""
        return held


class TrailingSpace:
    """White space that belongs to a text only where more text follows; but more than ``MAX_MARKER_SPACE`` characters of
    it are text, so that what is held back is bounded.
    """

    __slots__ = ("_flows", "_space")

    def __init__(self) -> None:
        self._space = TextBuffer()
        self._flows = False

    def push(self, text: str) -> str:
        """What is certain to be text, of this and what came before."""
        certain = text.rstrip(SPACE)
        if certain:
            self._flows = False
        elif self._flows:
            return text
        told = self._space.take() + certain if certain else ""
        self._space.push(text[len(certain) :])
        if len(self._space) > MAX_MARKER_SPACE:
            self._flows = True
            told += self._space.take()
        return told

    def take(self) -> str:
        """The space at the end, as far as it is not told."""
        self._flows = False
        return self._space.take()


def partial_marker_length(text: str, mark: str) -> int:
    """The length of the longest end of ``text``, which does not hold ``mark``, that the mark begins with."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return 0 if at < 0 else len(text) - at


# What an output's text is made of, once its marks are read: thoughts, content, and calls of tools.


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
