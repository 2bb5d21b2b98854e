"""How a row of any length is read beside everything else that this process does: in parts of a millisecond or so, and
a piece that is larger than that in a thread. Knows no database.
"""

import asyncio
from array import array
from collections.abc import Mapping
from zlib import crc32

from quire_router.journal.base import Record, Told
from quire_router.journal.codec import DamagedRecordError, decode_record, unpack_tokens
from quire_router.journal.deliveries import RowReader
from quire_router.journal.pieces import Pieces

PART = 4_096  # values of a row
MAX_AT_ONCE = 16_384  # values of one piece that are read in the loop: 64 KiB
SUMMED_AT_ONCE = 1_048_576  # bytes


async def read_part(reader: RowReader, values: "array[int]", start: int) -> tuple[list[Told], int]:
    """Some of the pieces that begin at ``start``, and how many values they are: 0 when there is no complete one. Raises
    ``ValueError`` for what is no row.
    """
    if reader.piece_size(values, start) > MAX_AT_ONCE:
        read, taken = await asyncio.to_thread(reader.read, values, start, PART)
    else:
        read, taken = reader.read(values, start, PART)
    told = Pieces()
    for piece in read:
        told.add(piece)
    return told.pieces, taken


async def read_row(reader: RowReader, values: "array[int]") -> tuple[list[Told], int]:
    """All pieces of a row as it is now, and how many values they are. Raises ``ValueError`` for what is no row."""
    told, position, end = Pieces(), 0, len(values)
    while position < end:
        part, taken = await read_part(reader, values, position)
        if not taken:
            break
        for piece in part:
            told.add(piece)
        position += taken
        if position < end:
            await asyncio.sleep(0)
    return told.pieces, position


async def checksum(row: bytes, before: int = 0) -> int:
    """The CRC-32 of a row that goes on from what has the checksum ``before``."""
    rest = memoryview(row)
    while len(rest) > SUMMED_AT_ONCE:
        before, rest = crc32(rest[:SUMMED_AT_ONCE], before), rest[SUMMED_AT_ONCE:]
        await asyncio.sleep(0)
    return crc32(rest, before)


async def read_record(
    request_id: str, fields: Mapping[bytes, bytes], row: bytes, now: int = 0, *, brief: bool = False
) -> tuple[Record, RowReader, int]:
    """The record from its hash and its row, ``now`` being the database's time in ms; the reader that stands at its end,
    and how many values of the row are complete pieces. Of a ``brief`` one the pieces are without log-probabilities and
    scores. Raises ``DamagedRecordError``.
    """
    record = decode_record(request_id, fields, len(row), await checksum(row), now)
    reader = RowReader(record.generation.params.n, brief=brief)
    try:
        record.pieces, taken = await read_row(reader, unpack_tokens(row))
    except ValueError:
        raise DamagedRecordError("the row is damaged") from None
    return record, reader, taken
