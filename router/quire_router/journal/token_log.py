"""The token log: what a request's client was sent of all choices, as one append-only array of int32.

Tokens stand for themselves and belong to the first choice, until a negative number, a marker, says that another
choice's tokens follow, or that a choice has ended and why. So the log of a single choice is its tokens and a marker at
the end. A delta with more than that, log-probabilities, a stop token or a beam's score, is a frame: ``FRAME_MARKER``,
the number of values that follow, and these. Any prefix of the log is what was sent up to some moment: a frame counts
once it is complete.

A frame holds one delta bit for bit. In order: the choice, the code of its finish reason, the sum of ``_SCORE`` and
``_STOP_TOKEN`` where it has these, the number of tokens, these, the score, the stop token with a block of its own
log-probabilities, and two blocks: the tokens' log-probabilities and the prompt's. A block has its length,
for each position how many most probable tokens are listed, these tokens, and then all log-probabilities: those of the
positions, then those of the listed tokens. Log-probabilities and scores are float32 everywhere, and are stored as their
bits.

Logs of any length are read beside everything else that this process does: in chunks of a millisecond or so, and a delta
that is larger than a chunk in a thread.
"""

import asyncio
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Self
from zlib import crc32

from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs

from quire_router.journal.base import AnyDelta, RecordedDelta, RequestRecord
from quire_router.journal.codec import CorruptRecordError, decode_record, unpack_tokens

FRAME_MARKER = -(2**31)
_SCORE, _STOP_TOKEN = 1, 2
_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
_CODES = 1 + len(_REASONS)  # of a marker: 0 if tokens follow, else the finish reason's
CHUNK_VALUES = 4_096  # values of a log that are read at a time
MAX_INLINE_VALUES = 16_384  # values of one delta that are read in the loop: 64 KiB
CHECKSUM_CHUNK_BYTES = 1_048_576  # bytes


class TokenLog:
    """The log of one request, ``values``, and the length and end of each of its choices."""

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
        """The log of stored ``values``, which ``reader`` has read and which end with a complete delta."""
        log = cls(len(reader.lengths))
        log.values = values
        log._lengths, log._ended = list(reader.lengths), list(reader.ended)
        log._has_prompt_logprobs, log._current = reader.has_prompt_logprobs, reader.current
        return log

    def append(self, position: int, delta: AnyDelta) -> int:
        """Adds what is new of a delta whose tokens begin at ``position`` of its choice's output; returns by how many
        values the log grew. A delta that would leave a gap is not added, nor is anything after the choice's end.
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

    def append_token(self, index: int, position: int, token_id: int) -> int:
        """As ``append`` of a delta that is one token of choice ``index``."""
        if position != self._lengths[index] or self._ended[index]:
            return self.append(position, RecordedDelta(index, [token_id]))
        self._lengths[index] = position + 1
        if index == self._current:
            self.values.append(token_id)
            return 1
        self._current = index
        self.values.extend((_marker(index, 0), token_id))
        return 2

    def _without_known(self, known: int, delta: AnyDelta) -> RecordedDelta:
        """The delta without its first ``known`` tokens. Log-probabilities of the prompt come once, a score and a
        stop token with the end.
        """
        return RecordedDelta(
            delta.index,
            delta.token_ids[known:],
            delta.finish_reason,
            delta.logprobs[known : len(delta.token_ids)],
            [] if self._has_prompt_logprobs else delta.prompt_logprobs,
            None if delta.finish_reason is None else delta.score,
            None if delta.finish_reason is None else delta.stop_token,
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
    """Reads a log from its beginning, as it grows. ``current`` is the choice that plain tokens belong to, ``lengths``
    and ``ended`` are of each choice, and ``has_prompt_logprobs`` says whether log-probabilities of the prompt came.
    With ``tokens_only`` log-probabilities, stop tokens and scores are skipped, which take ten times as long as all the
    rest.
    """

    __slots__ = ("_unpack", "current", "ended", "has_prompt_logprobs", "lengths")

    def __init__(self, choices: int, *, tokens_only: bool = False) -> None:
        self.current = 0
        self.lengths = [0] * choices
        self.ended = [False] * choices
        self.has_prompt_logprobs = False
        self._unpack = unpack_frame_tokens if tokens_only else unpack_frame

    def read(self, values: "array[int]", start: int = 0, limit: int | None = None) -> tuple[list[RecordedDelta], int]:
        """The deltas in the log from ``start`` on, and how many values they are: the rest is a delta that is not
        complete and has to be passed again with the next call. After ``limit`` values no other delta is read, nor one
        that is larger than that but the first. Raises ``ValueError`` if the values are no such log.
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
        self._add(replace(delta, finish_reason=reason), deltas)
        self.has_prompt_logprobs = self.has_prompt_logprobs or prompted
        return end - start

    def _add(self, delta: RecordedDelta, deltas: list[RecordedDelta]) -> None:
        if self.ended[delta.index]:
            raise ValueError(f"choice {delta.index} continues after its end")
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
    return bool(delta.logprobs or delta.prompt_logprobs) or delta.score is not None or delta.stop_token is not None


def _reason_code(reason: FinishReason | None) -> int:
    return 0 if reason is None else 1 + _REASONS.index(reason)


def _marker(index: int, code: int) -> int:
    return -1 - (index * _CODES + code)


def pack_frame(delta: AnyDelta, code: int) -> "array[int]":
    """The delta's values. ``code`` stands for its finish reason."""
    score, stop_token = delta.score, delta.stop_token
    parts = _SCORE * (score is not None) + _STOP_TOKEN * (stop_token is not None)
    values = array("i", (delta.index, code, parts, len(delta.token_ids)))
    values.extend(delta.token_ids)
    if score is not None:
        values.extend(_float_bits((score,)))
    if stop_token is not None:
        values.append(stop_token.token_id)
        _pack_block(values, [] if stop_token.logprobs is None else [stop_token.logprobs])
    _pack_block(values, delta.logprobs)
    _pack_block(values, delta.prompt_logprobs)
    return values


def unpack_frame(values: "array[int]") -> tuple[RecordedDelta, int, bool]:
    """The delta without its finish reason, the code of that, and whether the prompt's log-probabilities are in it.
    Raises ``ValueError`` if the values are no delta.
    """
    reader = _FrameReader(values)
    index, code, parts, token_ids = _read_header(reader)
    score = _floats(reader.take(1))[0] if parts & _SCORE else None
    stop_token = _unpack_stop_token(reader) if parts & _STOP_TOKEN else None
    logprobs, prompt_logprobs = _unpack_block(reader), _unpack_block(reader)
    reader.end()
    delta = RecordedDelta(index, token_ids, None, logprobs, prompt_logprobs, score, stop_token)
    return delta, code, bool(prompt_logprobs)


def unpack_frame_tokens(values: "array[int]") -> tuple[RecordedDelta, int, bool]:
    """As ``unpack_frame``, without log-probabilities, stop token and score."""
    reader = _FrameReader(values)
    index, code, parts, token_ids = _read_header(reader)
    reader.skip(1 if parts & _SCORE else 0)
    if parts & _STOP_TOKEN:
        reader.skip(1)
        _skip_block(reader)
    _skip_block(reader)
    prompted = _skip_block(reader)
    reader.end()
    return RecordedDelta(index, token_ids), code, prompted


def _read_header(reader: "_FrameReader") -> tuple[int, int, int, list[int]]:
    index, code, parts, count = reader.take(4)
    if not 0 <= parts <= _SCORE + _STOP_TOKEN:
        raise ValueError("a delta has something in it that is not known")
    token_ids = reader.take(count).tolist()
    if min(token_ids, default=0) < 0:
        raise ValueError("a delta has something else than tokens in it")
    return index, code, parts, token_ids


def _unpack_stop_token(reader: "_FrameReader") -> StopToken:
    (token_id,), logprobs = reader.take(1), _unpack_block(reader)
    if token_id < 0 or len(logprobs) > 1:
        raise ValueError("a choice was ended by something else than a token")
    return StopToken(token_id, logprobs[0] if logprobs else None)


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


def _unpack_block(reader: _FrameReader) -> list[TokenLogprobs]:
    counts = _read_counts(reader)
    listed_tokens = sum(counts)
    token_ids = reader.take(listed_tokens)
    own, tops = _floats(reader.take(len(counts))), _floats(reader.take(listed_tokens))
    listed = iter(zip(token_ids, tops, strict=True))
    return [TokenLogprobs(logprob, tuple(islice(listed, count))) for logprob, count in zip(own, counts, strict=True)]


def _skip_block(reader: _FrameReader) -> bool:
    """Whether there was anything in it."""
    counts = _read_counts(reader)
    reader.skip(len(counts) + 2 * sum(counts))
    return len(counts) > 0


def _read_counts(reader: _FrameReader) -> "array[int]":
    (positions,) = reader.take(1)
    counts = reader.take(positions)
    if min(counts, default=0) < 0:
        raise ValueError("a delta lists fewer than no tokens")
    return counts


def _float_bits(numbers: Iterable[float]) -> "array[int]":
    return array("i", array("f", numbers).tobytes())


def _floats(bits: "array[int]") -> "array[float]":
    return array("f", bits.tobytes())


class DeltaMerger:
    """Merges the plain deltas of one choice into one until something else of that choice comes: choices that run side
    by side are cut at every token.
    """

    __slots__ = ("_open", "deltas")

    def __init__(self) -> None:
        self.deltas: list[RecordedDelta] = []
        self._open: dict[int, list[int]] = {}

    def add(self, delta: RecordedDelta) -> None:
        """The next delta, whose tokens become the list's own."""
        if _needs_frame(delta) or delta.finish_reason is not None:
            self._open.pop(delta.index, None)
            self.deltas.append(delta)
        elif (tokens := self._open.get(delta.index)) is not None:
            tokens += delta.token_ids
        else:
            self._open[delta.index] = delta.token_ids
            self.deltas.append(delta)


async def read_chunk(reader: TokenLogReader, values: "array[int]", start: int) -> tuple[list[RecordedDelta], int]:
    """Some of the deltas that begin at ``start``, and how many values they are: 0 if there is no complete one. Raises
    ``ValueError`` if the values are no log.
    """
    if reader.entry_size(values, start) > MAX_INLINE_VALUES:
        read, taken = await asyncio.to_thread(reader.read, values, start, CHUNK_VALUES)
    else:
        read, taken = reader.read(values, start, CHUNK_VALUES)
    merger = DeltaMerger()
    for delta in read:
        merger.add(delta)
    return merger.deltas, taken


async def read_log(reader: TokenLogReader, values: "array[int]") -> tuple[list[RecordedDelta], int]:
    """All deltas of a log as it is now, and how many values they are. Raises ``ValueError`` if it is no log."""
    merger, position, end = DeltaMerger(), 0, len(values)
    while position < end:
        deltas, taken = await read_chunk(reader, values, position)
        if not taken:
            break
        for delta in deltas:
            merger.add(delta)
        position += taken
        if position < end:
            await asyncio.sleep(0)
    return merger.deltas, position


async def log_checksum(packed: bytes, before: int = 0) -> int:
    """The CRC-32 of a packed log that continues bytes with the checksum ``before``."""
    rest = memoryview(packed)
    while len(rest) > CHECKSUM_CHUNK_BYTES:
        before, rest = crc32(rest[:CHECKSUM_CHUNK_BYTES], before), rest[CHECKSUM_CHUNK_BYTES:]
        await asyncio.sleep(0)
    return crc32(rest, before)


async def read_record(
    request_id: str, fields: Mapping[bytes, bytes], packed: bytes, now: int = 0, *, tokens_only: bool = False
) -> tuple[RequestRecord, TokenLogReader, int]:
    """The record from its hash and its packed log, ``now`` being the database's time in ms; the reader at its end, and
    how many values of the log are complete deltas. With ``tokens_only`` the deltas are without log-probabilities,
    stop tokens and scores. Raises ``CorruptRecordError``.
    """
    record = decode_record(request_id, fields, len(packed), await log_checksum(packed), now)
    reader = TokenLogReader(record.generation.params.n, tokens_only=tokens_only)
    try:
        record.deltas, taken = await read_log(reader, unpack_tokens(packed))
    except ValueError:
        raise CorruptRecordError("the log is damaged") from None
    return record, reader, taken
