"""Records as they are in the tables of a journal's file: each look is at the state of one moment.

All of it blocks and belongs into the reading thread of ``SqliteStore``. What is read has the form that a record in
Redis has, so that both are decoded alike.
"""

import sqlite3
from collections.abc import Sequence
from time import time
from typing import Any

from quire_router.journal.base import MAX_ORPHANS
from quire_router.journal.codec import STATUS_FIELDS
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.record_store import StoredRecord
from quire_router.journal.sqlite.database import transaction

DAMAGED = -1  # in place of a log's checksum: a CRC-32 is never negative, so what decodes the log refuses it


class RecordReader:
    """The connection that reads. Raises ``sqlite3.Error``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._last_orphan = 0

    def read(self, request_id: str) -> StoredRecord | None:
        """See ``RecordStore``."""
        with transaction(self._connection, "DEFERRED"):
            fields, now = self._fields(request_id)
            if fields is None:
                return None
            record = fields.pop("record")
            names = "request", "prompt", "conversation", "seal"
            row = self._connection.execute(
                "SELECT request, prompt, conversation, seal FROM requests WHERE record = ?", (record,)
            ).fetchone()
            fields |= dict(zip(names, row or (), strict=False))
            parts = self._connection.execute(
                "SELECT start, packed FROM logs WHERE record = ? ORDER BY start", (record,)
            ).fetchall()
            if not _is_whole(parts, 0):
                fields["sum"] = DAMAGED
            return _encode(fields), b"".join(part for _, part in parts), now

    def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """See ``RecordStore``."""
        with transaction(self._connection, "DEFERRED"):
            return [self._status(request_id) for request_id in request_ids]

    def _status(self, request_id: str) -> tuple[dict[bytes, bytes], int, int]:
        fields, now = self._fields(request_id)
        if fields is None:
            return {}, 0, now
        row = self._connection.execute(
            "SELECT request, length(prompt) FROM requests WHERE record = ?", (fields["record"],)
        ).fetchone()
        told = self._connection.execute(
            "SELECT num_tokens FROM logs WHERE record = ? AND num_tokens IS NOT NULL ORDER BY start DESC LIMIT 1",
            (fields["record"],),
        ).fetchone()
        request, length = row or (None, 0)
        fields |= {"request": request, "told": told[0] if told else 0}
        return _encode({name: fields.get(name) for name in STATUS_FIELDS}), length, now

    def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """See ``RecordStore``."""
        with transaction(self._connection, "DEFERRED"):
            fields, now = self._fields(request_id)
            if fields is None:
                return RawRecordUpdate({}, 0, b"", now)
            record = fields["record"]
            if "request" in names:
                row = self._connection.execute("SELECT request FROM requests WHERE record = ?", (record,)).fetchone()
                fields["request"] = row[0] if row else None
            parts = self._connection.execute(
                "SELECT start, packed FROM logs WHERE record = :record AND start >= coalesce("
                "(SELECT max(start) FROM logs WHERE record = :record AND start <= :offset), 0) ORDER BY start",
                {"record": record, "offset": offset},
            ).fetchall()
            length = parts[-1][0] + len(parts[-1][1]) if parts else 0
            if not _is_whole(parts, offset):
                fields["sum"] = DAMAGED
            packed = b"".join(part for _, part in parts)[max(0, offset - parts[0][0]) :] if parts else b""
            return RawRecordUpdate(_encode({name: fields.get(name) for name in names}), length, packed, now)

    def orphans(self) -> list[str]:
        """See ``Journal``."""
        found = self._next_orphans()
        if not found and self._last_orphan:
            self._last_orphan = 0
            found = self._next_orphans()
        self._last_orphan = found[-1][0] if found else 0
        return [request_id for _, request_id in found]

    def _next_orphans(self) -> list[tuple[int, str]]:
        return self._connection.execute(
            "SELECT record, request_id FROM records WHERE background AND reason IS NULL AND expires > ? "
            "AND record > ? ORDER BY record LIMIT ?",
            (time(), self._last_orphan, MAX_ORPHANS),
        ).fetchall()

    def _fields(self, request_id: str) -> tuple[dict[str, Any] | None, int]:
        """The record's fields, as those of a hash in Redis, without its request, and the time in ms."""
        now = time()
        row = self._connection.execute(
            "SELECT record, owner, epoch, expires, opened, retention, reason, error, usage, length, version "
            "FROM records WHERE request_id = ? AND (expires IS NULL OR expires > ?)",
            (request_id, now),
        ).fetchone()
        if row is None:
            return None, int(now * 1000)
        names = "record", "owner", "epoch", "expires", "opened", "retention", "reason", "error", "usage", "length"
        fields = dict(zip((*names, "version"), row, strict=True))
        if fields.pop("expires") is None:
            fields["lease_expires"] = int(now * 1000) + 1
        last = "SELECT checksum, start + length(packed) FROM logs WHERE record = ? ORDER BY start DESC LIMIT 1"
        fields["sum"], length = self._connection.execute(last, (fields["record"],)).fetchone() or (0, 0)
        if fields.pop("length") not in (None, length):
            fields["sum"] = DAMAGED  # its end is missing
        return fields, int(now * 1000)


def _is_whole(parts: list[tuple[int, bytes]], offset: int) -> bool:
    """Whether each part of a log begins where the last one ends, and the first one at ``offset`` or before."""
    end = parts[0][0] if parts else offset
    if end > offset:
        return False
    for start, packed in parts:
        if start != end:
            return False
        end += len(packed)
    return True


def _encode(fields: dict[str, Any]) -> dict[bytes, bytes]:
    """The fields that have a value, as a hash in Redis has them."""
    return {name.encode(): _as_bytes(value) for name, value in fields.items() if value is not None}


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
