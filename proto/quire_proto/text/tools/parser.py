"""What parsers of tool calls have in common: text that is held back until it is known what it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from quire_proto.text.held import SPACE, MarkerSearch, StreamReader, TextBuffer, TrailingSpace
from quire_proto.text.pieces import Content, OutputPart, ToolCallArguments, ToolCallStart, merge_adjacent
from quire_proto.text.tools.body import MAX_CALL_CHARS, JsonObjectScanner, parse_call
from quire_proto.text.tools.head import HeaderStatus, ToolCallHeaderParser


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
