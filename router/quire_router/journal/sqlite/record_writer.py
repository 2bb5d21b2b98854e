"""Records in the tables of a journal's file: what each write, claim and cancellation does there.

All of it blocks and belongs into the writing thread of ``SqliteStore``. What these transactions promise is what the Lua
scripts of the journal in Redis promise (``redis/common.lua``): a write with an older epoch or of another owner changes
nothing, and repeating one that was done changes nothing either. A record is leased while it has no time at which it
expires.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import time
from typing import TypeVar
from zlib import crc32

from quire_proto.sampling import FinishReason

from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.usage import HOUR, REMEMBERED, difference
from quire_router.journal.base import Lease
from quire_router.journal.codec import (
    TOKEN_BYTES,
    JournalSettings,
    decode_usage,
    encode_request_fields,
    encode_usage,
)
from quire_router.journal.journal_writer import WriteReply
from quire_router.journal.sqlite.database import FileTakenError, JournalFile, session_number, transaction
from quire_router.journal.sqlite.sqlite_objects import has_expired_objects, sweep_objects
from quire_router.journal.sqlite.usage_table import add_usage, count_left, count_usage
from quire_router.journal.write_buffer import BufferedWrite, DroppedUsage, RequestEnd

MAX_MERGED_PARTS = 16_384  # of a log, which are read and written as one when its record ends
SWEPT_RECORDS = 100  # that one transaction deletes
FULL_SHARE = 0.9  # of the largest file, beyond which records go before their time
EVICTED_RECORDS = 10  # that one transaction deletes for that reason
MAX_TIME = 2**62  # seconds
MIN_FREE_SHARE = 0.25  # of the file that is free before pages are given back, so that it does not shrink and grow
MIN_FREE_PAGES = 256  # 1 MiB
VACUUMED_PAGES = 4_096  # that are given back at once: 16 MiB
T = TypeVar("T")


@dataclass(slots=True)
class _Stored:
    """What writes have to know of a record."""

    record: int
    owner: str
    epoch: int
    leased: bool
    cancelled: bool
    ended: bool
    retention: int | None
    background: bool

    def is_of(self, lease: Lease) -> bool:
        return self.owner == lease.owner and self.epoch == lease.epoch


@dataclass(slots=True)
class _WrittenLog:
    """The log of a record that this router writes: ``length`` in bytes as of the last commit or in this transaction."""

    record: int
    lease: Lease
    length: int


class RecordWriter:
    """The connection that writes. Each method is a transaction. Raises ``sqlite3.Error``, and has changed nothing."""

    def __init__(self, file: JournalFile, settings: JournalSettings, max_bytes: int) -> None:
        self._connection = file.writer
        self._session = file.session
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        self._max_pages = max_bytes // page_bytes
        self._connection.execute(f"PRAGMA max_page_count = {self._max_pages}")
        self._settings = settings
        self._logs: dict[str, _WrittenLog] = {}
        self._counted_before: dict[str, Usage] = {}  # of requests that were deleted and still run
        self._data_version = 0  # another one means that another connection has written
        self._now = 0.0  # of the transaction, in seconds
        self.has_garbage = True  # what was deleted, also by the last router, may still be in the WAL
        self._next_hourly_sweep = 0.0
        with self._transaction():
            count_left(self._connection, self._now)

    def write(self, writes: list[BufferedWrite], abandoned: Sequence[Lease]) -> list[WriteReply]:
        """Writes all of this; gives up the leases ``abandoned``."""
        with self._transaction():
            for lease in abandoned:
                self._abandon(lease)
            return [self._write(write) for write in writes]

    def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """See ``RecordStore``."""
        with self._transaction():
            return self._open(generation, lease) is WriteReply.DONE

    def claim(self, request_id: str, owner: str) -> Lease | None:
        """Takes the lease on a record that has none; None if it cannot."""
        with self._transaction():
            stored = self._stored(request_id)
            if stored is None or stored.ended or stored.leased:
                return None
            if stored.cancelled:
                self._abort(stored, self._settings.retention_s)
                return None
            lease = Lease(request_id, owner, stored.epoch + 1)
            self._hold(stored.record, lease)
            return lease

    def cancel(self, request_id: str) -> bool:
        """See ``RecordStore``."""
        with self._transaction():
            stored = self._stored(request_id)
            if stored is None or stored.ended:
                return False
            self._cancel(request_id, stored, self._settings.retention_s)
            return True

    def delete(self, request_id: str, *, counted_later: bool = False) -> bool:
        """Deletes the record; returns False if there is none. Counts what it used so far. If more of that is
        ``counted_later``, without a record, what was counted is remembered.
        """
        with self._transaction():
            stored = self._stored(request_id)
            if stored is None:
                return False
            self._count_left(stored.record)
            counted = "SELECT counted FROM records WHERE record = ?"
            (text,) = self._connection.execute(counted, (stored.record,)).fetchone()
            self._delete(stored)
            self._logs.pop(request_id, None)
        if counted_later:
            self._counted_before[request_id] = decode_usage((text or "").encode())
        return True

    def fail(self, lease: Lease, error: str) -> None:
        """Ends a record with an error, whatever its log is."""
        with self._transaction():
            stored = self._stored(lease.request_id)
            if stored is not None and stored.is_of(lease) and not stored.ended:
                self._end(stored, RequestEnd(FinishReason.ERROR, error), self._settings.retention_s)

    def count_dropped(self, dropped: Sequence[DroppedUsage]) -> None:
        """Counts what requests used that have no record, or only its beginning; of each id once in ``REMEMBERED``
        seconds.
        """
        with self._transaction():
            for each in dropped:
                stored = self._stored(each.lease.request_id)
                if stored is not None and stored.is_of(each.lease):
                    self._count(stored, each.usage)
                elif self._connection.execute(
                    "INSERT OR IGNORE INTO counted VALUES (?, ?)", (each.lease.request_id, int(self._now))
                ).rowcount:
                    before = self._counted_before.get(each.lease.request_id, NO_USAGE)
                    add_usage(self._connection, each.account, difference(each.usage, before), self._now)
        for each in dropped:
            self._counted_before.pop(each.lease.request_id, None)

    def write_objects(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Returns what ``write`` returns, whose statements are one transaction: it changes objects."""
        with self._transaction():
            self.has_garbage = True
            return write(self._connection)

    def sweep(self) -> bool:
        """Deletes records whose time is over, or while the file is nearly as large as it may be those without a lease
        whose time is over first. Returns whether there may be more of them.
        """
        pages, free = self._pages()
        is_full = pages - free > FULL_SHARE * self._max_pages
        until, most = (MAX_TIME, EVICTED_RECORDS) if is_full else (time(), SWEPT_RECORDS)
        self._sweep_hourly()
        due = "SELECT record FROM records WHERE expires <= ? ORDER BY expires LIMIT ?"
        if not self._connection.execute(due, (until, 1)).fetchone():
            return False
        with self._transaction():
            records = self._connection.execute(due, (until, most)).fetchall()
            for (record,) in records:
                self._count_left(record)
            self._connection.executemany("DELETE FROM records WHERE record = ?", records)
            self.has_garbage = True
            return len(records) == most

    def sweep_objects(self) -> bool:
        """Deletes some of the objects that have expired. Returns whether there may be more of them."""
        if not has_expired_objects(self._connection):
            return False
        self.write_objects(sweep_objects)
        return True

    def vacuum(self) -> None:
        """Gives back free pages if they are many, and empties the WAL: what was deleted is in neither file any more."""
        pages, free = self._pages()
        if free > max(MIN_FREE_PAGES, MIN_FREE_SHARE * pages):
            # Not execute(), which would end after the first page, as it sees no column in the result.
            self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUMED_PAGES})")
        busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self.has_garbage = bool(busy)  # somebody reads an older state

    def _sweep_hourly(self) -> None:
        """Once an hour deletes old hours of usage, ids of requests that were counted, and accounts' expired names."""
        if time() >= self._next_hourly_sweep:
            with self._transaction():
                oldest = int(self._now - self._settings.usage_retention)
                self._connection.execute("DELETE FROM usage WHERE hour < ?", (oldest,))
                self._connection.execute("DELETE FROM counted WHERE at < ?", (int(self._now - REMEMBERED),))
                self._connection.execute("DELETE FROM accounts WHERE expires <= ?", (int(self._now),))
            self._next_hourly_sweep = self._now + HOUR

    def probe(self) -> None:
        """Writes a page with nothing new on it."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        self._connection.execute(f"PRAGMA user_version = {version}")

    def _pages(self) -> tuple[int, int]:
        """How many pages the file has, and how many of them are free."""
        execute = self._connection.execute
        (pages,), (free,) = execute("PRAGMA page_count").fetchone(), execute("PRAGMA freelist_count").fetchone()
        return pages, free

    # Within a transaction

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._now = time()
        try:
            with transaction(self._connection):
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if version != self._data_version:
                    if session_number(self._connection) != self._session:
                        raise FileTakenError("another router has opened it since: give each one a file of its own")
                    self._logs.clear()
                    self._data_version = version
                yield
        except BaseException:
            self._logs.clear()  # it is not known what of them is stored
            raise

    def _write(self, write: BufferedWrite) -> WriteReply:
        request, reply = write.request, WriteReply.DONE
        if write.opens:
            reply = self._open(request.generation, request.lease)
        if reply is WriteReply.DONE:
            reply = self._append(write)
        if reply in (WriteReply.DONE, WriteReply.CANCELLED):
            if write.end is not None:
                return self._finish(write, write.end)
            if write.releases:
                return self._release(write)
        return reply

    def _open(self, generation: GenerationRequest, lease: Lease) -> WriteReply:
        stored = self._stored(lease.request_id)
        fields = encode_request_fields(generation)
        if stored is None:
            record = self._create(generation, lease)
        else:
            (before,) = self._connection.execute(
                "SELECT request FROM requests WHERE record = ?", (stored.record,)
            ).fetchone() or (None,)
            if before != fields.request or not (stored.is_of(lease) or lease.epoch > stored.epoch):
                return WriteReply.STALE
            if stored.ended:
                return WriteReply.DONE if stored.is_of(lease) else WriteReply.STALE
            if not stored.is_of(lease):
                self._connection.execute("DELETE FROM logs WHERE record = ?", (stored.record,))
            self._hold(record := stored.record, lease)
        self._connection.execute(
            "INSERT OR REPLACE INTO requests (record, request, prompt, conversation, seal) VALUES (?, ?, ?, ?, ?)",
            (record, fields.request, fields.prompt, fields.conversation or None, fields.seal),
        )
        if generation.retention is not None:
            self._connection.execute(
                "UPDATE records SET retention = ? WHERE record = ?", (self._settings.retention_of(generation), record)
            )
        self._logs.pop(lease.request_id, None)
        return WriteReply.DONE

    def _create(self, generation: GenerationRequest, lease: Lease) -> int:
        # One whose time is over may still be there.
        before = "SELECT record FROM records WHERE request_id = ?"
        for (record,) in self._connection.execute(before, (lease.request_id,)).fetchall():
            self._count_left(record)
        self._connection.execute("DELETE FROM records WHERE request_id = ?", (lease.request_id,))
        opened, kept = int(self._now * 1000), self._settings.running_ttl_of(generation)
        created = self._connection.execute(
            "INSERT INTO records (request_id, owner, epoch, opened, running_ttl, background) VALUES (?, ?, ?, ?, ?, ?)",
            (lease.request_id, lease.owner, lease.epoch, opened, kept, generation.background),
        )
        assert created.lastrowid is not None
        return created.lastrowid

    def _append(self, write: BufferedWrite) -> WriteReply:
        """Adds a part to the log, which ends with it. Nearly always that is one statement."""
        lease, start = write.request.lease, write.start * TOKEN_BYTES
        log = self._logs.get(lease.request_id)
        if log is None or log.lease != lease or log.length != start:
            stored = self._stored(lease.request_id)
            reply = _refusal(stored, lease)
            if reply is not None or stored is None or stored.ended:
                return reply or WriteReply.DONE  # an ended one is a repeat
            length = _log_length(self._connection, stored.record)
            if length < start:
                return WriteReply.LOST
            if length > start:
                # A former owner was cut off within a delta. What is left of it must not follow this one's.
                self._truncate(stored.record, start)
            self._hold(stored.record, lease)
            log = _WrittenLog(stored.record, lease, start)
            if stored.cancelled:
                self._add_part(log, write)
                return WriteReply.CANCELLED
            self._logs[lease.request_id] = log
        self._add_part(log, write)
        return WriteReply.DONE

    def _add_part(self, log: _WrittenLog, write: BufferedWrite) -> None:
        if write.packed:
            part = log.record, log.length, write.packed, write.checksum, write.num_tokens
            self._connection.execute("INSERT INTO logs VALUES (?, ?, ?, ?, ?)", part)
            if write.version:
                self._connection.execute("UPDATE records SET version = ? WHERE record = ?", (write.version, log.record))
            log.length += len(write.packed)

    def _truncate(self, record: int, length: int) -> None:
        """Cuts a log to so many bytes."""
        execute = self._connection.execute
        execute("DELETE FROM logs WHERE record = ? AND start >= ?", (record, length))
        parts = execute(
            "SELECT start, packed, checksum FROM logs WHERE record = ? ORDER BY start DESC LIMIT 2", (record,)
        ).fetchall()
        if parts and parts[0][0] + len(parts[0][1]) > length:
            start, packed, _ = parts[0]
            packed = packed[: length - start]
            checksum = crc32(packed, parts[1][2] if len(parts) > 1 else 0)
            execute(
                "UPDATE logs SET packed = ?, checksum = ?, num_tokens = NULL WHERE record = ? AND start = ?",
                (packed, checksum, record, start),
            )

    def _finish(self, write: BufferedWrite, end: RequestEnd) -> WriteReply:
        lease = write.request.lease
        stored = self._stored(lease.request_id)
        refused = _refusal(stored, lease)
        self._logs.pop(lease.request_id, None)
        if refused is not None or stored is None or stored.ended:
            return refused or WriteReply.DONE
        if _log_length(self._connection, stored.record) != write.stop * TOKEN_BYTES:
            return WriteReply.LOST
        if stored.cancelled:
            end = RequestEnd(FinishReason.ABORT, "", end.usage)  # that was the answer to cancel
        self._end(stored, end, self._settings.retention_of(write.request.generation))
        self._merge(stored.record)
        return WriteReply.DONE

    def _release(self, write: BufferedWrite) -> WriteReply:
        lease = write.request.lease
        stored = self._stored(lease.request_id)
        refused = _refusal(stored, lease)
        self._logs.pop(lease.request_id, None)
        if refused is not None or stored is None or stored.ended:
            return refused or WriteReply.DONE
        self._count(stored, write.request.usage)
        self._give_up(stored)
        return WriteReply.DONE

    def _abandon(self, lease: Lease) -> None:
        stored = self._stored(lease.request_id)
        if stored is None or not stored.is_of(lease) or stored.ended or not stored.leased:
            return
        self._logs.pop(lease.request_id, None)
        self._count(stored, NO_USAGE)
        self._give_up(stored)

    def _give_up(self, stored: _Stored) -> None:
        """Gives up the lease on a record that has not ended, or ends it if it was cancelled. One that was asked for in
        the background waits for a router that continues it, which may take longer than its retention.
        """
        if stored.cancelled:
            self._abort(stored, self._settings.retention_s)
            return
        retention = self._settings.retention_s if stored.retention is None else stored.retention
        kept = self._settings.running_ttl_s if stored.background else retention
        self._connection.execute(
            "UPDATE records SET expires = ? WHERE record = ?", (int(self._now) + kept, stored.record)
        )

    def _cancel(self, request_id: str, stored: _Stored, retention: int) -> None:
        self._logs.pop(request_id, None)  # so that the next write looks at the record
        if stored.leased:
            self._connection.execute("UPDATE records SET cancelled = 1 WHERE record = ?", (stored.record,))
        else:
            self._abort(stored, retention)

    def _abort(self, stored: _Stored, retention: int) -> None:
        """Ends a record with a new epoch, so that its former owner learns that it has ended."""
        self._connection.execute("UPDATE records SET owner = '', epoch = epoch + 1 WHERE record = ?", (stored.record,))
        self._end(stored, RequestEnd(FinishReason.ABORT), retention)

    def _end(self, stored: _Stored, end: RequestEnd, retention: int) -> None:
        self._count(stored, end.usage)
        kept = retention if stored.retention is None else stored.retention
        text = end.error.encode("utf-8", "surrogatepass")
        self._connection.execute(
            "UPDATE records SET reason = ?, error = ?, usage = ?, expires = ?, length = ? WHERE record = ?",
            (
                end.reason.value,
                text,
                encode_usage(end.usage),
                int(self._now) + kept,
                _log_length(self._connection, stored.record),
                stored.record,
            ),
        )

    def _count(self, stored: _Stored, usage: Usage) -> None:
        count_usage(self._connection, stored.record, usage, self._now)

    def _count_left(self, record: int) -> None:
        """Counts what was delivered of a record that is to be deleted, unless it has ended: then that was done."""
        (reason,) = self._connection.execute("SELECT reason FROM records WHERE record = ?", (record,)).fetchone()
        if reason is None:
            count_usage(self._connection, record, NO_USAGE, self._now)

    def _merge(self, record: int) -> None:
        """Makes one part of a log, which takes a third of the space and of the time that reading it takes."""
        execute = self._connection.execute
        parts = execute(
            "SELECT packed, checksum, num_tokens FROM logs WHERE record = ? ORDER BY start LIMIT ?",
            (record, MAX_MERGED_PARTS + 1),
        ).fetchall()
        if 1 < len(parts) <= MAX_MERGED_PARTS:
            _, checksum, num_tokens = parts[-1]
            packed = b"".join(part for part, _, _ in parts)
            execute("DELETE FROM logs WHERE record = ?", (record,))
            execute("INSERT INTO logs VALUES (?, 0, ?, ?, ?)", (record, packed, checksum, num_tokens))

    def _hold(self, record: int, lease: Lease) -> None:
        self._connection.execute(
            "UPDATE records SET owner = ?, epoch = ?, expires = NULL WHERE record = ?",
            (lease.owner, lease.epoch, record),
        )

    def _delete(self, stored: _Stored) -> None:
        self.has_garbage = True
        self._connection.execute("DELETE FROM records WHERE record = ?", (stored.record,))

    def _stored(self, request_id: str) -> _Stored | None:
        row = self._connection.execute(
            "SELECT record, owner, epoch, expires IS NULL, cancelled, reason IS NOT NULL, retention, background "
            "FROM records WHERE request_id = ? AND (expires IS NULL OR expires > ?)",
            (request_id, self._now),
        ).fetchone()
        return None if row is None else _Stored(*row)


def _refusal(stored: _Stored | None, lease: Lease) -> WriteReply | None:
    """None when the lease may write."""
    if stored is None or stored.epoch < lease.epoch:
        return WriteReply.LOST  # an older state came back: its log need not be this writer's
    return None if stored.is_of(lease) else WriteReply.STALE


def _log_length(connection: sqlite3.Connection, record: int) -> int:
    """In bytes."""
    last = "SELECT start + length(packed) FROM logs WHERE record = ? ORDER BY start DESC LIMIT 1"
    (length,) = connection.execute(last, (record,)).fetchone() or (0,)
    return int(length)
