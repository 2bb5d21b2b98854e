"""What parsers of tool calls have in common: text that is held back until it is known what it is. Knows no format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from quire_proto.text.held import SPACE, Gap, Held, Search, Source
from quire_proto.text.pieces import Arguments, Content, Piece, ToolCallStart, joined
from quire_proto.text.tools.body import MAX_CALL_CHARS, JsonObjectScanner, read_body
from quire_proto.text.tools.head import ToolCallHeaderParser, Verdict


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
        self._source = Source()
        self._pieces: list[Piece] = []
        self._called = False  # the last that was told is a call
        self._search = Search(self.mark)
        self._gap = Gap()
        self._opening = ""  # the space and the mark before what may be a call
        self._start = 0  # where in the output that begins
        self._refused = 0  # up to where bodies were looked at as a whole, and were none
        self._head = ToolCallHeaderParser(self._names)
        self._body = Held()
        self._end = JsonObjectScanner()
        self._step: Callable[[], None] = self._outside

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._source.push(text)
        self._run()
        return self._told()

    def finish(self) -> list[Piece]:
        """What was held back."""
        self._run()
        while self._finish_step():
            self._run()
        return self._told()

    @abstractmethod
    def _read_whole(self) -> None:
        """Looks for the end of a body that cannot be told while it comes. To call ``_tell_whole`` or ``_refuse``."""

    @abstractmethod
    def _finish_whole(self) -> None:
        """The output ends in such a body."""

    @abstractmethod
    def _close(self) -> None:
        """Takes what the format has behind the arguments of a call."""

    def _run(self) -> None:
        while self._source.more():
            self._step()

    def _told(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces) if len(pieces) > 1 else pieces

    def _finish_step(self) -> bool:
        """The output ends in this step. Whether something is to be read again because of that."""
        if self._step == self._outside:
            self._finish_outside()
        elif self._step == self._read_head:
            self._refuse(self._head.taken.take())
        elif self._step == self._read_whole:
            self._finish_whole()
        return self._source.more()

    def _outside(self) -> None:
        """Content, until the mark."""
        content, found = self._search.read(self._source)
        self._tell_content(self._gap.push(content))
        if found:
            self._open(self._gap.take() + self.mark)

    def _finish_outside(self) -> None:
        """Space that ends an output behind a call is nothing."""
        content = self._gap.take() + self._search.take()
        if not self._called or content.strip(SPACE):
            self._tell_content(content)

    def _open(self, opening: str) -> None:
        """A body may begin here, behind ``opening``."""
        self._opening, self._start = opening, self._source.position
        self._head, self._step = ToolCallHeaderParser(self._names), self._read_head

    def _read_head(self) -> None:
        verdict = self._head.read(self._source)
        if verdict is Verdict.CALL:
            self._pieces.append(ToolCallStart(self._head.name))
            self._called, self._end, self._step = True, JsonObjectScanner(), self._arguments
        elif verdict is Verdict.NO_CALL or (verdict is Verdict.WHOLE and (self._exact or self._start < self._refused)):
            self._refuse(self._head.taken.take())
        elif verdict is Verdict.WHOLE:
            self._source.put_back(self._head.taken.take())
            self._body, self._end, self._step = Held(), JsonObjectScanner(), self._read_whole

    def _arguments(self) -> None:
        source = self._source
        end = self._end.find(source.text, source.at, len(source.text))
        told = source.take(len(source.text) if end is None else end)
        if told:
            self._pieces.append(Arguments(told))
        if end is not None:
            self._step = self._close

    def _tell_whole(self, behind: str = "") -> None:
        """The body is all that is held of it, and the format's own mark was read ``behind`` it."""
        body = self._body.take()
        call = read_body(body, self._names)
        if call is None:
            self._refuse_whole(body, behind)
        else:
            self._pieces += [ToolCallStart(call[0]), Arguments(call[1])]
            self._called = True
            self._next()

    def _refuse_whole(self, body: str, behind: str = "") -> None:
        self._refused = self._start + len(body)
        self._refuse(body + behind)

    def _refuse(self, body: str) -> None:
        """What began here is no call. What is in it may still be looked at."""
        self._tell_content(self._opening)
        self._source.put_back(body)
        self._step = self._outside

    def _next(self) -> None:
        """What may follow a call."""
        self._step = self._outside

    def _tell_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
            self._called = False

    def _room(self) -> int:
        """Where the text of a body must end that begins where it does."""
        return min(len(self._source.text), self._source.at + MAX_CALL_CHARS - (self._source.position - self._start))
