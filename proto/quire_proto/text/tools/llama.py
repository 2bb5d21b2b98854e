"""Calls as Llama 3 writes them: ``{"name": ..., "parameters": {...}}``, several with semicolons or lines between."""

from collections.abc import Collection

from quire_proto.text.held import MAX_MARKER_SPACE, Expected, Held
from quire_proto.text.tools.body import MAX_CALL_CHARS
from quire_proto.text.tools.parser import ToolParser

MARK = "<|python_tag|>"


class LlamaParser(ToolParser):
    """Calls stand at the beginning of an output or behind the mark, and nothing but calls between them."""

    mark = MARK

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._between = Held()  # what stands before the next call
        self._separated = False  # it has a semicolon
        self._next_mark = Expected(MARK)
        self._step = self._read_between

    def _read_whole(self) -> None:
        source, stop = self._source, self._room()
        end = self._end.find(source.text, source.at, stop)
        self._body.push(source.take(stop if end is None else end))
        if end is not None:
            self._tell_whole()
        elif source.position - self._start == MAX_CALL_CHARS:
            self._finish_whole()

    def _finish_whole(self) -> None:
        self._refuse_whole(self._body.take())

    def _close(self) -> None:
        source = self._source
        source.go(source.space())
        if source.more():
            if source.text[source.at] == "}":
                source.go(source.at + 1)
            self._next()

    def _next(self) -> None:
        self._separated, self._step = False, self._read_between

    def _finish_step(self) -> bool:
        if self._step == self._read_between:
            self._between.push(self._next_mark.take())
            self._go_outside()
        return super()._finish_step()

    def _read_between(self) -> None:
        """Another call, or the first."""
        if self._next_mark.held:
            self._read_mark()
            return
        source = self._source
        self._between.push(source.take(source.space()))
        if len(self._between) > MAX_MARKER_SPACE:
            self._go_outside()
        elif source.more():
            self._read_next(source.text[source.at])

    def _read_next(self, character: str) -> None:
        """What stands behind space."""
        if character == ";" and self._called and not self._separated:
            self._separated = True
            self._between.push(self._source.take(self._source.at + 1))
        elif character == "{":
            self._open(self._between.take())
        else:
            self._read_mark()

    def _read_mark(self) -> None:
        is_here = self._next_mark.read(self._source)
        if is_here:
            self._open(self._between.take() + MARK)
        elif is_here is False:
            self._go_outside()

    def _go_outside(self) -> None:
        """What follows is no call."""
        self._source.put_back(self._between.take())
        self._step = self._outside
