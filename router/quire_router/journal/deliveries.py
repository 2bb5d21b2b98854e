"""What was told of a request's choices, as one row of int32 that only grows. Knows no database.

Tokens stand for themselves and belong to the first choice, until a negative number, a mark, says that another one's
follow, or that a choice has ended and why. So the row of a single choice is simply its tokens and a mark at the end. A
piece with more than that, log-probabilities or a beam's score, is a frame: ``FRAME``, the number of values that follow,
and these. Any beginning of the row is what was told up to some moment: a frame counts once all of it is there.
"""

from array import array
from typing import Self

from quire_proto.sampling import FinishReason

from quire_router.journal.base import Piece, Told
from quire_router.journal.frame import pack_piece, skim_piece, unpack_piece

FRAME = -(2**31)
_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
_CODES = 1 + len(_REASONS)  # a mark's: 0 where tokens follow, or the reason's


class Deliveries:
    """The row of one request, ``values``, and where each of its choices stands."""

    __slots__ = ("_current", "_ended", "_lengths", "_prompted", "values")

    def __init__(self, choices: int) -> None:
        self.values = array("i")
        self._lengths = [0] * choices
        self._ended = [False] * choices
        self._prompted = False
        self._current = 0

    @property
    def told(self) -> int:
        """Tokens of all choices."""
        return sum(self._lengths)

    @classmethod
    def restore(cls, values: "array[int]", reader: "RowReader") -> Self:
        """A row that was stored, without what was cut off at its end, and that ``reader`` has read."""
        deliveries = cls(len(reader.lengths))
        deliveries.values = values
        deliveries._lengths, deliveries._ended = list(reader.lengths), list(reader.ended)
        deliveries._prompted, deliveries._current = reader.prompted, reader.current
        return deliveries

    def add(self, position: int, piece: Piece) -> int:
        """Adds what is new of a piece whose tokens begin at ``position`` of its choice's output; returns by how much
        the row grew. What would leave a hole is not added, nor is anything after the choice's end.
        """
        length = self._lengths[piece.index]
        if self._ended[piece.index] or position > length:
            return 0
        before, framed = len(self.values), _is_framed(piece)
        if framed or position < length:
            piece = self._new_part(length - position, piece)
            framed = _is_framed(piece)
        if framed:
            packed = pack_piece(piece, _code(piece.finish_reason))
            self.values.extend((FRAME, len(packed)))
            self.values.extend(packed)
        else:
            self._add_plain(piece)
        self._note(piece)
        return len(self.values) - before

    def _new_part(self, known: int, piece: Piece) -> Told:
        """The piece without its first ``known`` tokens. Log-probabilities of the prompt come once, a score with the
        end.
        """
        return Told(
            piece.index,
            piece.token_ids[known:],
            piece.finish_reason,
            piece.logprobs[known : len(piece.token_ids)],
            [] if self._prompted else piece.prompt_logprobs,
            None if piece.finish_reason is None else piece.score,
        )

    def _add_plain(self, piece: Piece) -> None:
        if piece.token_ids:
            if piece.index != self._current:
                self.values.append(_mark(piece.index, 0))
                self._current = piece.index
            self.values.extend(piece.token_ids)
        if piece.finish_reason is not None:
            self.values.append(_mark(piece.index, _code(piece.finish_reason)))

    def _note(self, piece: Piece) -> None:
        self._lengths[piece.index] += len(piece.token_ids)
        if piece.finish_reason is not None:
            self._ended[piece.index] = True
        if piece.prompt_logprobs:
            self._prompted = True


class RowReader:
    """Reads a row from its beginning, as it grows. ``current`` is the choice that plain tokens belong to, ``lengths``
    and ``ended`` say where each choice stands, and ``prompted`` whether log-probabilities of the prompt came. A
    ``brief`` reader leaves log-probabilities and scores out, which take ten times as long as all the rest.
    """

    __slots__ = ("_unpack", "current", "ended", "lengths", "prompted")

    def __init__(self, choices: int, *, brief: bool = False) -> None:
        self.current = 0
        self.lengths = [0] * choices
        self.ended = [False] * choices
        self.prompted = False
        self._unpack = skim_piece if brief else unpack_piece

    def read(self, values: "array[int]", start: int = 0, limit: int | None = None) -> tuple[list[Told], int]:
        """The pieces in what follows in the row from ``start`` on, and how many values they are: the rest is a piece
        that is not complete and has to come again with the next call. After ``limit`` values no other piece is begun,
        nor one that is larger than that but the first. Raises ``ValueError`` for what is no such row.
        """
        pieces: list[Told] = []
        position, stop = start, len(values) if limit is None else min(len(values), start + limit)
        while position < stop:
            if limit is not None and position > start and self.piece_size(values, position) > limit:
                break
            length = self._read_piece(values, position, stop, pieces)
            if not length:
                break
            position += length
        return pieces, position - start

    def piece_size(self, values: "array[int]", start: int) -> int:
        """How many values the piece that begins at ``start`` has at least, once it is complete."""
        is_frame = start + 1 < len(values) and values[start] == FRAME
        return 2 + values[start + 1] if is_frame else 1

    def has_piece(self, values: "array[int]", start: int) -> bool:
        """Whether all of the piece that begins at ``start`` is there."""
        if start >= len(values) or values[start] != FRAME:
            return start < len(values)
        return start + 1 < len(values) and start + 2 + values[start + 1] <= len(values)

    def _read_piece(self, values: "array[int]", start: int, stop: int, pieces: list[Told]) -> int:
        """Adds the piece that begins at ``start``; returns how many values it takes, 0 when it is not complete."""
        first = values[start]
        if first == FRAME:
            return self._read_frame(values, start, pieces)
        if first >= 0:
            end = _end_of_tokens(values, start, stop)
            self._add(Told(self.current, values[start:end].tolist()), pieces)
            return end - start
        index, code = divmod(-1 - first, _CODES)
        self._check(index)
        if code:
            self._add(Told(index, [], _REASONS[code - 1]), pieces)
        else:
            self.current = index
        return 1

    def _read_frame(self, values: "array[int]", start: int, pieces: list[Told]) -> int:
        if len(values) < start + 2:
            return 0
        end = start + 2 + values[start + 1]
        if end < start + 2:
            raise ValueError("a frame has no length")
        if end > len(values):
            return 0
        piece, code, prompted = self._unpack(values[start + 2 : end])
        self._check(piece.index)
        if not 0 <= code < _CODES:
            raise ValueError("a choice ended for no known reason")
        reason = _REASONS[code - 1] if code else None
        whole = Told(piece.index, piece.token_ids, reason, piece.logprobs, piece.prompt_logprobs, piece.score)
        self._add(whole, pieces)
        self.prompted = self.prompted or prompted
        return end - start

    def _add(self, piece: Told, pieces: list[Told]) -> None:
        if self.ended[piece.index]:
            raise ValueError(f"choice {piece.index} goes on after its end")
        self.lengths[piece.index] += len(piece.token_ids)
        self.ended[piece.index] = piece.finish_reason is not None
        pieces.append(piece)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self.ended):
            raise ValueError(f"the request has no choice {index}")


def _end_of_tokens(values: "array[int]", start: int, stop: int) -> int:
    for position in range(start + 1, stop):
        if values[position] < 0:
            return position
    return stop


def _is_framed(piece: Piece) -> bool:
    return bool(piece.logprobs or piece.prompt_logprobs) or piece.score is not None


def _code(reason: FinishReason | None) -> int:
    return 0 if reason is None else 1 + _REASONS.index(reason)


def _mark(index: int, code: int) -> int:
    return -1 - (index * _CODES + code)
