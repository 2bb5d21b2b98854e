"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from quire_proto.text.pieces import SPACE
from quire_proto.text.tools.body import LONGEST_BODY
from quire_proto.text.tools.parser import ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Calls may stand anywhere. The last one's end mark may be missing."""

    mark = BEGIN

    def _read_whole(self, ended: bool) -> bool:
        end = self._text.find(END, self._offset, self._offset + LONGEST_BODY)
        if end >= 0:
            return self._tell_whole(end, end + len(END))
        length = len(self._text)
        if length - self._offset >= LONGEST_BODY:
            return self._refuse()
        return self._tell_whole(length, length) if ended else False

    def _close(self, ended: bool) -> bool:
        rest = self._text.lstrip(SPACE).removeprefix("}").lstrip(SPACE)
        if END.startswith(rest) and rest != END:
            return False  # what of the mark is missing at the end is not missed
        self._text = rest.removeprefix(END)
        return self._go_outside(ended)
