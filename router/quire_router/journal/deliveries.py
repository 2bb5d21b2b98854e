"""What was delivered of a request's choices, as one row of int32 that only grows. Knows no database.

Tokens stand for themselves and belong to the first choice, until a negative number says that another one's follow, or
that a choice has ended and why. So any beginning of the row is what was delivered up to some moment, and the row of a
single choice is simply its tokens and a mark at the end.
"""

from array import array
from collections.abc import Iterable

from quire_proto.sampling import FinishReason

from quire_router.journal.base import Delivered

_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
_CODES = 1 + len(_REASONS)  # a mark's: 0 where tokens follow, or the reason's


class Deliveries:
    """The row of one request, ``values``, and where each of its choices stands."""

    __slots__ = ("_current", "_ended", "_lengths", "values")

    def __init__(self, choices: int) -> None:
        self.values = array("i")
        self._lengths = [0] * choices
        self._ended = [False] * choices
        self._current = 0

    def add(self, index: int, position: int, token_ids: list[int], finish_reason: FinishReason | None) -> int:
        """Adds what is new of a choice's tokens, which begin at ``position`` of its output, and its end; returns by how
        much the row grew. What would leave a hole is not added, nor is anything after the end.
        """
        length = self._lengths[index]
        if self._ended[index] or position > length:
            return 0
        before = len(self.values)
        new = token_ids[length - position :]
        if new:
            if index != self._current:
                self.values.append(_mark(index, 0))
                self._current = index
            self.values.extend(new)
            self._lengths[index] += len(new)
        if finish_reason is not None:
            self.values.append(_mark(index, 1 + _REASONS.index(finish_reason)))
            self._ended[index] = True
        return len(self.values) - before

    def read(self) -> list[Delivered]:
        """What was delivered of each choice."""
        return read_deliveries(self.values, len(self._lengths))


def read_deliveries(values: Iterable[int], choices: int) -> list[Delivered]:
    """What a row says of each choice. Raises ``ValueError`` where it speaks of a choice that the request has not."""
    delivered = [Delivered() for _ in range(choices)]
    tokens = delivered[0].token_ids
    for value in values:
        if value >= 0:
            tokens.append(value)
            continue
        index, code = divmod(-1 - value, _CODES)
        if index >= choices:
            raise ValueError(f"the request has no choice {index}")
        if code:
            delivered[index].finish_reason = _REASONS[code - 1]
        else:
            tokens = delivered[index].token_ids
    return delivered


def _mark(index: int, code: int) -> int:
    return -1 - (index * _CODES + code)
