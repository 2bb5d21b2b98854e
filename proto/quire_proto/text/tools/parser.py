"""What parsers of tool calls have in common: text that is held back until it is known what it is. Knows no format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from quire_proto.text.pieces import SPACE, Arguments, CallStart, Content, Piece, held_back, joined
from quire_proto.text.tools.body import LONGEST_HEAD, Doubt, ObjectEnd, read_body, read_head

Step = Callable[[bool], bool]


class ToolParser(ABC):
    """Splits one output that comes in pieces into content and calls of the tools called ``names``.

    What comes out in all does not depend on how the text was cut. A call is told when its arguments begin, and these
    as they come, as the model writes them. What turns out to be no call, or calls what nobody offered, is content, mark
    and all. Space between content and a call belongs to neither.
    """

    mark: str  # what begins calls anywhere in a text

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._text = ""  # what is not told yet
        self._offset = 0  # where in it the body begins that is looked at
        self._called = False  # the last that was told is a call
        self._pieces: list[Piece] = []
        self._step: Step = self._outside
        self._end = ObjectEnd()

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._text += text
        return self._run(ended=False)

    def finish(self) -> list[Piece]:
        """What was held back."""
        return self._run(ended=True)

    @abstractmethod
    def _read_whole(self, ended: bool) -> bool:
        """Looks for the end of a body that cannot be told while it comes. To call ``_tell_whole`` or ``_refuse``."""

    @abstractmethod
    def _close(self, ended: bool) -> bool:
        """Takes what the format has behind the arguments of a call."""

    def _run(self, *, ended: bool) -> list[Piece]:
        while self._step(ended):
            pass
        pieces, self._pieces = self._pieces, []
        return joined(pieces) if len(pieces) > 1 else pieces

    def _outside(self, ended: bool) -> bool:
        """Content, until the mark."""
        at = self._text.find(self.mark)
        if at < 0:
            kept = 0 if ended else held_back(self._text, self.mark)
            self._tell_content(len(self._text) - kept, ended)
            return False
        content = self._text[:at].rstrip(SPACE)
        self._tell_content(len(content), False)
        self._open(at - len(content) + len(self.mark))
        return True

    def _open(self, offset: int) -> None:
        """A body may begin at ``offset``."""
        self._offset, self._end, self._step = offset, ObjectEnd(), self._body

    def _body(self, ended: bool) -> bool:
        head = read_head(self._text[self._offset : self._offset + LONGEST_HEAD], self._names)
        if head is Doubt.NO_CALL:
            return self._refuse()
        if isinstance(head, Doubt):
            return self._read_whole(ended)
        self._tell_call(head.name)
        self._text = self._text[self._offset + head.length :]
        self._end, self._step = ObjectEnd(), self._arguments
        return True

    def _arguments(self, ended: bool) -> bool:
        del ended
        end = self._end.find(self._text)
        told = self._text if end is None else self._text[:end]
        if told:
            self._pieces.append(Arguments(told))
        self._text = self._text[len(told) :]
        if end is not None:
            self._step = self._close
        return end is not None

    def _tell_whole(self, end: int, rest: int) -> bool:
        """The body goes to ``end``, and what follows it begins at ``rest``. True as a step that has gone on."""
        call = read_body(self._text[self._offset : end], self._names)
        if call is None:
            return self._refuse()
        self._tell_call(call[0])
        self._pieces.append(Arguments(call[1]))
        self._text, self._step = self._text[rest:], self._next
        return True

    def _next(self, ended: bool) -> bool:
        """What may follow a call."""
        return self._go_outside(ended)

    def _go_outside(self, ended: bool) -> bool:
        del ended
        self._step = self._outside
        return True

    def _refuse(self) -> bool:
        """What begins here is no call. What is in it may still be looked at."""
        self._tell_content(self._offset, False)
        self._step = self._outside
        return True

    def _tell_call(self, name: str) -> None:
        self._pieces.append(CallStart(name))
        self._called = True

    def _tell_content(self, length: int, ended: bool) -> None:
        """The text up to ``length`` is content, except for space that ends an output behind a call."""
        text, self._text = self._text[:length], self._text[length:]
        if text and not (ended and self._called and not text.strip(SPACE)):
            self._pieces.append(Content(text))
            self._called = False
