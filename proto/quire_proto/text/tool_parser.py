"""What parsers of tool calls have in common: text that is held back until it is known what it is."""

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

# The beginning of one call as JSON, ``{"name": ..., "arguments": {``, read as it comes.


MAX_HEADER_CHARS = 512  # characters up to the arguments of a call that is told while it comes

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "function", "id", *_ARGUMENTS)
_SHAPE = '{":",":{'  # what stands there but for space and for what the strings say
_KEY, _NAME = 2, 4  # how much of the shape is read inside of that string


class HeaderStatus(Enum):
    """What a beginning says of a body."""

    INCOMPLETE = auto()  # nothing yet
    NOT_A_CALL = auto()
    ARGUMENTS = auto()  # whose arguments begin
    NEEDS_BODY = auto()  # it says what a call says, but not in this order: only the whole of it tells


class ToolCallHeaderParser:
    """Reads the head of a call of one of ``names``, which is ``name`` then: ``MAX_HEADER_CHARS`` characters at most.
    ``taken`` is what was read.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""
        self.taken = TextBuffer()
        self._names = names
        self._read = 0  # of the shape
        self._string: str | None = None  # what is read of the string that goes on

    def read(self, source: StreamReader) -> HeaderStatus:
        """What is known now. Reads no more than it needs for that, and not the bracket that begins the arguments."""
        status = HeaderStatus.INCOMPLETE
        while status is HeaderStatus.INCOMPLETE and source.at < len(source.text) and len(self.taken) < MAX_HEADER_CHARS:
            end = min(len(source.text), source.at + MAX_HEADER_CHARS - len(self.taken))
            status = self._read_mark(source, end) if self._string is None else self._read_string(source, end)
        is_long = status is HeaderStatus.INCOMPLETE and len(self.taken) >= MAX_HEADER_CHARS
        return HeaderStatus.NEEDS_BODY if is_long else status

    def _read_mark(self, source: StreamReader, end: int) -> HeaderStatus:
        self.taken.push(source.take(source.space(end)))
        if source.at == end:
            return HeaderStatus.INCOMPLETE
        mark = source.text[source.at]
        if mark != _SHAPE[self._read]:
            return HeaderStatus.NOT_A_CALL if self._read < _KEY else HeaderStatus.NEEDS_BODY
        self._read += 1
        if self._read == len(_SHAPE):
            return HeaderStatus.ARGUMENTS
        self.taken.push(source.take(source.at + 1))
        self._string = "" if mark == '"' else None
        return HeaderStatus.INCOMPLETE

    def _read_string(self, source: StreamReader, end: int) -> HeaderStatus:
        at = source.text.find('"', source.at, end)
        string = (self._string or "") + source.text[source.at : end if at < 0 else at]
        self.taken.push(source.take(end if at < 0 else at + 1))
        self._string = string if at < 0 else None
        if self._read == _KEY:
            return self._read_key(string, ended=at >= 0)
        if self._read == _NAME:
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
    """Whether a string that has ``ended`` or goes on is one of those that are known."""
    return string in known if ended else any(each.startswith(string) for each in known)


# One call as JSON, ``{"name": ..., "arguments": {...}}``: where its parts end, and what it says. Knows none of the
# marks that formats put around it.


MAX_CALL_CHARS = 65_536  # characters of a call that can only be told when it has ended

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


def parse_call(body: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a whole call of one of ``names``, in any order and with arguments as an object, as text
    that holds one, or absent. None for what is no such call.
    """
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        is_text = isinstance(arguments, str)
        is_object = isinstance(json.loads(arguments) if is_text else arguments, dict)
        text = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # halves of surrogate pairs can be escaped in JSON, and cannot be sent
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return (name, text) if is_object and isinstance(name, str) and name in names else None


class JsonObjectScanner:
    """Looks for the end of one JSON object in text that comes in pieces, by its brackets alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int, stop: int) -> int | None:
        """Where the object ends between ``start`` and ``stop``, of which nothing else is looked at; None while it goes
        on. What cannot be JSON, because a mark begins outside of its strings, ends it too.
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

    def _take(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in "{[" else -1


class ToolParser(ABC):
    """Splits one output that comes in pieces into content and calls of the tools called ``names``.

    What comes out in all does not depend on how the text was cut. A call is told when its arguments begin, and these as
    they come, as the model writes them. What turns out to be no call, or calls what nobody offered, is content, mark
    and all. Space between content and a call belongs to neither, but for more of it than ``MAX_MARKER_SPACE``
    characters, which are content.

    No more is held back than one gap and ``MAX_CALL_CHARS`` characters. Text is looked at as it comes, and once more
    where it was no call; but in what was looked at as the whole of a call and was none, only calls that can be told
    while they come are looked for, lest calls in calls be looked at again and again.
    """

    mark: str  # what begins calls anywhere in a text

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        self._names = frozenset(names)
        self._exact = exact
        self._source = StreamReader()
        self._pieces: list[OutputPart] = []
        self._last_is_call = False  # the last that was told is a call
        self._search = MarkerSearch(self.mark)
        self._gap = TrailingSpace()
        self._opening = ""  # the space and the mark before what may be a call
        self._start = 0  # where in the output that begins
        self._rejected_until = 0  # up to where bodies were looked at as a whole, and were none
        self._header = ToolCallHeaderParser(self._names)
        self._body = TextBuffer()
        self._end = JsonObjectScanner()
        self._state: Callable[[], None] = self._read_content

    def push(self, text: str) -> list[OutputPart]:
        """What is certain now."""
        self._source.push(text)
        self._run()
        return self._drain()

    def finish(self) -> list[OutputPart]:
        """What was held back."""
        self._run()
        while self._finish_state():
            self._run()
        return self._drain()

    @abstractmethod
    def _read_body(self) -> None:
        """Looks for the end of a body that cannot be told while it comes. To call ``_finish_body`` or ``_reject``."""

    @abstractmethod
    def _finish_incomplete_body(self) -> None:
        """The output ends in such a body."""

    @abstractmethod
    def _read_closing(self) -> None:
        """Takes what the format has behind the arguments of a call."""

    def _run(self) -> None:
        while self._source.more():
            self._state()

    def _drain(self) -> list[OutputPart]:
        pieces, self._pieces = self._pieces, []
        return merge_adjacent(pieces) if len(pieces) > 1 else pieces

    def _finish_state(self) -> bool:
        """The output ends in this step. Whether something is to be read again because of that."""
        if self._state == self._read_content:
            self._finish_content()
        elif self._state == self._read_header:
            self._reject(self._header.taken.take())
        elif self._state == self._read_body:
            self._finish_incomplete_body()
        return self._source.more()

    def _read_content(self) -> None:
        """Content, until the mark."""
        content, found = self._search.read(self._source)
        self._emit_content(self._gap.push(content))
        if found:
            self._begin_call(self._gap.take() + self.mark)

    def _finish_content(self) -> None:
        """Space that ends an output behind a call is nothing."""
        content = self._gap.take() + self._search.take()
        if not self._last_is_call or content.strip(SPACE):
            self._emit_content(content)

    def _begin_call(self, opening: str) -> None:
        """A body may begin here, behind ``opening``."""
        self._opening, self._start = opening, self._source.position
        self._header, self._state = ToolCallHeaderParser(self._names), self._read_header

    def _read_header(self) -> None:
        status = self._header.read(self._source)
        if status is HeaderStatus.ARGUMENTS:
            self._pieces.append(ToolCallStart(self._header.name))
            self._last_is_call, self._end, self._state = True, JsonObjectScanner(), self._read_arguments
        elif status is HeaderStatus.NOT_A_CALL or (
            status is HeaderStatus.NEEDS_BODY and (self._exact or self._start < self._rejected_until)
        ):
            self._reject(self._header.taken.take())
        elif status is HeaderStatus.NEEDS_BODY:
            self._source.put_back(self._header.taken.take())
            self._body, self._end, self._state = TextBuffer(), JsonObjectScanner(), self._read_body

    def _read_arguments(self) -> None:
        source = self._source
        end = self._end.find(source.text, source.at, len(source.text))
        told = source.take(len(source.text) if end is None else end)
        if told:
            self._pieces.append(ToolCallArguments(told))
        if end is not None:
            self._state = self._read_closing

    def _finish_body(self, behind: str = "") -> None:
        """The body is all that is held of it, and the format's own mark was read ``behind`` it."""
        body = self._body.take()
        call = parse_call(body, self._names)
        if call is None:
            self._reject_body(body, behind)
        else:
            self._pieces += [ToolCallStart(call[0]), ToolCallArguments(call[1])]
            self._last_is_call = True
            self._after_call()

    def _reject_body(self, body: str, behind: str = "") -> None:
        self._rejected_until = self._start + len(body)
        self._reject(body + behind)

    def _reject(self, body: str) -> None:
        """What began here is no call. What is in it may still be looked at."""
        self._emit_content(self._opening)
        self._source.put_back(body)
        self._state = self._read_content

    def _after_call(self) -> None:
        """What may follow a call."""
        self._state = self._read_content

    def _emit_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
            self._last_is_call = False

    def _body_limit(self) -> int:
        """Where the text of a body must end that begins where it does."""
        return min(len(self._source.text), self._source.at + MAX_CALL_CHARS - (self._source.position - self._start))
