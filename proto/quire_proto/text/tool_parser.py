"""The base of the parsers of tool calls: splits a model's output into content and calls while it streams.

A call is one JSON object, ``{"name": ..., "arguments": {...}}``; the formats in ``tool_formats`` put their markers
around it. ``ToolParser`` is a state machine: content, header (``ToolCallHeaderParser``), then arguments as they stream,
or, if the keys come in another order, the whole body (``JsonObjectScanner`` and ``parse_call``), and what closes the
call.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import Enum, auto

from quire_proto.text.stream_scanner import (
    SPACE,
    Content,
    MarkerSearch,
    OutputPart,
    StreamReader,
    TextBuffer,
    ToolCallArguments,
    ToolCallStart,
    TrailingSpace,
    merge_adjacent,
)

MAX_CALL_CHARS = 65_536  # characters of a call that can only be emitted as a whole
MAX_HEADER_CHARS = 512  # characters before the arguments of a call that is emitted while it streams
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "function", "id", *_ARGUMENTS)
_SHAPE = '{":",":{'  # a header without its white space and the contents of its strings


_KEY, _NAME = 2, 4  # characters of the shape that are read inside of these strings


_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class ToolParser(ABC):
    """Splits one output into content and calls of the tools in ``names``, with the same result however it is cut.

    A call is emitted when its arguments begin, and these as they arrive, as the model wrote them. Text that turns out
    to be no call, or a call of another tool, is content, markers included. Space between content and a call belongs to
    neither; more than ``MAX_MARKER_SPACE`` characters of it are content. With ``exact``, which says that a grammar
    writes the calls, a header whose keys are in another order is content too.

    At most one gap and ``MAX_CALL_CHARS`` characters are held back. Text is read once, and once more if it was no call.
    Inside of a body that was read as a whole and rejected, only calls that can be emitted while they stream are looked
    for, so that nested beginnings do not make it quadratic.
    """

    marker: str  # begins a call anywhere in a text

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        self._names = frozenset(names)
        self._exact = exact
        self._source = StreamReader()
        self._parts: list[OutputPart] = []
        self._last_is_call = False  # the last emitted part belongs to a call
        self._search = MarkerSearch(self.marker)
        self._gap = TrailingSpace()
        self._opening = ""  # the space and the marker before the possible call
        self._start = 0  # position in the output at which that call begins
        self._rejected_until = 0  # position up to which a whole body was read and rejected
        self._header = ToolCallHeaderParser(self._names)
        self._body = TextBuffer()
        self._end = JsonObjectScanner()
        self._state: Callable[[], None] = self._read_content

    def push(self, text: str) -> list[OutputPart]:
        """Returns the parts that are certain now."""
        self._source.push(text)
        self._run()
        return self._drain()

    def finish(self) -> list[OutputPart]:
        """Returns what was held back, at the end of the output."""
        self._run()
        while self._finish_state():
            self._run()
        return self._drain()

    @abstractmethod
    def _read_body(self) -> None:
        """Looks for the end of a body that is read as a whole. Calls ``_finish_body`` or ``_reject_body``."""

    @abstractmethod
    def _finish_incomplete_body(self) -> None:
        """Handles an output that ends inside of such a body."""

    @abstractmethod
    def _read_closing(self) -> None:
        """Reads what the format has after the arguments of a call."""

    def _run(self) -> None:
        while self._source.has_more():
            self._state()

    def _drain(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return merge_adjacent(parts) if len(parts) > 1 else parts

    def _finish_state(self) -> bool:
        """Ends the current state at the end of the output. Returns whether text was put back to be read again."""
        if self._state == self._read_content:
            self._finish_content()
        elif self._state == self._read_header:
            self._reject(self._header.consumed.take())
        elif self._state == self._read_body:
            self._finish_incomplete_body()
        return self._source.has_more()

    def _read_content(self) -> None:
        """Reads content up to the marker."""
        content, found = self._search.read(self._source)
        self._emit_content(self._gap.push(content))
        if found:
            self._begin_call(self._gap.take() + self.marker)

    def _finish_content(self) -> None:
        """Drops the space after a call that ends the output."""
        content = self._gap.take() + self._search.take()
        if not self._last_is_call or content.strip(SPACE):
            self._emit_content(content)

    def _begin_call(self, opening: str) -> None:
        """Starts reading a possible call after ``opening``."""
        self._opening, self._start = opening, self._source.position
        self._header, self._state = ToolCallHeaderParser(self._names), self._read_header

    def _read_header(self) -> None:
        status = self._header.read(self._source)
        if status is HeaderStatus.ARGUMENTS:
            self._parts.append(ToolCallStart(self._header.name))
            self._last_is_call, self._end, self._state = True, JsonObjectScanner(), self._read_arguments
        elif status is HeaderStatus.NOT_A_CALL or (
            status is HeaderStatus.NEEDS_BODY and (self._exact or self._start < self._rejected_until)
        ):
            self._reject(self._header.consumed.take())
        elif status is HeaderStatus.NEEDS_BODY:
            self._source.put_back(self._header.consumed.take())
            self._body, self._end, self._state = TextBuffer(), JsonObjectScanner(), self._read_body

    def _read_arguments(self) -> None:
        source = self._source
        end = self._end.find(source.text, source.at, len(source.text))
        arguments = source.take(len(source.text) if end is None else end)
        if arguments:
            self._parts.append(ToolCallArguments(arguments))
        if end is not None:
            self._state = self._read_closing

    def _finish_body(self, closing: str = "") -> None:
        """Emits the body that was read as a call, or rejects it. ``closing`` is the marker that was read after it."""
        body = self._body.take()
        call = parse_call(body, self._names)
        if call is None:
            self._reject_body(body, closing)
        else:
            self._parts += [ToolCallStart(call[0]), ToolCallArguments(call[1])]
            self._last_is_call = True
            self._after_call()

    def _reject_body(self, body: str, closing: str = "") -> None:
        self._rejected_until = self._start + len(body)
        self._reject(body + closing)

    def _reject(self, body: str) -> None:
        """Emits ``opening`` as content, as no call begins here, and puts the body back: a call may begin inside
        of it.
        """
        self._emit_content(self._opening)
        self._source.put_back(body)
        self._state = self._read_content

    def _after_call(self) -> None:
        """Sets the state after a call."""
        self._state = self._read_content

    def _emit_content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))
            self._last_is_call = False

    def _body_limit(self) -> int:
        """The index in the source at which this body reaches ``MAX_CALL_CHARS``, at most the end of the text."""
        return min(len(self._source.text), self._source.at + MAX_CALL_CHARS - (self._source.position - self._start))


class HeaderStatus(Enum):
    """What the text read so far says about a body."""

    INCOMPLETE = auto()
    NOT_A_CALL = auto()
    ARGUMENTS = auto()  # the arguments begin at the cursor
    NEEDS_BODY = auto()  # a possible call with its keys in another order: only the whole body decides


class ToolCallHeaderParser:
    """Reads the header ``{"name": "...", "arguments": `` of a call of one of ``names``, at most ``MAX_HEADER_CHARS``
    characters. ``name`` is the tool's, ``consumed`` the text that was read.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""
        self.consumed = TextBuffer()
        self._names = names
        self._matched = 0  # characters of the shape
        self._string: str | None = None  # the beginning of the string that is being read

    def read(self, source: StreamReader) -> HeaderStatus:
        """Reads on until the status is known. Does not read the bracket that begins the arguments."""
        status = HeaderStatus.INCOMPLETE
        while (
            status is HeaderStatus.INCOMPLETE and source.at < len(source.text) and len(self.consumed) < MAX_HEADER_CHARS
        ):
            end = min(len(source.text), source.at + MAX_HEADER_CHARS - len(self.consumed))
            status = self._read_symbol(source, end) if self._string is None else self._read_string(source, end)
        is_long = status is HeaderStatus.INCOMPLETE and len(self.consumed) >= MAX_HEADER_CHARS
        return HeaderStatus.NEEDS_BODY if is_long else status

    def _read_symbol(self, source: StreamReader, end: int) -> HeaderStatus:
        self.consumed.push(source.take(source.space_end(end)))
        if source.at == end:
            return HeaderStatus.INCOMPLETE
        symbol = source.text[source.at]
        if symbol != _SHAPE[self._matched]:
            return HeaderStatus.NOT_A_CALL if self._matched < _KEY else HeaderStatus.NEEDS_BODY
        self._matched += 1
        if self._matched == len(_SHAPE):
            return HeaderStatus.ARGUMENTS
        self.consumed.push(source.take(source.at + 1))
        self._string = "" if symbol == '"' else None
        return HeaderStatus.INCOMPLETE

    def _read_string(self, source: StreamReader, end: int) -> HeaderStatus:
        at = source.text.find('"', source.at, end)
        string = (self._string or "") + source.text[source.at : end if at < 0 else at]
        self.consumed.push(source.take(end if at < 0 else at + 1))
        self._string = string if at < 0 else None
        if self._matched == _KEY:
            return self._read_key(string, ended=at >= 0)
        if self._matched == _NAME:
            return self._read_name(string, ended=at >= 0)
        return HeaderStatus.INCOMPLETE if _begins(string, _ARGUMENTS, ended=at >= 0) else HeaderStatus.NEEDS_BODY

    def _read_key(self, key: str, *, ended: bool) -> HeaderStatus:
        if not _begins(key, _KEYS, ended=ended):
            return HeaderStatus.NOT_A_CALL
        return HeaderStatus.NEEDS_BODY if ended and key != "name" else HeaderStatus.INCOMPLETE

    def _read_name(self, name: str, *, ended: bool) -> HeaderStatus:
        self.name, escape, _ = name.partition("\\")
        if not _begins(self.name, self._names, ended=ended and not escape):
            return HeaderStatus.NOT_A_CALL
        return HeaderStatus.NEEDS_BODY if escape else HeaderStatus.INCOMPLETE


def _begins(string: str, known: Collection[str], *, ended: bool) -> bool:
    """Whether ``string`` is one of ``known``, or, unless it has ``ended``, the beginning of one."""
    return string in known if ended else any(each.startswith(string) for each in known)


class JsonObjectScanner:
    """Finds the end of one JSON object in text that arrives in pieces, by counting its brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int, stop: int) -> int | None:
        """The index at which the object ends in ``text[start:stop]``, which continues the text of earlier calls; None
        if it does not end there. A marker outside of its strings, which cannot be JSON, ends it too.
        """
        at = start
        while at < stop:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at, stop)
            if found is None:
                return None
            if found[0] == "<":
                return found.start()
            at = found.end()
            self._take(found[0])
            if self._depth == 0 and not self._in_string:
                return at
        return None

    def _take(self, symbol: str) -> None:
        if symbol == "\\":
            self._escaped = True
        elif symbol == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if symbol in "{[" else -1


def parse_call(body: str, names: Collection[str]) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a whole call of one of ``names``; None if ``body`` is none. Its keys may
    come in any order, and the arguments may be an object, a string that holds one, or absent.
    """
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        is_text = isinstance(arguments, str)
        is_object = isinstance(json.loads(arguments) if is_text else arguments, dict)
        text = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of a surrogate pair, which JSON can escape but UTF-8 cannot encode
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None
