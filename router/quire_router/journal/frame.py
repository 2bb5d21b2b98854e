"""One piece of an answer with its log-probabilities as int32, bit for bit. Knows no database.

In order: the choice, a code of why it ended, whether there is a score, how many tokens there are, these, the score, and
two blocks: the tokens' log-probabilities and the prompt's. A block has its length, for each position how many most
probable tokens are listed, these tokens, and then all log-probabilities: those of the positions, then those of the
listed tokens. Log-probabilities and scores are float32 everywhere, and stand here as their bits.
"""

from array import array
from collections.abc import Iterable
from itertools import islice

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


def unpack_piece(values: "array[int]") -> tuple[Told, int, bool]:
    """The piece, but for its finish reason, the code of that, and whether it tells of the prompt. Raises
    ``ValueError`` for what is no piece.
    """
    cursor = _Cursor(values)
    index, code, scored, token_ids = _begin(cursor)
    score = _floats(cursor.take(1))[0] if scored else None
    logprobs, prompt_logprobs = _unpack_block(cursor), _unpack_block(cursor)
    cursor.end()
    return Told(index, token_ids, None, logprobs, prompt_logprobs, score), code, bool(prompt_logprobs)


def skim_piece(values: "array[int]") -> tuple[Told, int, bool]:
    """As ``unpack_piece``, but for log-probabilities and score."""
    cursor = _Cursor(values)
    index, code, scored, token_ids = _begin(cursor)
    cursor.skip(1 if scored else 0)
    _skip_block(cursor)
    prompted = _skip_block(cursor)
    cursor.end()
    return Told(index, token_ids), code, prompted


def _begin(cursor: "_Cursor") -> tuple[int, int, int, list[int]]:
    index, code, scored, count = cursor.take(4)
    token_ids = cursor.take(count).tolist()
    if min(token_ids, default=0) < 0:
        raise ValueError("a piece has something else than tokens in it")
    return index, code, scored, token_ids


class _Cursor:
    """Takes values in order. Raises ``ValueError`` where there are not so many."""

    def __init__(self, values: "array[int]") -> None:
        self._values = values
        self.position = 0

    def take(self, count: int) -> "array[int]":
        """So many of the values that follow."""
        start = self.position
        self.skip(count)
        return self._values[start : self.position]

    def skip(self, count: int) -> None:
        """Passes over so many of the values that follow."""
        if count < 0 or self.position + count > len(self._values):
            raise ValueError("a piece is shorter than it says")
        self.position += count

    def end(self) -> None:
        """There is nothing more."""
        if self.position != len(self._values):
            raise ValueError("a piece has something else in it")


def _pack_block(values: "array[int]", logprobs: list[TokenLogprobs]) -> None:
    values.append(len(logprobs))
    values.extend(len(each.top) for each in logprobs)
    values.extend(token_id for each in logprobs for token_id, _ in each.top)
    values.extend(_bits(each.logprob for each in logprobs))
    values.extend(_bits(logprob for each in logprobs for _, logprob in each.top))


def _unpack_block(cursor: _Cursor) -> list[TokenLogprobs]:
    counts = _take_counts(cursor)
    listed_tokens = sum(counts)
    token_ids = cursor.take(listed_tokens)
    own, tops = _floats(cursor.take(len(counts))), _floats(cursor.take(listed_tokens))
    listed = iter(zip(token_ids, tops, strict=True))
    return [TokenLogprobs(logprob, tuple(islice(listed, count))) for logprob, count in zip(own, counts, strict=True)]


def _skip_block(cursor: _Cursor) -> bool:
    """Whether there was anything in it."""
    counts = _take_counts(cursor)
    cursor.skip(len(counts) + 2 * sum(counts))
    return len(counts) > 0


def _take_counts(cursor: _Cursor) -> "array[int]":
    (positions,) = cursor.take(1)
    counts = cursor.take(positions)
    if min(counts, default=0) < 0:
        raise ValueError("a piece lists fewer than no tokens")
    return counts


def _bits(numbers: Iterable[float]) -> "array[int]":
    return array("i", array("f", numbers).tobytes())


def _floats(bits: "array[int]") -> "array[float]":
    return array("f", bits.tobytes())
