"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Collection

from quire_proto.text.held import Expected, Search
from quire_proto.text.tools.body import MAX_CALL_CHARS
from quire_proto.text.tools.parser import ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Calls may stand anywhere. The last one's end mark may be missing."""

    mark = BEGIN

    def __init__(self, names: Collection[str], *, exact: bool = False) -> None:
        super().__init__(names, exact=exact)
        self._end_search = Search(END)
        self._end_mark = Expected(END)
        self._braced = False  # the bracket that ends the call was read

    def _read_whole(self) -> None:
        body, ended = self._end_search.read(self._source, self._room())
        self._body.push(body)
        if ended:
            self._tell_whole(END)
        elif self._source.position - self._start == MAX_CALL_CHARS:
            self._refuse_whole(self._body.take() + self._end_search.take())

    def _finish_whole(self) -> None:
        self._body.push(self._end_search.take())
        self._tell_whole()

    def _close(self) -> None:
        """What of the mark is missing at the end of an output is not missed."""
        source = self._source
        if not self._end_mark.held:
            source.go(source.space())
            if source.more() and source.text[source.at] == "}" and not self._braced:
                self._braced = True
                source.go(source.at + 1)
                return
        if source.more() and self._end_mark.read(source) is not None:
            self._braced, self._step = False, self._outside
