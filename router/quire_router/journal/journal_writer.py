"""The one task that writes to a journal's database: what a ``WriteBuffer`` has, a flush at a time.

Nothing waits for it, and it survives every failure. A ``WriteTarget`` is the database.
"""

import asyncio
import logging
from contextlib import suppress
from enum import Enum
from itertools import islice
from typing import Protocol

from quire_proto.supervise import Backoff

from quire_router.core import metrics
from quire_router.journal.base import LeaseListener
from quire_router.journal.codec import JournalSettings
from quire_router.journal.write_buffer import BufferedRequest, BufferedWrite, DroppedUsage, WriteBuffer

log = logging.getLogger(__name__)

MAX_WRITES_PER_FLUSH = 128  # a flush of so many holds the loop for a millisecond or so
PAUSE_PER_WRITE = 0.0004  # seconds; a write to Redis takes about a thirtieth of that here
FIRST_DELAY, LAST_DELAY = 0.05, 1.0  # seconds from a failure to the next try
HEARTBEATS_PER_LEASE = 4


class WriteReply(Enum):
    """What became of one write.

    STALE: another owner or a newer epoch has the record, so that the writer has lost it. LOST: the database has not, or
    no longer, what was written before. CANCELLED: it is done, and the request is to end. DELETED: the record was
    deleted, so nothing is written, and the request is to end. DAMAGED: what is stored is no record, so its writes would
    always fail.
    """

    DONE = "done"
    STALE = "stale"
    LOST = "lost"
    CANCELLED = "cancelled"
    DELETED = "deleted"
    DAMAGED = "damaged"


class WriteTarget(Protocol):
    """The database. ``name`` is its name in the log, and ``errors`` are what its calls raise while it is not there or
    refuses; anything else is a bug, whose trace is logged.
    """

    name: str
    errors: tuple[type[Exception], ...]

    async def connect(self) -> None:
        """Prepares writes; does nothing if that is done."""
        ...

    async def beat(self) -> None:
        """Finds out whether the database is there and takes writes; called a few times in each lease."""
        ...

    async def write(self, writes: list[BufferedWrite]) -> list[WriteReply | Exception]:
        """Writes; an error among the replies means that this write is to be repeated. Repeating one that was done
        changes nothing.
        """
        ...

    async def count_closed(self, writes: list[BufferedWrite], replies: list[WriteReply | Exception]) -> None:
        """Counts what requests used whose ends and releases were just written, with these ``replies``. Replaces the
        reply to a write that is to be repeated for it by an error.
        """
        ...

    async def count(self, dropped: list[DroppedUsage]) -> None:
        """Counts what requests used that were dropped. Repeating it changes nothing."""
        ...

    def repeats(self, error: Exception) -> bool:
        """Whether the database only has to be written to once more, because of something that it had forgotten."""
        ...

    def is_refusal(self, error: Exception) -> bool:
        """Whether the database is there, and does not take what is written."""
        ...

    def describe(self, error: Exception) -> str:
        """What the log says of an error, without any part of what was written."""
        ...

    def mark_unavailable(self) -> None:
        """It cannot be written to, or could not until now."""
        ...


class JournalWriter:
    """Flushes dirty requests in one exchange after the other.

    A write is repeated after a failure, as it is not known whether the database saw it. A database that is there may
    still refuse writes, so once it did, only a write that succeeded ends the outage: one that began after the last
    failure and changed a record. With ``renews`` leases expire, and records that were not written lately are written to
    renew them. ``available`` is whether it is connected already.
    """

    def __init__(
        self,
        target: WriteTarget,
        buffer: WriteBuffer,
        settings: JournalSettings,
        *,
        renews: bool = True,
        available: bool = False,
    ) -> None:
        self.available = available
        self._target = target
        self._buffer = buffer
        self._settings = settings
        self._renews = renews
        self._listener: LeaseListener | None = None
        self._refusing = False
        self._failures = 0
        self._outage_logged = False
        self._backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        self._next_heartbeat = 0.0
        self._flushed = asyncio.Event()
        metrics.JOURNAL_AVAILABLE.set(available)

    def set_listener(self, listener: LeaseListener) -> None:
        """See ``Journal``."""
        self._listener = listener

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._run_once()
            except Exception as error:
                if self._target.repeats(error):
                    await asyncio.sleep(self._settings.pause)
                    continue
                if not isinstance(error, self._target.errors):
                    log.exception("the journal's writer failed")
                self.record_failure(error)
                await asyncio.sleep(self._backoff.next())

    @property
    def is_failing(self) -> bool:
        """Whether the database did not take the last writes; False before the first exchange with it, too."""
        return self._outage_logged

    async def flush(self) -> None:
        """Waits until nothing is dirty."""
        while self._buffer:
            self._flushed.clear()
            await self._flushed.wait()

    async def flush_end(self, request: BufferedRequest) -> None:
        """Has the end of a request written at once. Waits until the database has it, or never will."""
        self._buffer.mark_urgent(request)
        while self._buffer.contains(request) and not request.end_stored:
            self._flushed.clear()
            await self._flushed.wait()

    async def wait_written(self, request: BufferedRequest) -> None:
        """Waits until a request that was finished or released is written, or dropped."""
        while self._buffer.contains(request):
            self._flushed.clear()
            await self._flushed.wait()

    async def _run_once(self) -> None:
        await self._target.connect()
        if asyncio.get_running_loop().time() >= self._next_heartbeat:
            await self._beat()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_heartbeat):
                await self._buffer.wait_dirty()
        await self._count_dropped()
        writes = self._buffer.next_writes(MAX_WRITES_PER_FLUSH)
        await self._flush(writes)
        await self._pause(max(self._settings.pause, PAUSE_PER_WRITE * len(writes)))

    async def _flush(self, writes: list[BufferedWrite]) -> None:
        await self._write(writes)
        metrics.JOURNAL_PENDING.set(len(self._buffer))
        self._flushed.set()

    async def _pause(self, seconds: float) -> None:
        """Lets writes gather for so long, and writes meanwhile what somebody waits for."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            if await self._buffer.wait_urgent(until):
                await self._flush(self._buffer.next_writes(MAX_WRITES_PER_FLUSH, urgent=True))

    async def _beat(self) -> None:
        """Notices that the database is gone or refuses writes even if there is nothing to write. Renews every lease:
        marks the records that were not written lately dirty, so that the next flush writes each, maybe nothing, which
        renews it.
        """
        failures = self._failures
        await self._target.beat()
        if not self._refusing or not self._buffer:  # it may refuse larger writes than the one that was tried here
            self._on_success(failures)
        now, interval = asyncio.get_running_loop().time(), self._settings.lease / HEARTBEATS_PER_LEASE
        if self._renews:
            self._buffer.mark_unrenewed_dirty(now - interval / 2)
        self._next_heartbeat = now + interval

    def _on_success(self, failures: int) -> None:
        """Ends an outage, unless there were more than these ``failures`` in the meantime: the database's answer may be
        older than they are.
        """
        if failures != self._failures:
            return
        if not self.available:
            log.info("writing the journal to %s", self._target.name)
        self.available, self._refusing, self._outage_logged = True, False, False
        self._backoff.reset()
        metrics.JOURNAL_AVAILABLE.set(1)

    def record_failure(self, error: Exception) -> None:
        """The database did not take a write, of this or another task: it counts as unavailable until it takes one."""
        if not self._outage_logged:
            why = self._target.describe(error)
            log.warning("cannot write the journal to %s (%s); requests continue", self._target.name, why)
        self.available, self._outage_logged = False, True
        self._failures += 1
        self._refusing = self._refusing or self._target.is_refusal(error)
        self._target.mark_unavailable()
        metrics.JOURNAL_AVAILABLE.set(0)
        metrics.JOURNAL_PENDING.set(len(self._buffer))

    async def _count_dropped(self) -> None:
        dropped = list(islice(self._buffer.dropped, MAX_WRITES_PER_FLUSH))
        if dropped:
            await self._target.count(dropped)
            for _ in dropped:
                self._buffer.dropped.popleft()

    async def _write(self, writes: list[BufferedWrite]) -> None:
        if not writes:
            return
        failures = self._failures
        replies = await self._target.write(writes)
        self._on_ends_stored(writes, replies)
        await self._target.count_closed(writes, replies)
        now = asyncio.get_running_loop().time()
        problem = None
        for write, reply in zip(writes, replies, strict=True):
            if reply is WriteReply.DONE:  # the usual case
                self._buffer.mark_stored(write, now)
            elif isinstance(reply, Exception):
                problem = problem or reply
            else:
                self._apply(write, reply, now)
        if problem is not None:
            raise problem
        if WriteReply.DONE in replies or WriteReply.CANCELLED in replies:  # the others are of writes that were not done
            self._on_success(failures)

    def _on_ends_stored(self, writes: list[BufferedWrite], replies: list[WriteReply | Exception]) -> None:
        """Lets go on who waits for an end, before its usage is counted: the record says what it is."""
        for write, reply in zip(writes, replies, strict=True):
            if write.end is not None and reply in (WriteReply.DONE, WriteReply.CANCELLED):
                write.request.end_stored = True
                self._flushed.set()

    def _apply(self, write: BufferedWrite, reply: WriteReply, now: float) -> None:
        if reply is WriteReply.DAMAGED:
            self._drop_corrupt(write.request)
        elif reply is WriteReply.STALE:
            self._on_lease_lost(write.request)
        elif reply is WriteReply.LOST:
            self._buffer.mark_lost(write.request)
        elif reply is WriteReply.DELETED:
            self._on_cancelled(write.request)
            self._buffer.forget(write.request)
        else:
            self._buffer.mark_stored(write, now)
            self._on_cancelled(write.request)

    def _drop_corrupt(self, request: BufferedRequest) -> None:
        if self._buffer.contains(request):
            log.error("the record of request %s is damaged; it is no longer written", request.lease.request_id)
            metrics.JOURNAL_DROPPED.inc()
            self._buffer.remove(request)

    def _on_lease_lost(self, request: BufferedRequest) -> None:
        metrics.STALE_EPOCHS.inc()
        notify = request.is_writable and self._buffer.contains(request)
        self._buffer.remove(request)
        if notify and self._listener is not None:
            self._listener.on_lease_lost(request.lease.request_id)

    def _on_cancelled(self, request: BufferedRequest) -> None:
        notify = request.is_writable and self._buffer.contains(request) and not request.cancelled
        request.cancelled = True
        if notify and self._listener is not None:
            self._listener.on_cancelled(request.lease.request_id)
