"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Collection
from enum import StrEnum

from quire_proto.text.stream_scanner import MAX_MARKER_SPACE, MarkerMatch, MarkerSearch, TextBuffer
from quire_proto.text.tool_parser import MAX_CALL_CHARS, ToolParser

TOOL_CALL_BEGIN, TOOL_CALL_END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Calls may stand anywhere. The last one's end mark may be missing."""

    mark = TOOL_CALL_BEGIN

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._end_search = MarkerSearch(TOOL_CALL_END)
        self._end_mark = MarkerMatch(TOOL_CALL_END)
        self._braced = False  # the bracket that ends the call was read

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
        """What of the mark is missing at the end of an output is not missed."""
        source = self._source
        if not self._end_mark.held:
            source.go(source.space())
            if source.more() and source.text[source.at] == "}" and not self._braced:
                self._braced = True
                source.go(source.at + 1)
                return
        if source.more() and self._end_mark.read(source) is not None:
            self._braced, self._state = False, self._read_content


# Calls as Llama 3 writes them: ``{"name": ..., "parameters": {...}}``, several with semicolons or lines between.


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


# The formats in which models call tools, and how to tell which one a model knows: by its chat template.


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


TOOL_MARKERS = {ToolFormat.HERMES: ("<tool_call>", "</tool_call>"), ToolFormat.LLAMA3: (PYTHON_TAG,)}
"""What a parser has to see, also where the tokenizer takes it for a special token."""

_OTHER_FORMATS = ("<function=", "<arg_key>")  # other things than JSON in the marks of Hermes


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it is none of these."""
    if TOOL_CALL_BEGIN in template:
        is_json = '"arguments' in template and not any(mark in template for mark in _OTHER_FORMATS)
        return ToolFormat.HERMES if is_json else None
    return ToolFormat.LLAMA3 if '"parameters' in template and '"name' in template else None


def new_tool_parser(tool_format: ToolFormat, names: Collection[str], *, exact: bool = False) -> ToolParser:
    """A parser for one output that may call the tools with these names, ``exact`` where a grammar writes its calls."""
    return (HermesParser if tool_format is ToolFormat.HERMES else LlamaParser)(names, exact=exact)
