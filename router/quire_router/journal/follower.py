"""A look after one record in Redis that somebody else may be writing. Reads only what is new."""

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from quire_router.journal.base import Tail, part_of_more
from quire_router.journal.codec import (
    TOKEN_BYTES,
    DamagedRecordError,
    check_sum,
    decode_choices,
    decode_end,
    decode_epoch,
    pack_tokens,
    unpack_tokens,
)
from quire_router.journal.deliveries import RowReader
from quire_router.journal.reading import checksum, read_part

FIELDS = ("epoch", "reason", "error", "usage", "lease_expires", "sum")


@dataclass(frozen=True, slots=True)
class Glance:
    """Some fields of a record, how many bytes its row has, the row from some byte on, and the time in ms by Redis'
    clock, all of one moment.
    """

    fields: Mapping[bytes, bytes]
    length: int
    row: bytes
    now: int


class RedisFollower:
    """Where one reader of a record stands. ``glance`` takes names of fields and an offset.

    The row may vanish with Redis' data and be written again, also by another router; then there is no news until it is
    as long as what was read. The record's checksum is of the whole row, so it tells whether what is there now goes on
    from what was read; if not, the record counts as damaged.
    """

    def __init__(self, glance: Callable[[tuple[str, ...], int], Awaitable[Glance]]) -> None:
        self._glance = glance
        self._reader: RowReader | None = None
        self._offset = 0  # bytes of the row that were read
        self._checksum = 0  # of these
        self._news: _News | None = None

    async def look(self) -> Tail | None:
        """See ``Follower``."""
        if self._reader is not None and self._news is not None:
            return await self._read(self._reader, self._news)
        seen = await self._glance(("request", *FIELDS) if self._reader is None else FIELDS, self._offset)
        if not seen.fields:
            return None
        decode_epoch(seen.fields.get(b"epoch", b""))
        if self._reader is None:
            self._reader = RowReader(decode_choices(seen.fields.get(b"request", b"")))
        end = decode_end(seen.fields, seen.now)
        if seen.length >= self._offset:
            total = await checksum(seen.row, self._checksum)
            check_sum(seen.fields, seen.length, total)
            self._news = _News(unpack_tokens(seen.row), total, end)
            return await self._read(self._reader, self._news)
        if end.finish_reason is not None:
            raise DamagedRecordError("a record ended shorter than it was")
        return end

    async def _read(self, reader: RowReader, news: "_News") -> Tail:
        try:
            pieces, taken = await read_part(reader, news.values, news.position)
        except ValueError:
            raise DamagedRecordError("the row is damaged") from None
        news.position += taken
        if reader.has_piece(news.values, news.position):
            return part_of_more(pieces)
        self._news = None
        self._offset += news.position * TOKEN_BYTES
        complete = news.position == len(news.values)
        read = b"" if complete else pack_tokens(news.values[: news.position])
        self._checksum = news.checksum if complete else await checksum(read, self._checksum)
        return replace(news.end, pieces=pieces)


@dataclass(slots=True)
class _News:
    """What was seen of a row and fits its checksum, of which so much as ``position`` says was told, and how it was with
    the record then.
    """

    values: "array[int]"
    checksum: int
    end: Tail
    position: int = 0
