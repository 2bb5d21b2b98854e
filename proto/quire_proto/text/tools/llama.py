"""Calls as Llama 3 writes them: ``{"name": ..., "parameters": {...}}``, several with semicolons or lines between."""

from collections.abc import Collection

from quire_proto.text.pieces import SPACE
from quire_proto.text.tools.body import LONGEST_BODY
from quire_proto.text.tools.parser import ToolParser

MARK = "<|python_tag|>"


class LlamaParser(ToolParser):
    """Calls stand at the beginning of an output or behind the mark, and nothing but calls between them."""

    mark = MARK

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._looked = 0
        self._step = self._next

    def _open(self, offset: int) -> None:
        super()._open(offset)
        self._looked = offset

    def _read_whole(self, ended: bool) -> bool:
        body = self._text[self._offset :].lstrip(SPACE)
        if not body:
            return self._refuse() if ended else False
        limit = self._offset + LONGEST_BODY
        end = self._end.find(self._text[:limit], self._looked)
        self._looked = min(len(self._text), limit)
        if end is not None:
            return self._tell_whole(end, end)
        return self._refuse() if ended or self._looked == limit else False

    def _close(self, ended: bool) -> bool:
        rest = self._text.lstrip(SPACE)
        if not rest and not ended:
            return False
        self._text = rest.removeprefix("}")
        self._step = self._next
        return True

    def _next(self, ended: bool) -> bool:
        """Another call, or the first."""
        rest = self._text.lstrip(SPACE)
        if self._called:
            rest = rest.removeprefix(";").lstrip(SPACE)
        if rest.startswith(("{", MARK)):
            self._open(len(self._text) - len(rest.removeprefix(MARK)))
            return True
        if MARK.startswith(rest) and not ended:
            return False
        return self._go_outside(ended)
