"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Collection

from quire_proto.text.held import MarkerMatch, MarkerSearch
from quire_proto.text.tools.body import MAX_CALL_CHARS
from quire_proto.text.tools.parser import ToolParser

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
