"""The formats in which models write tool calls: how to detect a model's format, and the parser of each.

Hermes, of which Qwen is one: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Llama 3: ``{"name": ...,
"parameters": {...}}``, several with semicolons or lines between them.
"""

from collections.abc import Collection
from enum import StrEnum

from quire_proto.text.stream_scanner import MAX_MARKER_SPACE, MarkerMatch, MarkerSearch, TextBuffer
from quire_proto.text.tool_parser import MAX_CALL_CHARS, ToolParser

TOOL_CALL_BEGIN, TOOL_CALL_END = "<tool_call>", "</tool_call>"


PYTHON_TAG = "<|python_tag|>"
_OTHER_FORMATS = ("<function=", "<arg_key>")  # not JSON between the markers of Hermes


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


TOOL_MARKERS = {ToolFormat.HERMES: (TOOL_CALL_BEGIN, TOOL_CALL_END), ToolFormat.LLAMA3: (PYTHON_TAG,)}
"""The markers that a parser needs in its text, even if they are special tokens of the tokenizer."""


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in. Returns None if it is none of these."""
    if TOOL_CALL_BEGIN in template:
        is_json = '"arguments' in template and not any(marker in template for marker in _OTHER_FORMATS)
        return ToolFormat.HERMES if is_json else None
    return ToolFormat.LLAMA3 if '"parameters' in template and '"name' in template else None


def new_tool_parser(tool_format: ToolFormat, names: Collection[str], *, exact: bool = False) -> ToolParser:
    """A parser for one output that may call the tools in ``names``. ``exact``: a grammar writes the calls."""
    return (HermesParser if tool_format is ToolFormat.HERMES else LlamaParser)(names, exact=exact)


class HermesParser(ToolParser):
    """Calls may stand anywhere in the output. The end marker of the last one may be missing."""

    marker = TOOL_CALL_BEGIN

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._end_search = MarkerSearch(TOOL_CALL_END)
        self._end_marker = MarkerMatch(TOOL_CALL_END)
        self._braced = False  # the bracket that closes the call was read

    def _read_body(self) -> None:
        body, ended = self._end_search.read(self._source, self._body_limit())
        self._body.push(body)
        if ended:
            self._finish_body(TOOL_CALL_END)
        elif self._source.position - self._start == MAX_CALL_CHARS:
            self._reject_body(self._body.take() + self._end_search.take())

    def _finish_incomplete_body(self) -> None:
        self._body.push(self._end_search.take())
        self._finish_body()

    def _read_closing(self) -> None:
        """Reads the closing bracket and the end marker, either of which may be missing at the end of the output."""
        source = self._source
        if not self._end_marker.pending:
            source.advance(source.space_end())
            if source.has_more() and source.text[source.at] == "}" and not self._braced:
                self._braced = True
                source.advance(source.at + 1)
                return
        if source.has_more() and self._end_marker.read(source) is not None:
            self._braced, self._state = False, self._read_content


class LlamaParser(ToolParser):
    """Calls stand at the beginning of the output or after the marker, with nothing but separators between them."""

    marker = PYTHON_TAG

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._between = TextBuffer()  # text since the last call
        self._separated = False  # that text has a semicolon
        self._next_marker = MarkerMatch(PYTHON_TAG)
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
        source.advance(source.space_end())
        if source.has_more():
            if source.text[source.at] == "}":
                source.advance(source.at + 1)
            self._after_call()

    def _after_call(self) -> None:
        self._separated, self._state = False, self._read_between

    def _finish_state(self) -> bool:
        if self._state == self._read_between:
            self._between.push(self._next_marker.take())
            self._end_calls()
        return super()._finish_state()

    def _read_between(self) -> None:
        """Reads the space and the separator before the first or another call."""
        if self._next_marker.pending:
            self._read_marker()
            return
        source = self._source
        self._between.push(source.take(source.space_end()))
        if len(self._between) > MAX_MARKER_SPACE:
            self._end_calls()
        elif source.has_more():
            self._read_next(source.text[source.at])

    def _read_next(self, character: str) -> None:
        """Decides by the first character after the space."""
        if character == ";" and self._last_is_call and not self._separated:
            self._separated = True
            self._between.push(self._source.take(self._source.at + 1))
        elif character == "{":
            self._begin_call(self._between.take())
        else:
            self._read_marker()

    def _read_marker(self) -> None:
        is_here = self._next_marker.read(self._source)
        if is_here:
            self._begin_call(self._between.take() + PYTHON_TAG)
        elif is_here is False:
            self._end_calls()

    def _end_calls(self) -> None:
        """Reads the rest as content, as no call follows."""
        self._source.put_back(self._between.take())
        self._state = self._read_content
