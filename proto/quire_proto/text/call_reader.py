"""``CallReader``: reads what may be a call, mark by mark, within bounds: how much of an output may be held back while
it is undecided whether it is one.
"""

import re
from collections.abc import Collection

from quire_proto.text.stream_scanner import BracketScanner, MarkerSearch, Steps, StreamParser, TextBuffer

MAX_CALL_CHARS = 65_536  # characters of a call, or of a value, that can only be emitted as a whole
MAX_HEADER_CHARS = 512  # characters before the arguments of a call that is emitted while it streams

WORD = re.compile(r"[\w.+-]*")


class NotACallError(Exception):
    """What is being read is no call: its text is content, unless the call was emitted already."""


class UndecidedError(NotACallError):
    """The header alone does not say whether this is a call."""


class CallReader(StreamParser):
    """A parser's means to read calls. All methods read on from the cursor, and raise ``NotACallError`` where the text,
    or its length, says that it is no call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start = 0  # position in the output at which what is being read begins
        self._limit = 0  # position that it may reach while it is undecided what it is
        self._rejected_until = 0  # position up to which a whole body was read and rejected

    def _begin(self, length: int) -> TextBuffer:
        """What is read from here on, and logged, is put back if it is neither a call nor what stands between calls. At
        most ``length`` characters may leave that undecided.
        """
        self._source.log = log = TextBuffer()
        self._start = self._source.position
        self._limit = self._start + length
        return log

    def _skip_space(self) -> Steps[None]:
        """Reads white space. Raises ``UndecidedError`` if it reaches the limit."""
        source = self._source
        while (yield from self._more()):
            source.advance(source.space_end(min(len(source.text), source.at + self._limit + 1 - source.position)))
            if source.position > self._limit:
                raise UndecidedError
            if source.at < len(source.text):
                return

    def _expect(self, mark: str, error: type[NotACallError] = NotACallError) -> Steps[None]:
        """Reads white space and ``mark``. Raises ``error`` if it is not there."""
        yield from self._skip_space()
        if not (yield from self._accept(mark)):
            raise error

    def _read_marks(self, marks: str) -> Steps[None]:
        """Reads the words of ``marks``, between which white space may be or not. Raises ``NotACallError``."""
        for mark in marks.split():
            yield from self._expect(mark)

    def _read_word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads the characters of ``pattern``, possibly none. Raises ``UndecidedError`` if they reach the limit."""
        source, word = self._source, ""
        while (yield from self._more()):
            found = pattern.match(source.text, source.at, source.at + self._limit + 1 - source.position)
            word += source.take(source.at if found is None else found.end())
            if source.position > self._limit:
                raise UndecidedError
            if source.at < len(source.text):
                break
        return word

    def _peek(self, character: str) -> Steps[bool]:
        return (yield from self._more()) and self._source.text[self._source.at] == character

    def _read_string(self, known: Collection[str], unknown: type[NotACallError]) -> Steps[str]:
        """Reads a string of ``known``. Raises ``unknown`` as soon as it is none of them, and ``UndecidedError`` if it
        has an escape or reaches the limit.
        """
        yield from self._expect('"', unknown)
        source, string = self._source, ""
        while (yield from self._more()):
            stop = min(len(source.text), source.at + self._limit + 1 - source.position)
            at = source.text.find('"', source.at, stop)
            string += source.text[source.at : stop if at < 0 else at]
            source.advance(stop if at < 0 else at + 1)
            text, escape, _ = string.partition("\\")
            if not begins(text, known, ended=at >= 0 and not escape):
                raise unknown
            if escape or source.position > self._limit:
                raise UndecidedError
            if at >= 0:
                return string
        raise NotACallError

    def _skip_value(self) -> Steps[None]:
        """Reads a string, a number or a word that means nothing here."""
        yield from self._skip_space()
        if not (yield from self._peek('"')):
            yield from self._read_word(WORD)
            return
        yield from self._skip_to(BracketScanner(), self._limit)

    def _peek_mark(self, mark: str) -> Steps[bool]:
        """Whether ``mark`` is next, or the output ends within it."""
        if (yield from self._accept(mark)):
            self._source.put_back(mark)
            return True
        rest = self._source.take_rest() if self._met_end else ""
        self._source.put_back(rest)
        return self._met_end and mark.startswith(rest)

    def _left(self) -> int:
        """The index in the source at which what is being read has ``MAX_CALL_CHARS``, at most the end of the text."""
        source = self._source
        return min(len(source.text), source.at + self._start + MAX_CALL_CHARS - source.position)

    def _check_length(self) -> None:
        if self._source.position - self._start >= MAX_CALL_CHARS:
            self._rejected_until = self._source.position
            raise NotACallError

    def _read_whole(self, scanner: BracketScanner) -> Steps[str]:
        """Reads to the end that ``scanner`` finds. Raises ``NotACallError`` where a body was rejected before, for one
        that is too long, and for one without an end.
        """
        source, body = self._source, TextBuffer()
        if self._start < self._rejected_until:
            raise NotACallError
        while (yield from self._more()):
            end = scanner.find(source.text, source.at, self._left())
            body.push(source.take(self._left() if end is None else end))
            if end is not None:
                return body.take()
            self._check_length()
        self._rejected_until = source.position
        raise NotACallError

    def _read_until(self, mark: str) -> Steps[tuple[str, bool]]:
        """Reads to the end of ``mark``. Returns the text before it, and whether it was there before the output ended.
        Raises as ``_read_whole`` does.
        """
        search, body = MarkerSearch(mark), TextBuffer()
        if self._start < self._rejected_until:
            raise NotACallError
        while (yield from self._more()):
            text, found = search.read(self._source, self._left())
            body.push(text)
            if found:
                return body.take(), True
            self._check_length()
        return body.take() + search.take(), False

    def _skip_to(self, scanner: BracketScanner, limit: int) -> Steps[None]:
        """Reads to the end that ``scanner`` finds. Raises ``UndecidedError`` if it is not before ``limit``."""
        source = self._source
        while (yield from self._more()):
            stop = min(len(source.text), source.at + limit - source.position)
            end = scanner.find(source.text, source.at, stop)
            source.advance(stop if end is None else end)
            if end is not None:
                return
            if source.position >= limit:
                break
        raise UndecidedError


def begins(string: str, known: Collection[str], *, ended: bool) -> bool:
    """Whether ``string`` is one of ``known``, or, unless it has ``ended``, the beginning of one."""
    return string in known if ended else any(each.startswith(string) for each in known)
