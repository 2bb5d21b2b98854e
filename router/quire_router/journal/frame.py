"""One delta of an answer with its log-probabilities as int32, bit for bit. Knows no database.

In order: the choice, a code of why it ended, whether there is a score, how many tokens there are, these, the score, and
two blocks: the tokens' log-probabilities and the prompt's. A block has its length, for each position how many most
probable tokens are listed, these tokens, and then all log-probabilities: those of the positions, then those of the
listed tokens. Log-probabilities and scores are float32 everywhere, and stand here as their bits.
"""

from array import array
from collections.abc import Iterable
from itertools import islice

from quire_proto.logprobs import TokenLogprobs

from quire_router.journal.base import AnyDelta, RecordedDelta


def pack_frame(delta: AnyDelta, code: int) -> "array[int]":
    """The delta's values. ``code`` stands for its finish reason."""
    values = array("i", (delta.index, code, delta.score is not None, len(delta.token_ids)))
    values.extend(delta.token_ids)
    if delta.score is not None:
        values.extend(_float_bits((delta.score,)))
    _pack_block(values, delta.logprobs)
    _pack_block(values, delta.prompt_logprobs)
    return values


def unpack_frame(values: "array[int]") -> tuple[RecordedDelta, int, bool]:
    """The delta, but for its finish reason, the code of that, and whether it tells of the prompt. Raises
    ``ValueError`` for what is no delta.
    """
    cursor = _FrameReader(values)
    index, code, scored, token_ids = _read_header(cursor)
    score = _floats(cursor.take(1))[0] if scored else None
    logprobs, prompt_logprobs = _unpack_block(cursor), _unpack_block(cursor)
    cursor.end()
    return RecordedDelta(index, token_ids, None, logprobs, prompt_logprobs, score), code, bool(prompt_logprobs)


def unpack_frame_tokens(values: "array[int]") -> tuple[RecordedDelta, int, bool]:
    """As ``unpack_piece``, but for log-probabilities and score."""
    cursor = _FrameReader(values)
    index, code, scored, token_ids = _read_header(cursor)
    cursor.skip(1 if scored else 0)
    _skip_block(cursor)
    prompted = _skip_block(cursor)
    cursor.end()
    return RecordedDelta(index, token_ids), code, prompted


def _read_header(cursor: "_FrameReader") -> tuple[int, int, int, list[int]]:
    index, code, scored, count = cursor.take(4)
    token_ids = cursor.take(count).tolist()
    if min(token_ids, default=0) < 0:
        raise ValueError("a delta has something else than tokens in it")
    return index, code, scored, token_ids


class _FrameReader:
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
            raise ValueError("a delta is shorter than it says")
        self.position += count

    def end(self) -> None:
        """There is nothing more."""
        if self.position != len(self._values):
            raise ValueError("a delta has something else in it")


def _pack_block(values: "array[int]", logprobs: list[TokenLogprobs]) -> None:
    values.append(len(logprobs))
    values.extend(len(each.top) for each in logprobs)
    values.extend(token_id for each in logprobs for token_id, _ in each.top)
    values.extend(_float_bits(each.logprob for each in logprobs))
    values.extend(_float_bits(logprob for each in logprobs for _, logprob in each.top))


def _unpack_block(cursor: _FrameReader) -> list[TokenLogprobs]:
    counts = _read_counts(cursor)
    listed_tokens = sum(counts)
    token_ids = cursor.take(listed_tokens)
    own, tops = _floats(cursor.take(len(counts))), _floats(cursor.take(listed_tokens))
    listed = iter(zip(token_ids, tops, strict=True))
    return [TokenLogprobs(logprob, tuple(islice(listed, count))) for logprob, count in zip(own, counts, strict=True)]


def _skip_block(cursor: _FrameReader) -> bool:
    """Whether there was anything in it."""
    counts = _read_counts(cursor)
    cursor.skip(len(counts) + 2 * sum(counts))
    return len(counts) > 0


def _read_counts(cursor: _FrameReader) -> "array[int]":
    (positions,) = cursor.take(1)
    counts = cursor.take(positions)
    if min(counts, default=0) < 0:
        raise ValueError("a delta lists fewer than no tokens")
    return counts


def _float_bits(numbers: Iterable[float]) -> "array[int]":
    return array("i", array("f", numbers).tobytes())


def _floats(bits: "array[int]") -> "array[float]":
    return array("f", bits.tobytes())
