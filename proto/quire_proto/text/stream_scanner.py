"""The parts of a model's output (content, reasoning, tool calls), and the scanner that parsers find their markers with.

Output arrives in pieces, and a marker such as ``</think>`` may be cut anywhere. Text that may still belong to a marker
is held back until that is decided. The cost is linear in the text: nothing is copied or searched again because more
arrives.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar


@dataclass(slots=True)
class Content:
    """Text of the answer. Never empty."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text of the model's reasoning, which comes before the answer. Never empty."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """The beginning of a call of tool ``name``. All ``ToolCallArguments`` up to the next one belong to it."""

    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """The next part of a call's arguments, JSON as the model wrote it. Never empty."""

    text: str


OutputPart = Content | Reasoning | ToolCallStart | ToolCallArguments


def merge_adjacent(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """The same parts with neighbours of one kind joined."""
    result: list[OutputPart] = []
    for kind, group in groupby(parts, type):
        if kind is ToolCallStart:
            result += group
        else:
            result.append(kind("".join(part.text for part in group if not isinstance(part, ToolCallStart))))
    return result


SPACE = " \t\r\n"  # JSON's white space; the formats put no other around their markers
MAX_MARKER_SPACE = 4096  # characters of white space that may belong to the marker behind them
_SPACES = re.compile(f"[{SPACE}]*")


class StreamReader:
    """A cursor over text that arrives in pieces: next is ``text[at:]``, then whatever ``put_back`` interrupted.
    ``position`` is the offset of ``at`` from the beginning of the output, in characters. ``log``, unless it is None,
    collects what is read.
    """

    __slots__ = ("_interrupted", "at", "log", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.position = 0
        self.log: TextBuffer | None = None
        self._interrupted: list[tuple[str, int]] = []

    def push(self, text: str) -> None:
        """Adds the next piece. Everything before it must have been read."""
        self.text, self.at = text, 0

    def has_more(self) -> bool:
        """Whether there is text left. Moves on to the text that ``put_back`` interrupted, if ``text`` is read up."""
        while self.at == len(self.text) and self._interrupted:
            self.text, self.at = self._interrupted.pop()
        return self.at < len(self.text)

    def advance(self, at: int) -> None:
        """Moves the cursor forward to index ``at`` of ``text``."""
        if self.log is not None:
            self.log.push(self.text[self.at : at])
        self.position += at - self.at
        self.at = at

    def take(self, at: int) -> str:
        """The text up to index ``at``, to which the cursor moves."""
        text = self.text[self.at : at]
        self.advance(at)
        return text

    def take_rest(self) -> str:
        """All the text that is left."""
        rest = TextBuffer()
        while self.has_more():
            rest.push(self.take(len(self.text)))
        return rest.take()

    def space_end(self, end: int | None = None) -> int:
        """The index at which white space that begins at the cursor ends, at most ``end``."""
        spaces = _SPACES.match(self.text, self.at, len(self.text) if end is None else end)
        return self.at if spaces is None else spaces.end()

    def put_back(self, text: str) -> None:
        """Makes ``text``, which was read last, the text to read next."""
        if text:
            if self.log is not None:
                self.log.drop(len(text))
            if self.at < len(self.text):
                self._interrupted.append((self.text, self.at))
            self.text, self.at = text, 0
            self.position -= len(text)


class MarkerSearch:
    """Searches for the first of some markers anywhere; ``found`` is the one that was found last. None of them begins
    inside of another. ``pending`` is the end of what was read, if a marker may begin with it.
    """

    __slots__ = ("_longest", "_markers", "found", "pending")

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._longest = max(map(len, markers))
        self.found = self.pending = ""

    def read(self, source: StreamReader, end: int | None = None) -> tuple[str, bool]:
        """Returns text that is not part of a marker, and whether a marker follows it. Reads up to ``end`` or to the end
        of the marker, or only returns what was pending.
        """
        end = len(source.text) if end is None else end
        if self.pending:
            return self._read_across(source, end)
        at = self._find(source.text, source.at, end)
        if at >= 0:
            before = source.take(at)
            source.advance(at + len(self.found))
            return before, True
        text = source.take(end)
        return self._split_pending(text)

    def take(self) -> str:
        """Returns and clears ``pending``."""
        pending, self.pending = self.pending, ""
        return pending

    def _find(self, text: str, start: int, end: int) -> int:
        first = -1
        for marker in self._markers:
            at = text.find(marker, start, end if first < 0 else min(end, first + len(marker) - 1))
            if at >= 0:
                first, self.found = at, marker
        return first

    def _read_across(self, source: StreamReader, end: int) -> tuple[str, bool]:
        """Searches across the boundary: ``pending`` and as much of the text as can complete a marker that starts
        there.
        """
        pending, stop = self.take(), min(end, source.at + self._longest - 1)
        window = pending + source.text[source.at : stop]
        at = self._find(window, 0, len(window))
        if at >= 0:
            source.advance(source.at + at + len(self.found) - len(pending))
            return window[:at], True
        if stop < end:
            return pending, False
        source.advance(stop)
        return self._split_pending(window)

    def _split_pending(self, text: str) -> tuple[str, bool]:
        kept = max(partial_marker_length(text, marker) for marker in self._markers)
        self.pending = text[len(text) - kept :]
        return text[: len(text) - kept], False


class MarkerMatch:
    """Tests whether a marker is at the cursor. ``pending`` is as much of it as was read."""

    __slots__ = ("_marker", "pending")

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self.pending = ""

    def read(self, source: StreamReader) -> bool | None:
        """Returns whether the marker is here, None while undecided. If it is not, puts back what was read."""
        text = source.take(min(len(source.text), source.at + len(self._marker) - len(self.pending)))
        self.pending += text
        if self._marker.startswith(self.pending):
            if len(self.pending) < len(self._marker):
                return None
            self.pending = ""
            return True
        source.put_back(self.take())
        return False

    def take(self) -> str:
        """Returns and clears ``pending``."""
        pending, self.pending = self.pending, ""
        return pending


class TrailingSpace:
    """Holds back trailing white space, which is part of a text only if more text follows. More than
    ``MAX_MARKER_SPACE`` characters of it are text in any case, so that what is held back is bounded.
    """

    __slots__ = ("_overflowed", "_space")

    def __init__(self) -> None:
        self._space = TextBuffer()
        self._overflowed = False

    def push(self, text: str) -> str:
        """Returns the text that is certain, of ``text`` and of the space held back before it."""
        certain = text.rstrip(SPACE)
        if certain:
            self._overflowed = False
        elif self._overflowed:
            return text
        settled = self._space.take() + certain if certain else ""
        self._space.push(text[len(certain) :])
        if len(self._space) > MAX_MARKER_SPACE:
            self._overflowed = True
            settled += self._space.take()
        return settled

    def take(self) -> str:
        """Returns and clears the space that is held back."""
        self._overflowed = False
        return self._space.take()


class TextBuffer:
    """Text collected piece by piece, until ``take``. ``len`` is its characters."""

    __slots__ = ("_length", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, text: str) -> None:
        """Appends ``text``."""
        if text:
            self._parts.append(text)
            self._length += len(text)

    def drop(self, length: int) -> None:
        """Removes the last ``length`` characters, or all that there are."""
        while length and self._parts:
            last = self._parts.pop()
            self._length -= len(last)
            self.push(last[: max(0, len(last) - length)])
            length = max(0, length - len(last))

    def last(self, length: int) -> str:
        """The last ``length`` characters."""
        text = self.take()
        self.push(text)
        return text[len(text) - length :]

    def take(self) -> str:
        """Returns and clears the text."""
        if not self._parts:
            return ""
        text = "".join(self._parts)
        self._parts, self._length = [], 0
        return text


def partial_marker_length(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` that ``marker`` begins with. ``text`` must not contain ``marker``."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return 0 if at < 0 else len(text) - at


ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]
"""What reads a text that arrives in pieces: it waits by yielding, and returns its result."""


class StreamParser(ABC):
    """Splits one output into parts, with the same result however it is cut. ``_parse`` is a generator that waits, in
    ``_more``, whenever it has read all there is.
    """

    def __init__(self) -> None:
        self._source = StreamReader()
        self._parts: list[OutputPart] = []
        self._ended = False  # the output is complete
        self._is_cut = False  # it did not end by itself
        self._met_end = False  # more was wanted than the output has
        self._steps = self._parse()

    def push(self, text: str) -> list[OutputPart]:
        """Returns the parts that are certain now."""
        if text:
            self._source.push(text)
            next(self._steps, None)
        return self._drain()

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """Returns what was held back, at the end of the output. The beginning of a mark, or of a call, at the end of an
        output that was ``cut`` is dropped.
        """
        self._ended, self._is_cut = True, cut
        next(self._steps, None)
        return self._drain()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Reads the output to its end."""

    def _more(self) -> Steps[bool]:
        """Waits for text to read. Returns whether there is any, which is false only at the end of the output."""
        while not self._source.has_more():
            if self._ended:
                self._met_end = True
                return False
            yield
        return True

    @property
    def _is_cut_here(self) -> bool:
        """Whether what is being read was cut off with the output."""
        return self._is_cut and self._met_end

    def _drain(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return merge_adjacent(parts) if len(parts) > 1 else parts

    def _accept(self, mark: str) -> Steps[bool]:
        """Reads ``mark`` if it is next, and returns whether it was."""
        match = MarkerMatch(mark)
        while (yield from self._more()):
            found = match.read(self._source)
            if found is not None:
                return found
        self._source.put_back(match.take())
        return False


_JSON_STRUCTURE = re.compile(r'["{}\[\]<]')
PYTHON_STRUCTURE = re.compile(r"""["'{}\[\]()<]""")
_INSIDE = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}  # of a string with these quotes


class BracketScanner:
    """Finds the end of one object, list or string in text that arrives in pieces, by counting brackets. ``structure``
    finds brackets and quotes; ``depth`` is the number of brackets that are open before it.
    """

    def __init__(self, structure: re.Pattern[str] = _JSON_STRUCTURE, *, depth: int = 0) -> None:
        self._structure = structure
        self._depth = depth
        self._quote = ""  # of the string that the text is in
        self._escaped = False

    def find(self, text: str, start: int, stop: int) -> int | None:
        """The index at which it ends in ``text[start:stop]``, which continues the text of earlier calls; None if it
        does not end there. A mark outside of its strings, which cannot be a part of it, ends it too.
        """
        at = start
        while at < stop:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_INSIDE[self._quote] if self._quote else self._structure).search(text, at, stop)
            if found is None:
                return None
            if found[0] == "<":
                return found.start()
            at = found.end()
            self._take(found[0])
            if self._depth == 0 and not self._quote:
                return at
        return None

    def _take(self, symbol: str) -> None:
        if symbol == "\\":
            self._escaped = True
        elif symbol in _INSIDE:
            self._quote = "" if self._quote else symbol
        else:
            self._depth += 1 if symbol in "{[(" else -1
