"""The beginning of one call as JSON, ``{"name": ..., "arguments": {``, read as it comes."""

from collections.abc import Collection
from enum import Enum, auto

from quire_proto.text.held import StreamReader, TextBuffer

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
