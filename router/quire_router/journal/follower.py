"""A look after one record in Redis that somebody else may be writing. Reads only what is new."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from quire_router.journal.base import Tail, Told
from quire_router.journal.codec import TOKEN_BYTES, DamagedRecordError, decode_choices, decode_end, unpack_tokens
from quire_router.journal.deliveries import RowReader

FIELDS = ("epoch", "owner", "reason", "error", "usage", "lease_expires", "length")


@dataclass(frozen=True, slots=True)
class Glance:
    """Some fields of a record, how many bytes its row has, the row from some byte on, and the time in ms by Redis'
    clock, all of one moment.
    """

    fields: Mapping[bytes, bytes]
    length: int
    row: bytes
    now: int

    @property
    def writer(self) -> tuple[bytes | None, bytes | None]:
        """Whose row it is."""
        return self.fields.get(b"epoch"), self.fields.get(b"owner")


class RedisFollower:
    """Where one reader of a record stands. ``glance`` takes names of fields and an offset.

    The row may vanish with Redis' data and be written again; then there is no news until it is longer than what was
    read. As long as the writer is the same, so is what it writes. After another one came the row is read from the
    beginning, and has to begin with what was read before, or else the record counts as damaged.
    """

    def __init__(self, glance: Callable[[tuple[str, ...], int], Awaitable[Glance]]) -> None:
        self._glance = glance
        self._reader: RowReader | None = None
        self._writer: tuple[bytes | None, bytes | None] = (None, None)
        self._offset = 0
        self._digest = blake2b()

    async def look(self) -> Tail | None:
        """See ``Follower``."""
        seen = await self._glance(("request", *FIELDS) if self._reader is None else FIELDS, self._offset)
        if self._offset and seen.writer != self._writer:
            seen = await self._glance(FIELDS, 0)
            seen = replace(seen, row=self._after_the_known(seen))
        if b"epoch" not in seen.fields:
            return None
        if self._reader is None:
            self._reader = RowReader(decode_choices(seen.fields.get(b"request", b"")))
        end = decode_end(seen.fields, seen.length, seen.now)
        if seen.length >= self._offset:
            self._writer = seen.writer
            return replace(end, pieces=self._read(self._reader, seen.row))
        if end.finish_reason is not None:
            raise DamagedRecordError("a record ended shorter than it was")
        return end

    def _after_the_known(self, seen: Glance) -> bytes:
        if seen.length >= self._offset and blake2b(seen.row[: self._offset]).digest() != self._digest.digest():
            raise DamagedRecordError("a record does not begin any more as it did")
        return seen.row[self._offset :]

    def _read(self, reader: RowReader, row: bytes) -> list[Told]:
        try:
            pieces, taken = reader.read(unpack_tokens(row))
        except ValueError:
            raise DamagedRecordError("the row is damaged") from None
        self._digest.update(row[: taken * TOKEN_BYTES])
        self._offset += taken * TOKEN_BYTES
        return pieces
