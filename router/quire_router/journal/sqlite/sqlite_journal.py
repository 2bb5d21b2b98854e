"""The journal in a SQLite file, for one router: what runs survives the router's end, without a database server.

``SqliteStore`` runs what blocks in two threads, one for each connection of the ``JournalFile``; ``SqliteTarget`` is
what the journal's writer flushes to, a transaction a flush.
"""

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import ParamSpec, TypeVar

from quire_proto.errors import internal

from quire_router.core.generation import GenerationRequest
from quire_router.core.usage import UsageRow
from quire_router.journal.base import Lease, encode_error
from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.codec import JournalSettings
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.journal_writer import JournalWriter, WriteReply
from quire_router.journal.record_store import StoredRecord
from quire_router.journal.sqlite.database import FileTakenError, JournalFile
from quire_router.journal.sqlite.record_reader import RecordReader
from quire_router.journal.sqlite.record_writer import RecordWriter
from quire_router.journal.sqlite.sqlite_objects import SqliteObjectStore
from quire_router.journal.sqlite.usage_table import read_usage
from quire_router.journal.write_buffer import BufferedWrite, DroppedUsage, WriteBuffer

log = logging.getLogger(__name__)

CLEANUP_PERIOD = 5.0  # seconds at least between two times that what was deleted is taken out of the files
P = ParamSpec("P")
T = TypeVar("T")


class SqliteJournal(BufferedJournal):
    """Records in the file ``path``, which does not become larger than ``max_bytes``: before that, records without a
    lease are deleted, those first that would expire first. At most ``max_requests`` requests, and ``max_tokens`` tokens
    that are not written yet, are buffered. Raises ``JournalFileError`` if the file cannot be had.
    """

    def __init__(
        self,
        path: Path,
        *,
        owner: str | None = None,
        settings: JournalSettings | None = None,
        max_bytes: int = 1 << 32,
        max_requests: int = 20_000,
        max_tokens: int = 8_000_000,
        timeout: float = 5.0,
    ) -> None:
        settings, buffer = settings or JournalSettings(), WriteBuffer(max_requests, max_tokens)
        store = SqliteStore(JournalFile(path), settings, max_bytes)
        writer = JournalWriter(SqliteTarget(store), buffer, settings, renews=False, available=True)
        self.objects = SqliteObjectStore(store, max_bytes // 2)
        super().__init__(store, writer, buffer, owner=owner, timeout=timeout, end_timeout=settings.end_timeout)

    async def _is_settling(self, request_id: str) -> bool:  # noqa: ARG002 - of any
        """Nobody else writes here, so that is so while what is buffered cannot be written."""
        return not self.available


class SqliteStore:
    """The records of a ``JournalFile``. Those calls that write are done in order, and so are those that read.

    What a call wrote is committed when it returns: it survives the end of the process, and from the next checkpoint on
    a power failure. A call raises ``sqlite3.Error`` if its transaction failed, which has changed nothing then; one that
    writes a record raises ``FileTakenError`` if another router has opened the file since.
    """

    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, TimeoutError)

    def __init__(self, file: JournalFile, settings: JournalSettings, max_bytes: int) -> None:
        self.path = file.path
        self._file = file
        self._records = RecordWriter(file, settings, max_bytes)
        self._reader = RecordReader(file.reader)
        self._writing = ThreadPoolExecutor(1, "journal writer")
        self._reading = ThreadPoolExecutor(1, "journal reader")
        self._closed = False
        self._abandoned: deque[Lease] = deque()
        self._cleaned = 0.0

    async def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """Creates the record with this lease. Returns False if there is one of another request or owner."""
        return await self._write(self._records.open, generation, lease)

    async def claim(self, request_id: str, owner: str, name: str) -> StoredRecord | None:  # noqa: ARG002 - it is not repeated
        """Takes the lease on a record that has none, and reads the record; None if it cannot be taken. A claim that is
        cancelled gives its lease up with the next flush.
        """
        claiming = self._write(self._records.claim, request_id, owner)
        try:
            return None if await asyncio.shield(claiming) is None else await self.read(request_id)
        except BaseException:
            claiming.add_done_callback(self._abandon_claimed)
            raise

    async def fail_corrupt(self, lease: Lease) -> None:
        """Ends a record that cannot be read with an internal error, and logs that."""
        log.error("the record of request %s is damaged", lease.request_id)
        await self._write(self._records.fail, lease, encode_error(internal()))

    async def cancel(self, request_id: str) -> bool:
        """Ends the record, or marks a leased one as cancelled. Returns False if there is none, or it has ended."""
        return await self._write(self._records.cancel, request_id)

    async def delete(self, request_id: str, buffered: GenerationRequest | None) -> bool:
        """See ``RecordStore``. What is on its way is written before."""
        return await self._write(self._records.delete, request_id, counted_later=buffered is not None)

    async def read(self, request_id: str) -> StoredRecord | None:
        """The record as of the last commit; None if there is none."""
        return await self._read(self._reader.read, request_id)

    async def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """Of each record its ``STATUS_FIELDS``, the bytes of its prompt, and the time in ms."""
        return await self._read(self._reader.statuses, request_ids)

    async def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """The token log from byte ``offset`` on, and the fields ``names``, as of the last commit."""
        return await self._read(self._reader.read_update, request_id, names, offset)

    async def orphans(self) -> list[str]:
        """Ids of background requests that have no lease and have not ended; each call goes on behind the last one's."""
        return await self._read(self._reader.orphans)

    async def usage(self, since: float, until: float, tenant: str | None) -> list[UsageRow]:
        """See ``Journal``, as of the last commit."""
        return await self._read(read_usage, self._file.reader, since, until, tenant)

    async def settle_usage(self) -> None:
        """Nothing is left to be counted: what a router left that died is counted when the file is opened."""

    def abandon(self, lease: Lease) -> None:
        """Notes that ``lease`` is given up, which is written with the next flush or heartbeat. Never waits."""
        self._abandoned.append(lease)

    def check_in_place(self) -> None:
        """Raises ``FileTakenError`` if what is written would be lost."""
        self._file.check_in_place()

    async def flush(self, writes: list[BufferedWrite]) -> list[WriteReply]:
        """Writes all of ``writes`` and gives up abandoned leases, in one transaction. Returns a reply to each write.
        Raises ``FileTakenError`` also if the file or its WAL was moved, deleted or replaced.
        """
        self.check_in_place()
        abandoned = list(self._abandoned)
        replies = await self._write(self._records.write, writes, abandoned)
        for _ in abandoned:
            self._abandoned.popleft()
        return replies

    async def count(self, dropped: list[DroppedUsage]) -> None:
        """Counts what requests used that have no record, or only its beginning, in one transaction."""
        self.check_in_place()
        await self._write(self._records.count_dropped, dropped)

    async def write_objects(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Returns what ``write`` returns: one transaction that changes objects."""
        self.check_in_place()
        return await self._write(self._records.write_objects, write)

    async def read_objects(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Returns what ``read`` returns, which reads objects."""
        return await self._read(read, self._file.reader)

    async def clean(self) -> None:
        """Deletes records and objects whose time is over, and from time to time takes what was deleted out of the
        files: the pages that are free, if they are many, and the WAL.
        """
        if self._abandoned:
            await self.flush([])
        while await self._write(self._records.sweep) or await self._write(self._records.sweep_objects):
            pass
        if self._records.has_garbage and monotonic() - self._cleaned >= CLEANUP_PERIOD:
            self._cleaned = monotonic()
            await self._write(self._records.vacuum)

    async def probe(self) -> None:
        """Writes a page with nothing new on it."""
        await self._write(self._records.probe)

    async def close(self) -> None:
        """Waits for what was begun, then closes the file, which writes the WAL into it. Whoever still reads gets an
        error of a database that is away.
        """
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writing.shutdown()
        self._reading.shutdown()
        self._file.close()

    def _write(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
        return self._submit(self._writing, partial(call, *arguments, **options))

    def _read(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
        return self._submit(self._reading, partial(call, *arguments, **options))

    def _submit(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise sqlite3.ProgrammingError("the journal is closed")
        return asyncio.get_running_loop().run_in_executor(thread, call)

    def _abandon_claimed(self, claiming: "asyncio.Future[Lease | None]") -> None:
        lease = None if claiming.cancelled() or claiming.exception() is not None else claiming.result()
        if lease is not None:
            self.abandon(lease)


class SqliteTarget:
    """See ``WriteTarget``: the file of ``store``."""

    errors = SqliteStore.errors

    def __init__(self, store: SqliteStore) -> None:
        self.name = str(store.path)
        self._store = store
        self._failing = False

    async def connect(self) -> None:
        """Does nothing: the file is open."""

    async def beat(self) -> None:
        """Writes a page if the last write failed, and deletes what is too old. Raises ``FileTakenError`` or another
        ``sqlite3.Error``.
        """
        self._store.check_in_place()
        if self._failing:
            await self._store.probe()
        await self._store.clean()

    async def write(self, writes: list[BufferedWrite]) -> list[WriteReply | Exception]:
        """Writes all in one transaction: all is committed when it returns, or nothing if it raises."""
        replies = await self._store.flush(writes)
        self._failing = False
        return list(replies)

    async def count_closed(self, writes: list[BufferedWrite], replies: list[WriteReply | Exception]) -> None:
        """Does nothing: the transaction that wrote them counted what they used."""

    async def count(self, dropped: list[DroppedUsage]) -> None:
        """See ``WriteTarget``."""
        await self._store.count(dropped)

    def repeats(self, error: Exception) -> bool:  # noqa: ARG002 - whatever it is
        """It forgets nothing."""
        return False

    def is_refusal(self, error: Exception) -> bool:
        """Whether the disk is full, or something else is wrong with the file."""
        return isinstance(error, sqlite3.Error)

    def describe(self, error: Exception) -> str:
        """See ``WriteTarget``. Of SQLite's errors their name, such as ``SQLITE_FULL``."""
        if isinstance(error, FileTakenError):
            return str(error)
        return getattr(error, "sqlite_errorname", "") or type(error).__name__

    def mark_unavailable(self) -> None:
        """Makes the next heartbeat write a page: it may have nothing else to write, and so not find out."""
        self._failing = True
