"""How a row of any length is read beside everything else that this process does: in parts of a millisecond or so, and
a delta that is larger than that in a thread. Knows no database.
"""

import asyncio
from array import array
from collections.abc import Mapping
from zlib import crc32

from quire_router.journal.base import RecordedDelta, RequestRecord
from quire_router.journal.codec import CorruptRecordError, decode_record, unpack_tokens
from quire_router.journal.deliveries import TokenLogReader
from quire_router.journal.pieces import DeltaMerger

CHUNK_VALUES = 4_096  # values of a row
MAX_INLINE_VALUES = 16_384  # values of one delta that are read in the loop: 64 KiB
CHECKSUM_CHUNK_BYTES = 1_048_576  # bytes


async def read_chunk(reader: TokenLogReader, values: "array[int]", start: int) -> tuple[list[RecordedDelta], int]:
    """Some of the deltas that begin at ``start``, and how many values they are: 0 when there is no complete one. Raises
    ``ValueError`` for what is no row.
    """
    if reader.entry_size(values, start) > MAX_INLINE_VALUES:
        read, taken = await asyncio.to_thread(reader.read, values, start, CHUNK_VALUES)
    else:
        read, taken = reader.read(values, start, CHUNK_VALUES)
    told = DeltaMerger()
    for delta in read:
        told.add(delta)
    return told.deltas, taken


async def read_log(reader: TokenLogReader, values: "array[int]") -> tuple[list[RecordedDelta], int]:
    """All deltas of a row as it is now, and how many values they are. Raises ``ValueError`` for what is no row."""
    told, position, end = DeltaMerger(), 0, len(values)
    while position < end:
        part, taken = await read_chunk(reader, values, position)
        if not taken:
            break
        for delta in part:
            told.add(delta)
        position += taken
        if position < end:
            await asyncio.sleep(0)
    return told.deltas, position


async def log_checksum(row: bytes, before: int = 0) -> int:
    """The CRC-32 of a row that goes on from what has the checksum ``before``."""
    rest = memoryview(row)
    while len(rest) > CHECKSUM_CHUNK_BYTES:
        before, rest = crc32(rest[:CHECKSUM_CHUNK_BYTES], before), rest[CHECKSUM_CHUNK_BYTES:]
        await asyncio.sleep(0)
    return crc32(rest, before)


async def read_record(
    request_id: str, fields: Mapping[bytes, bytes], row: bytes, now: int = 0, *, tokens_only: bool = False
) -> tuple[RequestRecord, TokenLogReader, int]:
    """The record from its hash and its row, ``now`` being the database's time in ms; the reader that stands at its end,
    and how many values of the row are complete deltas. Of a ``brief`` one the deltas are without log-probabilities and
    scores. Raises ``CorruptRecordError``.
    """
    record = decode_record(request_id, fields, len(row), await log_checksum(row), now)
    reader = TokenLogReader(record.generation.params.n, tokens_only=tokens_only)
    try:
        record.deltas, taken = await read_log(reader, unpack_tokens(row))
    except ValueError:
        raise CorruptRecordError("the row is damaged") from None
    return record, reader, taken
