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
from quire_router.journal.base import Lease, encode_error
from quire_router.journal.buffered_journal import BufferedJournal, StoredRecord
from quire_router.journal.codec import JournalSettings
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.journal_writer import JournalWriter, WriteReply
from quire_router.journal.sqlite.database import FileTakenError, JournalFile
from quire_router.journal.sqlite.records import RecordReader, RecordWriter
from quire_router.journal.write_buffer import BufferedWrite, WriteBuffer

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
        super().__init__(store, writer, buffer, owner=owner, timeout=timeout)

    async def _is_settling(self, request_id: str) -> bool:  # noqa: ARG002 - of any
        """Nobody else writes here, so that is so while what is buffered cannot be written."""
        return not self.available


class SqliteStore:
    """See ``RecordStore``. Those calls that write are done in order, and so are those that read."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, TimeoutError)

    def __init__(self, file: JournalFile, settings: JournalSettings, max_bytes: int) -> None:
        self.path = file.path
        self._file = file
        self._records = RecordWriter(file, settings, max_bytes)
        self._reader = RecordReader(file.reader)
        self._writing = ThreadPoolExecutor(1, "journal writer")
        self._reading = ThreadPoolExecutor(1, "journal reader")
        self._abandoned: deque[Lease] = deque()
        self._cleaned = 0.0

    async def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """See ``RecordStore``."""
        return await self._write(self._records.open, generation, lease)

    async def claim(self, request_id: str, owner: str, name: str) -> StoredRecord | None:  # noqa: ARG002 - it is not repeated
        """See ``RecordStore``. A claim that is cancelled leaves no lease."""
        claiming = self._write(self._records.claim, request_id, owner)
        try:
            return None if await asyncio.shield(claiming) is None else await self.read(request_id)
        except BaseException:
            claiming.add_done_callback(self._abandon_claimed)
            raise

    async def fail_corrupt(self, lease: Lease) -> None:
        """See ``RecordStore``."""
        log.error("the record of request %s is damaged", lease.request_id)
        await self._write(self._records.fail, lease, encode_error(internal()))

    async def cancel(self, request_id: str) -> bool:
        """See ``RecordStore``."""
        return await self._write(self._records.cancel, request_id)

    async def delete(self, request_id: str) -> bool:
        """See ``RecordStore``."""
        return await self._write(self._records.delete, request_id)

    async def read(self, request_id: str) -> StoredRecord | None:
        """See ``RecordStore``."""
        return await self._read(self._reader.read, request_id)

    async def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """See ``RecordStore``."""
        return await self._read(self._reader.statuses, request_ids)

    async def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """See ``RecordStore``."""
        return await self._read(self._reader.read_update, request_id, names, offset)

    async def orphans(self) -> list[str]:
        """See ``RecordStore``."""
        return await self._read(self._reader.orphans)

    def abandon(self, lease: Lease) -> None:
        """See ``RecordStore``. The lease is given up with the next flush or heartbeat."""
        self._abandoned.append(lease)

    def check_in_place(self) -> None:
        """Raises ``FileTakenError`` if what is written would be lost."""
        self._file.check_in_place()

    async def flush(self, writes: list[BufferedWrite]) -> list[WriteReply]:
        """Writes all of this in one transaction, and gives up abandoned leases."""
        self.check_in_place()
        abandoned = list(self._abandoned)
        replies = await self._write(self._records.write, writes, abandoned)
        for _ in abandoned:
            self._abandoned.popleft()
        return replies

    async def clean(self) -> None:
        """Deletes records whose time is over, and from time to time takes what was deleted out of the files: the pages
        that are free, if they are many, and the WAL.
        """
        if self._abandoned:
            await self.flush([])
        while await self._write(self._records.sweep):
            pass
        if self._records.has_garbage and monotonic() - self._cleaned >= CLEANUP_PERIOD:
            self._cleaned = monotonic()
            await self._write(self._records.vacuum)

    async def probe(self) -> None:
        """Writes a page with nothing new on it."""
        await self._write(self._records.probe)

    async def close(self) -> None:
        """See ``RecordStore``."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writing.shutdown()
        self._reading.shutdown()
        self._file.close()

    def _write(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writing, partial(call, *arguments, **options))

    def _read(self, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._reading, partial(call, *arguments, **options))

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
        """It always is."""

    async def beat(self) -> None:
        """See ``WriteTarget``. Also when everything that is too old is deleted."""
        self._store.check_in_place()
        if self._failing:
            await self._store.probe()
        await self._store.clean()

    async def write(self, writes: list[BufferedWrite]) -> list[WriteReply | Exception]:
        """See ``WriteTarget``."""
        replies = await self._store.flush(writes)
        self._failing = False
        return list(replies)

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
        """See ``WriteTarget``."""
        self._failing = True
