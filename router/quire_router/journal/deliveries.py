"""What was told of a request's choices, as one row of int32 that only grows. Knows no database.

Tokens stand for themselves and belong to the first choice, until a negative number, a mark, says that another one's
follow, or that a choice has ended and why. So the row of a single choice is simply its tokens and a mark at the end. A
delta with more than that, log-probabilities or a beam's score, is a frame: ``FRAME``, the number of values that follow,
and these. Any beginning of the row is what was told up to some moment: a frame counts once all of it is there.
"""

from array import array
from typing import Self

from quire_proto.sampling import FinishReason

from quire_router.journal.base import AnyDelta, RecordedDelta
from quire_router.journal.frame import pack_frame, unpack_frame, unpack_frame_tokens

FRAME_MARKER = -(2**31)
_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
_CODES = 1 + len(_REASONS)  # a mark's: 0 where tokens follow, or the reason's


class TokenLog:
    """The row of one request, ``values``, and where each of its choices stands."""

    __slots__ = ("_current", "_ended", "_has_prompt_logprobs", "_lengths", "values")

    def __init__(self, choices: int) -> None:
        self.values = array("i")
        self._lengths = [0] * choices
        self._ended = [False] * choices
        self._has_prompt_logprobs = False
        self._current = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(self._lengths)

    @classmethod
    def restore(cls, values: "array[int]", reader: "TokenLogReader") -> Self:
        """A row that was stored, without what was cut off at its end, and that ``reader`` has read."""
        deliveries = cls(len(reader.lengths))
        deliveries.values = values
        deliveries._lengths, deliveries._ended = list(reader.lengths), list(reader.ended)
        deliveries._has_prompt_logprobs, deliveries._current = reader.has_prompt_logprobs, reader.current
        return deliveries

    def append(self, position: int, delta: AnyDelta) -> int:
        """Adds what is new of a delta whose tokens begin at ``position`` of its choice's output; returns by how much
        the row grew. What would leave a hole is not added, nor is anything after the choice's end.
        """
        length = self._lengths[delta.index]
        if self._ended[delta.index] or position > length:
            return 0
        before, framed = len(self.values), _needs_frame(delta)
        if framed or position < length:
            delta = self._without_known(length - position, delta)
            framed = _needs_frame(delta)
        if framed:
            packed = pack_frame(delta, _reason_code(delta.finish_reason))
            self.values.extend((FRAME_MARKER, len(packed)))
            self.values.extend(packed)
        else:
            self._append_plain(delta)
        self._advance(delta)
        return len(self.values) - before

    def _without_known(self, known: int, delta: AnyDelta) -> RecordedDelta:
        """The delta without its first ``known`` tokens. Log-probabilities of the prompt come once, a score with the
        end.
        """
        return RecordedDelta(
            delta.index,
            delta.token_ids[known:],
            delta.finish_reason,
            delta.logprobs[known : len(delta.token_ids)],
            [] if self._has_prompt_logprobs else delta.prompt_logprobs,
            None if delta.finish_reason is None else delta.score,
        )

    def _append_plain(self, delta: AnyDelta) -> None:
        if delta.token_ids:
            if delta.index != self._current:
                self.values.append(_marker(delta.index, 0))
                self._current = delta.index
            self.values.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.values.append(_marker(delta.index, _reason_code(delta.finish_reason)))

    def _advance(self, delta: AnyDelta) -> None:
        self._lengths[delta.index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended[delta.index] = True
        if delta.prompt_logprobs:
            self._has_prompt_logprobs = True


class TokenLogReader:
    """Reads a row from its beginning, as it grows. ``current`` is the choice that plain tokens belong to, ``lengths``
    and ``ended`` say where each choice stands, and ``prompted`` whether log-probabilities of the prompt came. A
    ``brief`` reader leaves log-probabilities and scores out, which take ten times as long as all the rest.
    """

    __slots__ = ("_unpack", "current", "ended", "has_prompt_logprobs", "lengths")

    def __init__(self, choices: int, *, tokens_only: bool = False) -> None:
        self.current = 0
        self.lengths = [0] * choices
        self.ended = [False] * choices
        self.has_prompt_logprobs = False
        self._unpack = unpack_frame_tokens if tokens_only else unpack_frame

    def read(self, values: "array[int]", start: int = 0, limit: int | None = None) -> tuple[list[RecordedDelta], int]:
        """The deltas in what follows in the row from ``start`` on, and how many values they are: the rest is a delta
        that is not complete and has to come again with the next call. After ``limit`` values no other delta is begun,
        nor one that is larger than that but the first. Raises ``ValueError`` for what is no such row.
        """
        deltas: list[RecordedDelta] = []
        position, stop = start, len(values) if limit is None else min(len(values), start + limit)
        while position < stop:
            if limit is not None and position > start and self.entry_size(values, position) > limit:
                break
            length = self._read_entry(values, position, stop, deltas)
            if not length:
                break
            position += length
        return deltas, position - start

    def entry_size(self, values: "array[int]", start: int) -> int:
        """How many values the delta that begins at ``start`` has at least, once it is complete."""
        is_frame = start + 1 < len(values) and values[start] == FRAME_MARKER
        return 2 + values[start + 1] if is_frame else 1

    def has_complete_entry(self, values: "array[int]", start: int) -> bool:
        """Whether all of the delta that begins at ``start`` is there."""
        if start >= len(values) or values[start] != FRAME_MARKER:
            return start < len(values)
        return start + 1 < len(values) and start + 2 + values[start + 1] <= len(values)

    def _read_entry(self, values: "array[int]", start: int, stop: int, deltas: list[RecordedDelta]) -> int:
        """Adds the delta that begins at ``start``; returns how many values it takes, 0 when it is not complete."""
        first = values[start]
        if first == FRAME_MARKER:
            return self._read_frame(values, start, deltas)
        if first >= 0:
            end = _end_of_tokens(values, start, stop)
            self._add(RecordedDelta(self.current, values[start:end].tolist()), deltas)
            return end - start
        index, code = divmod(-1 - first, _CODES)
        self._check_choice(index)
        if code:
            self._add(RecordedDelta(index, [], _REASONS[code - 1]), deltas)
        else:
            self.current = index
        return 1

    def _read_frame(self, values: "array[int]", start: int, deltas: list[RecordedDelta]) -> int:
        if len(values) < start + 2:
            return 0
        end = start + 2 + values[start + 1]
        if end < start + 2:
            raise ValueError("a frame has no length")
        if end > len(values):
            return 0
        delta, code, prompted = self._unpack(values[start + 2 : end])
        self._check_choice(delta.index)
        if not 0 <= code < _CODES:
            raise ValueError("a choice ended for no known reason")
        reason = _REASONS[code - 1] if code else None
        whole = RecordedDelta(delta.index, delta.token_ids, reason, delta.logprobs, delta.prompt_logprobs, delta.score)
        self._add(whole, deltas)
        self.has_prompt_logprobs = self.has_prompt_logprobs or prompted
        return end - start

    def _add(self, delta: RecordedDelta, deltas: list[RecordedDelta]) -> None:
        if self.ended[delta.index]:
            raise ValueError(f"choice {delta.index} goes on after its end")
        self.lengths[delta.index] += len(delta.token_ids)
        self.ended[delta.index] = delta.finish_reason is not None
        deltas.append(delta)

    def _check_choice(self, index: int) -> None:
        if not 0 <= index < len(self.ended):
            raise ValueError(f"the request has no choice {index}")


def _end_of_tokens(values: "array[int]", start: int, stop: int) -> int:
    for position in range(start + 1, stop):
        if values[position] < 0:
            return position
    return stop


def _needs_frame(delta: AnyDelta) -> bool:
    return bool(delta.logprobs or delta.prompt_logprobs) or delta.score is not None


def _reason_code(reason: FinishReason | None) -> int:
    return 0 if reason is None else 1 + _REASONS.index(reason)


def _marker(index: int, code: int) -> int:
    return -1 - (index * _CODES + code)
