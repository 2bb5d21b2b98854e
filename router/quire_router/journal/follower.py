"""Follows one record that any router may be writing, and reads only what is new."""

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from quire_router.journal.base import RecordUpdate, partial_update
from quire_router.journal.codec import (
    TOKEN_BYTES,
    CorruptRecordError,
    decode_epoch,
    decode_num_choices,
    decode_state,
    pack_tokens,
    unpack_tokens,
    verify_checksum,
)
from quire_router.journal.token_log import TokenLogReader, log_checksum, read_chunk

UPDATE_FIELDS = ("epoch", "reason", "error", "usage", "lease_expires", "sum")


@dataclass(frozen=True, slots=True)
class RawRecordUpdate:
    """Some fields of a record, the ``length`` of its packed token log in bytes, the log from some byte on (``packed``),
    and the time in ms by Redis' clock, all of one moment. The end of one that is ``pending`` is not stored yet.
    """

    fields: Mapping[bytes, bytes]
    length: int
    packed: bytes
    now: int
    pending: bool = False


class RecordFollower:
    """The position of one reader of a record. ``read_update`` takes names of fields and an offset in bytes.

    The log may be lost with the database's data and be written again, also by another router; then nothing is new until
    it is as long as what was read. The record's checksum is of the whole log, so it shows whether the log continues
    what was read; if not, the record counts as damaged.
    """

    def __init__(self, read_update: Callable[[tuple[str, ...], int], Awaitable[RawRecordUpdate]]) -> None:
        self._read_update = read_update
        self._reader: TokenLogReader | None = None
        self._offset = 0  # bytes of the log that were read
        self._checksum = 0  # of these
        self._unread: _UnreadLog | None = None

    async def poll(self) -> RecordUpdate | None:
        """See ``Follower``."""
        if self._reader is not None and self._unread is not None:
            return await self._read(self._reader, self._unread)
        update = await self._read_update(
            ("request", *UPDATE_FIELDS) if self._reader is None else UPDATE_FIELDS, self._offset
        )
        if not update.fields:
            return None
        decode_epoch(update.fields.get(b"epoch", b""))
        if self._reader is None:
            self._reader = TokenLogReader(decode_num_choices(update.fields.get(b"request", b"")))
        end = replace(decode_state(update.fields, update.now), pending=update.pending)
        if update.length >= self._offset:
            total = await log_checksum(update.packed, self._checksum)
            verify_checksum(update.fields, update.length, total)
            self._unread = _UnreadLog(unpack_tokens(update.packed), total, end)
            return await self._read(self._reader, self._unread)
        if end.finish_reason is not None:
            raise CorruptRecordError("a record ended shorter than it was")
        return end

    async def _read(self, reader: TokenLogReader, unread: "_UnreadLog") -> RecordUpdate:
        try:
            deltas, taken = await read_chunk(reader, unread.values, unread.position)
        except ValueError:
            raise CorruptRecordError("the log is damaged") from None
        unread.position += taken
        if reader.has_complete_entry(unread.values, unread.position):
            return partial_update(deltas)
        self._unread = None
        self._offset += unread.position * TOKEN_BYTES
        complete = unread.position == len(unread.values)
        read = b"" if complete else pack_tokens(unread.values[: unread.position])
        self._checksum = unread.checksum if complete else await log_checksum(read, self._checksum)
        return replace(unread.end, deltas=deltas)


@dataclass(slots=True)
class _UnreadLog:
    """Values of a log that fit its checksum, of which those before ``position`` were returned, and the state of the
    record when they were read.
    """

    values: "array[int]"
    checksum: int
    end: RecordUpdate
    position: int = 0
