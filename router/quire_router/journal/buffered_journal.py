"""A journal in a database, so that neither a dead engine nor a dead router loses a request.

``BufferedJournal`` puts what is written into a ``WriteBuffer``, which a ``JournalWriter`` flushes, and reads through a
``RecordStore``. ``RedisJournal`` and ``SqliteJournal`` are made of these.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar
from uuid import uuid4

from quire_proto.errors import QuireError, internal
from quire_proto.sampling import FinishReason
from quire_proto.supervise import SupervisedTask

from quire_router.core import metrics
from quire_router.core.errors import journal_unavailable, newer_record
from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.model_version import ModelVersion
from quire_router.core.retry import supervise
from quire_router.core.usage import Account, UsageRow
from quire_router.journal.base import (
    REFUSED_EPOCH,
    AnyDelta,
    Follower,
    Lease,
    LeaseListener,
    RecordUpdate,
    RequestRecord,
    unrecorded,
)
from quire_router.journal.buffered_record import read_buffered, read_buffered_update
from quire_router.journal.codec import (
    TOKEN_BYTES,
    CorruptRecordError,
    NewerRecordError,
    decode_epoch,
    decode_start,
    decode_status,
    unpack_tokens,
)
from quire_router.journal.follower import RawRecordUpdate, RecordFollower
from quire_router.journal.journal_writer import JournalWriter
from quire_router.journal.record_store import RecordStore
from quire_router.journal.token_log import TokenLog, log_checksum, read_record
from quire_router.journal.write_buffer import BufferedRequest, DroppedUsage, RequestEnd, WriteBuffer

log = logging.getLogger(__name__)
MAX_WAIT = 0.5  # seconds that a request waits for the database where it can go on, or begin, without
CLOSE_TIMEOUT = 2.0  # seconds that a router which stops waits for the database, which may be stopping too
T = TypeVar("T")


class BufferedJournal(ABC):
    """Records in the database of ``store`` and ``writer``.

    Writes are buffered and return; one task writes them, and retries while the database is unavailable. What is beyond
    the limits of ``buffer`` is dropped, a record at a time, and counted. A token takes 4 bytes, that of a prompt when
    it came in an ``array``, as from the validator.
    """

    def __init__(
        self,
        store: RecordStore,
        writer: JournalWriter,
        buffer: WriteBuffer,
        *,
        owner: str | None,
        timeout: float,
        end_timeout: float,
    ) -> None:
        self._owner = owner or uuid4().hex
        self._timeout = timeout
        self._end_timeout = end_timeout
        self._listener: LeaseListener | None = None
        self._buffer = buffer
        self._store = store
        self._writer = writer
        self._openings: set[asyncio.Task[Lease | None]] = set()
        self._task: SupervisedTask | None = None

    @property
    def available(self) -> bool:
        """Whether the last exchange with the database succeeded."""
        return self._writer.available

    def is_durable(self, request_ids: Sequence[str]) -> bool:
        """See ``Journal``. One that was refused is not durable before it is written, whatever was written since."""
        buffered = filter(None, map(self._buffer.get, request_ids))
        return self.available and not any(request.refused and not request.opened for request in buffered)

    def start(self) -> None:
        """Begins to connect; never waits, never fails. The first ``open`` does it as well."""
        if self._task is None:
            self._task = supervise("journal writer", self._writer.run)

    def set_listener(self, listener: LeaseListener) -> None:
        """See ``Journal``. It is called by the task that writes, and by ``cancel``."""
        self._listener = listener
        self._writer.set_listener(listener)

    def open(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``. A request id that is still buffered here is not opened again."""
        self.start()
        lease = Lease(generation.request_id, self._owner, 1)
        if self._buffer.get(generation.request_id) is not None:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        if not self._buffer.add(BufferedRequest(generation, lease)):
            self._buffer.uncounted[lease] = generation
            metrics.JOURNAL_DROPPED.inc()
        return lease

    def open_unrecorded(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``."""
        self.start()
        lease = unrecorded(generation.request_id)
        self._buffer.uncounted[lease] = generation
        return lease

    async def open_if_absent(self, generation: GenerationRequest) -> Lease | None:
        """See ``Journal``. Waits half a second for the database at most, and then knows only this router's own."""
        self.start()
        request = BufferedRequest(generation, Lease(generation.request_id, self._owner, 1))
        if self._buffer.get(generation.request_id) is not None:
            return None
        if not self._buffer.has_capacity(request):
            return self.open(generation)
        opening = asyncio.create_task(self._open_at_once(request), name="journal opening")
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The database may have the record by now, with a lease that is not used.
            opening.add_done_callback(self._release_unused)
            raise

    def set_version(self, lease: Lease, version: ModelVersion) -> None:
        """See ``Journal``."""
        request = self._writable_request(lease)
        if request is not None:
            request.version = version

    def append(self, lease: Lease, position: int, delta: AnyDelta) -> None:
        """See ``Journal``. Tokens that would leave a gap are not kept."""
        request = self._writable_request(lease)
        if request is not None and not self._buffer.append(request, position, delta):
            self._on_dropped(request)

    def append_token(self, lease: Lease, index: int, position: int, token_id: int) -> None:
        """See ``Journal``."""
        request = self._writable_request(lease)
        if request is not None and not self._buffer.append_token(request, index, position, token_id):
            self._on_dropped(request)

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """See ``Journal``."""
        request = self._writable_request(lease)
        if request is not None:
            request.end = (
                RequestEnd(FinishReason.ABORT, "", usage) if request.cancelled else RequestEnd(reason, error, usage)
            )
            request.close(usage)
            self._buffer.mark_dirty(request)
        else:
            self._count_unrecorded(lease, usage)

    def release(self, lease: Lease, usage: Usage = NO_USAGE) -> None:
        """See ``Journal``. A cancelled request ends."""
        request = self._writable_request(lease)
        if request is not None:
            request.close(usage)
            request.released = True
            request.end = RequestEnd(FinishReason.ABORT) if request.cancelled else None
            self._buffer.mark_dirty(request)
        else:
            self._count_unrecorded(lease, usage)

    async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """See ``Journal``. A damaged record ends with an error. Nothing is claimed just after the database was
        unavailable: a router that lives may still have to write what it buffers.
        """
        self.start()
        if not await self._is_not_leased_here(request_id) or await self._is_settling(request_id):
            return None
        if self._buffer.is_full:
            raise journal_unavailable()
        name = uuid4().hex
        claimed = await self._call(request_id, lambda: self._store.claim(request_id, self._owner, name))
        return None if claimed is None else await self._resume_claimed(request_id, *claimed)

    async def flush_end(self, lease: Lease) -> bool:
        """See ``Journal``. Waits for nothing while the database is known to be away."""
        request = self._buffer.get(lease.request_id)
        if request is None or request.lease != lease or request.end is None:
            return False
        return await self._flush_end(request)

    async def flush_ends(self, request_ids: Sequence[str]) -> bool:
        """Has the ends of these requests written that have ended here, as ``flush_end`` does. Returns False if all of
        them run here.
        """
        requests = [self._buffer.get(request_id) for request_id in request_ids]
        ended = [each for each in requests if each is not None and each.end is not None]
        await asyncio.gather(*map(self._flush_end, ended))
        return not all(each is not None and each.is_writable for each in requests)

    async def _flush_end(self, request: BufferedRequest) -> bool:
        """Has the end of a request written at once; returns whether that was done in time."""
        if not (self._writer.is_failing or request.end_stored):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._end_timeout):
                    await self._writer.flush_end(request)
        return request.end_stored

    async def _ended_here(self, request_id: str) -> BufferedRequest | None:
        """The request if it has ended at this router, and the database does not have its end even now."""
        request = self._buffer.get(request_id)
        if request is None or request.end is None or request.deleted or await self._flush_end(request):
            return None
        return request if self._buffer.contains(request) else None

    async def read(self, request_id: str, *, tokens_only: bool = False) -> RequestRecord | None:
        """See ``Journal``. Raises UNAVAILABLE instead of returning None just after the database was unavailable."""
        if (ended := await self._ended_here(request_id)) is not None:
            return await read_buffered(ended, tokens_only=tokens_only)
        record = await self._read_stored(request_id, tokens_only=tokens_only)
        if record is not None and await self._confirm_running([record]):
            record = await self._read_stored(request_id, tokens_only=tokens_only)
        if record is None and await self._is_settling(request_id):
            raise journal_unavailable()
        return record

    async def _read_stored(self, request_id: str, *, tokens_only: bool) -> RequestRecord | None:
        stored = await self._call(request_id, lambda: self._store.read(request_id))
        if stored is None:
            return None
        record, *_ = await self._call(request_id, lambda: read_record(request_id, *stored, tokens_only=tokens_only))
        return record

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """See ``Journal``."""
        ended = await asyncio.gather(*map(self._ended_here, request_ids))
        if None not in ended:
            return [await read_buffered(request, tokens_only=True) for request in ended if request is not None]
        records = await self._statuses(request_ids)
        if await self._confirm_running(records):
            records = await self._statuses(request_ids)
        records = [
            record if each is None else await read_buffered(each, tokens_only=True)
            for each, record in zip(ended, records, strict=True)
        ]
        if confirm_missing and None in records and await self._is_settling(request_ids[0]):
            raise journal_unavailable()
        return records

    async def _statuses(self, request_ids: Sequence[str]) -> list[RequestRecord | None]:
        stored = await self._call(request_ids[0], lambda: self._store.statuses(request_ids))
        return [await self._status(*each) for each in zip(request_ids, stored, strict=True)]

    async def _confirm_running(self, records: Sequence[RequestRecord | None]) -> bool:
        """Asks the routers that run the requests of ``records`` which have not ended there, to write what has; returns
        whether any of them may have ended since these were read.
        """
        running = [each for each in records if each is not None and each.finish_reason is None]
        asked = [each for each in running if each.owner not in ("", self._owner)]
        return bool(asked) and await self._ask_owners(asked)

    async def _ask_owners(self, records: Sequence[RequestRecord]) -> bool:  # noqa: ARG002 - there are no others
        """See ``_confirm_running``, for records of other routers."""
        return False

    async def _status(self, request_id: str, stored: tuple[dict[bytes, bytes], int, int]) -> RequestRecord | None:
        fields, prompt, now = stored
        if b"request" not in fields and b"epoch" not in fields:
            return None
        try:
            record = decode_status(request_id, fields, prompt, now)
        except NewerRecordError:
            raise newer_record() from None
        except CorruptRecordError:
            raise corrupt_record_error(request_id) from None
        return record or await self._read_stored(request_id, tokens_only=True)

    def follow(self, request_id: str) -> Follower:
        """See ``Journal``."""
        return _CheckedFollower(partial(self._poll, request_id, RecordFollower(partial(self._read_update, request_id))))

    async def _read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        if (ended := await self._ended_here(request_id)) is not None:
            return await read_buffered_update(ended, offset)
        return await self._store.read_update(request_id, names, offset)

    async def cancel(self, request_id: str) -> bool:
        """See ``Journal``. Another router gets to know it with its next write to the record, or when it renews its
        lease.
        """
        request = self._buffer.get(request_id)
        if request is None:
            return await self._call(request_id, lambda: self._store.cancel(request_id))
        if request.end is not None:
            return False
        if request.released:
            request.end = RequestEnd(FinishReason.ABORT)
        elif not request.cancelled and self._listener is not None:
            self._listener.on_cancelled(request_id)
        request.cancelled = True
        return True

    async def delete(self, request_id: str) -> bool:
        """See ``Journal``."""
        request = self._buffer.get(request_id)
        if request is None or request.deleted:
            return await self._call(request_id, lambda: self._store.delete(request_id, None))
        if request.is_writable:
            await self.cancel(request_id)
        self._buffer.withhold(request)
        try:
            await self._call(request_id, lambda: self._store.delete(request_id, request.generation))
        except BaseException:
            self._buffer.resume(request)
            raise
        self._buffer.forget(request)
        return True

    async def orphans(self) -> list[str]:
        """See ``Journal``. Returns none just after the database was unavailable."""
        if await self._is_settling("of the background"):
            return []
        return await self._call("of the background", self._store.orphans)

    async def usage(self, since: float, until: float, tenant: str | None = None) -> list[UsageRow]:
        """See ``Journal``."""
        return await self._call("of usage", lambda: self._store.usage(since, until, tenant))

    def count_usage(self, lease: Lease, account: Account, usage: Usage) -> None:
        """See ``Journal``."""
        if usage == NO_USAGE:
            return
        self.start()
        if not self._buffer.add_dropped(DroppedUsage(lease, account, usage)):
            log.warning("the usage of request %s is not counted: too many writes are pending", lease.request_id)
            metrics.USAGE_LOST.inc()

    async def settle_usage(self) -> None:
        """See ``Journal``."""
        await self._call("of usage", self._store.settle_usage)

    async def flush(self) -> None:
        """Waits until everything written so far is in the database; for as long as that takes."""
        await self._writer.flush()

    async def close(self) -> None:
        """See ``Journal``."""
        if self._openings:
            await asyncio.wait(self._openings)  # each takes half a second at most
        if self._task is not None:
            await self._stop_writer(self._task)
        await self._store.close()

    async def _open_at_once(self, request: BufferedRequest) -> Lease | None:
        generation, lease = request.generation, request.lease
        try:
            async with asyncio.timeout(MAX_WAIT):
                request.opened = await self._store.open(generation, lease)
            if not request.opened:
                return None
        except CorruptRecordError:
            pass  # it cannot be written either, which the writer finds out
        except self._store.errors as error:
            request.refused = True
            self._writer.record_failure(error)  # before the response begins, whose headers say so
        if self._buffer.get(generation.request_id) is not None:
            return None  # the same request came once more while this one waited
        if not self._buffer.add(request):
            self._on_dropped(request)
        return lease

    def _release_unused(self, opening: "asyncio.Task[Lease | None]") -> None:
        lease = None if opening.cancelled() or opening.exception() is not None else opening.result()
        if lease is not None:
            self.release(lease)

    async def _poll(self, request_id: str, follower: RecordFollower) -> RecordUpdate | None:
        update = await self._call(request_id, follower.poll)
        if update is None and await self._is_settling(request_id):
            return RecordUpdate([], None, "", NO_USAGE, leased=True)
        return update

    @abstractmethod
    async def _is_settling(self, request_id: str) -> bool:
        """Whether what the database has may be older than what some router is about to write, maybe again."""

    async def _call(self, request_id: str, operation: Callable[[], Awaitable[T]]) -> T:
        """What ``operation`` returns. Raises ``QuireError``: UNAVAILABLE without the database, INTERNAL for no
        record.
        """
        try:
            return await operation()
        except NewerRecordError:
            raise newer_record() from None
        except CorruptRecordError:
            raise corrupt_record_error(request_id) from None
        except self._store.errors:
            raise journal_unavailable() from None

    async def _stop_writer(self, task: SupervisedTask) -> None:
        try:
            async with asyncio.timeout(min(CLOSE_TIMEOUT, self._timeout)):
                await self._writer.flush()
        except TimeoutError:
            log.warning("the state of %d requests was not written", len(self._buffer))
        await task.stop()

    async def _resume_claimed(
        self, request_id: str, fields: dict[bytes, bytes], packed: bytes, now: int
    ) -> tuple[RequestRecord, Lease] | None:
        """Buffers a record that was claimed, to be continued. Its lease is renewed while it is being read, which may
        take long.
        """
        lease = Lease(request_id, self._owner, decode_epoch(fields[b"epoch"]))
        try:
            request = await self._restore(lease, fields, packed)
            if not self._buffer.add(request):
                self._store.abandon(lease)
                raise journal_unavailable()
            record, *_ = await read_record(request_id, fields, packed)
        except NewerRecordError:
            self._store.abandon(lease)
            raise newer_record() from None
        except CorruptRecordError:
            await self._fail_corrupt(lease)
            raise internal() from None
        except asyncio.CancelledError:
            self.release(lease)
            if self._buffer.get(request_id) is None:  # it was not even restored
                self._store.abandon(lease)
            raise
        if request.cancelled or not self._buffer.contains(request):
            self.release(lease)  # cancelled or lost while it was read
            return None
        generation = replace(record.generation, started=decode_start(record.generation, fields, now))
        return replace(record, generation=generation, leased=True), lease

    async def _restore(self, lease: Lease, fields: dict[bytes, bytes], packed: bytes) -> BufferedRequest:
        record, reader, taken = await read_record(lease.request_id, fields, packed, tokens_only=True)
        request = BufferedRequest(record.generation, lease, opened=True, version=record.version)
        request.log = TokenLog.restore(unpack_tokens(packed[: taken * TOKEN_BYTES]), reader)
        request.num_stored, request.checksum = taken, await log_checksum(packed[: taken * TOKEN_BYTES])
        return request

    async def _fail_corrupt(self, lease: Lease) -> None:
        request = self._buffer.get(lease.request_id)
        if request is not None and request.lease == lease:
            self._buffer.remove(request)
        await self._call(lease.request_id, lambda: self._store.fail_corrupt(lease))

    async def _is_not_leased_here(self, request_id: str) -> bool:
        """Whether this router has no lease on the record; waits until a release is written."""
        request = self._buffer.get(request_id)
        if request is None:
            return True
        if not request.released or request.end is not None:
            return False
        try:
            async with asyncio.timeout(MAX_WAIT):
                await self._writer.wait_written(request)
        except TimeoutError:
            raise journal_unavailable() from None
        return True

    def _on_dropped(self, request: BufferedRequest) -> None:
        metrics.JOURNAL_DROPPED.inc()
        self._buffer.uncounted[request.lease] = request.generation
        self._store.abandon(request.lease)

    def _count_unrecorded(self, lease: Lease, usage: Usage) -> None:
        """Counts what a request used that has no record, or was dropped: no record says it."""
        if (generation := self._buffer.uncounted.pop(lease, None)) is not None:
            self.count_usage(lease, Account.of(generation), usage)

    def _writable_request(self, lease: Lease) -> BufferedRequest | None:
        request = self._buffer.get(lease.request_id)
        if request is None or not request.is_writable:
            return None
        if lease is not request.lease and lease != request.lease:  # comparing takes longer than a token may
            metrics.STALE_EPOCHS.inc()
            return None
        return request


def corrupt_record_error(request_id: str) -> QuireError:
    """The error if what is stored is no record; logs it."""
    log.error("the record of request %s is damaged", request_id)
    return internal()


class _CheckedFollower:
    """A ``RecordFollower`` with the journal's errors and its care for records that may reappear."""

    def __init__(self, poll: Callable[[], Awaitable[RecordUpdate | None]]) -> None:
        self._poll = poll

    async def poll(self) -> RecordUpdate | None:
        """See ``Follower``."""
        return await self._poll()
