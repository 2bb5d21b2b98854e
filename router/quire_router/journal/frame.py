"""One piece of an answer with its log-probabilities as int32, bit for bit. Knows no database.

In order: the choice, a code of why it ended, whether there is a score, how many tokens there are, these, the score, and
two blocks: the tokens' log-probabilities and the prompt's. A block has its length, for each position how many most
probable tokens are listed, these tokens, and then all log-probabilities: those of the positions, then those of the
listed tokens. Log-probabilities and scores are float32 everywhere, and stand here as their bits.
"""

from array import array
from collections.abc import Iterable

from quire_proto.logprobs import TokenLogprobs

from quire_router.journal.base import Piece, Told


def pack_piece(piece: Piece, code: int) -> "array[int]":
    """The piece's values. ``code`` stands for its finish reason."""
    values = array("i", (piece.index, code, piece.score is not None, len(piece.token_ids)))
    values.extend(piece.token_ids)
    if piece.score is not None:
        values.extend(_bits((piece.score,)))
    _pack_block(values, piece.logprobs)
    _pack_block(values, piece.prompt_logprobs)
    return values


def unpack_piece(values: "array[int]") -> tuple[Told, int]:
    """The piece, but for its finish reason, and the code of that. Raises ``ValueError`` for what is no piece."""
    cursor = _Cursor(values)
    index, code, scored, count = cursor.take(4)
    token_ids = cursor.take(count).tolist()
    score = _floats(cursor.take(1))[0] if scored else None
    logprobs, prompt_logprobs = _unpack_block(cursor), _unpack_block(cursor)
    if cursor.position != len(values) or min(token_ids, default=0) < 0:
        raise ValueError("a piece has something else in it")
    return Told(index, token_ids, None, logprobs, prompt_logprobs, score), code


class _Cursor:
    """Takes values in order. Raises ``ValueError`` where there are not so many."""

    def __init__(self, values: "array[int]") -> None:
        self._values = values
        self.position = 0

    def take(self, count: int) -> "array[int]":
        """So many of the values that follow."""
        end = self.position + count
        if count < 0 or end > len(self._values):
            raise ValueError("a piece is shorter than it says")
        taken = self._values[self.position : end]
        self.position = end
        return taken


def _pack_block(values: "array[int]", logprobs: list[TokenLogprobs]) -> None:
    values.append(len(logprobs))
    values.extend(len(each.top) for each in logprobs)
    values.extend(token_id for each in logprobs for token_id, _ in each.top)
    values.extend(_bits(each.logprob for each in logprobs))
    values.extend(_bits(logprob for each in logprobs for _, logprob in each.top))


def _unpack_block(cursor: _Cursor) -> list[TokenLogprobs]:
    (positions,) = cursor.take(1)
    counts = cursor.take(positions)
    if min(counts, default=0) < 0:
        raise ValueError("a piece lists fewer than no tokens")
    token_ids = cursor.take(sum(counts))
    own, tops = _floats(cursor.take(positions)), _floats(cursor.take(sum(counts)))
    listed = iter(zip(token_ids, tops, strict=True))
    return [
        TokenLogprobs(logprob, tuple(next(listed) for _ in range(count)))
        for logprob, count in zip(own, counts, strict=True)
    ]


def _bits(numbers: Iterable[float]) -> "array[int]":
    return array("i", array("f", numbers).tobytes())


def _floats(bits: "array[int]") -> "array[float]":
    return array("f", bits.tobytes())
