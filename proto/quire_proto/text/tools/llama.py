"""Calls as Llama 3 writes them: ``{"name": ..., "parameters": {...}}``, several with semicolons or lines between."""

from collections.abc import Collection

from quire_proto.text.held import MAX_MARKER_SPACE, MarkerMatch, TextBuffer
from quire_proto.text.tools.body import MAX_CALL_CHARS
from quire_proto.text.tools.parser import ToolParser

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(ToolParser):
    """Calls stand at the beginning of an output or behind the mark, and nothing but calls between them."""

    mark = PYTHON_TAG

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._between = TextBuffer()  # what stands before the next call
        self._separated = False  # it has a semicolon
        self._next_mark = MarkerMatch(PYTHON_TAG)
        self._state = self._read_between

    def _read_body(self) -> None:
        source, stop = self._source, self._body_limit()
        end = self._end.find(source.text, source.at, stop)
        self._body.push(source.take(stop if end is None else end))
        if end is not None:
            self._finish_body()
        elif source.position - self._start == MAX_CALL_CHARS:
            self._finish_incomplete_body()

    def _finish_incomplete_body(self) -> None:
        self._reject_body(self._body.take())

    def _read_closing(self) -> None:
        source = self._source
        source.go(source.space())
        if source.more():
            if source.text[source.at] == "}":
                source.go(source.at + 1)
            self._after_call()

    def _after_call(self) -> None:
        self._separated, self._state = False, self._read_between

    def _finish_state(self) -> bool:
        if self._state == self._read_between:
            self._between.push(self._next_mark.take())
            self._end_calls()
        return super()._finish_state()

    def _read_between(self) -> None:
        """Another call, or the first."""
        if self._next_mark.held:
            self._read_mark()
            return
        source = self._source
        self._between.push(source.take(source.space()))
        if len(self._between) > MAX_MARKER_SPACE:
            self._end_calls()
        elif source.more():
            self._read_next(source.text[source.at])

    def _read_next(self, character: str) -> None:
        """What stands behind space."""
        if character == ";" and self._last_is_call and not self._separated:
            self._separated = True
            self._between.push(self._source.take(self._source.at + 1))
        elif character == "{":
            self._begin_call(self._between.take())
        else:
            self._read_mark()

    def _read_mark(self) -> None:
        is_here = self._next_mark.read(self._source)
        if is_here:
            self._begin_call(self._between.take() + PYTHON_TAG)
        elif is_here is False:
            self._end_calls()

    def _end_calls(self) -> None:
        """What follows is no call."""
        self._source.put_back(self._between.take())
        self._state = self._read_content
