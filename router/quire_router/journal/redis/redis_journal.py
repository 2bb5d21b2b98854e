"""The journal in Redis, so that neither a dead engine nor a dead router loses a request.

``RedisJournal`` puts what is written into a ``WriteBuffer``, which a ``RedisWriter`` flushes, and reads through a
``RedisStore``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from uuid import uuid4

from quire_proto.errors import internal
from quire_proto.sampling import FinishReason
from quire_proto.supervise import SupervisedTask
from redis.exceptions import RedisError

from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.core import metrics
from quire_router.core.errors import journal_unavailable
from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.retry import supervise
from quire_router.journal.base import (
    REFUSED_EPOCH,
    AnyDelta,
    Follower,
    Lease,
    LeaseListener,
    RecordUpdate,
    RequestRecord,
)
from quire_router.journal.codec import (
    TOKEN_BYTES,
    CorruptRecordError,
    JournalSettings,
    decode_deadline,
    decode_epoch,
    decode_status,
    unpack_tokens,
)
from quire_router.journal.redis.redis_connection import (
    MAX_REDIS_WAIT,
    PipelinedConnection,
    RedisHealth,
    corrupt_record_error,
    is_corruption,
)
from quire_router.journal.redis.store import OrphanFinder, RawRecordUpdate, RedisFollower, RedisStore
from quire_router.journal.redis.writer import RedisWriter
from quire_router.journal.token_log import TokenLog, log_checksum, read_record
from quire_router.journal.write_buffer import BufferedRequest, RequestEnd, WriteBuffer

log = logging.getLogger(__name__)
READ_CONNECTIONS = 32
CLOSE_TIMEOUT = 2.0  # seconds that a router which stops waits for Redis, which may be stopping too


class RedisJournal:
    """Records in the Redis of ``access`` (or its URL: ``redis://``, ``rediss://`` for TLS, with user and password).

    Writes are buffered and return; one task writes them, and retries while Redis is unavailable. At most
    ``max_requests`` requests, and ``max_tokens`` tokens that are not written yet, are buffered; beyond that records are
    dropped and counted. A token takes 4 bytes, that of a prompt when it came in an ``array``, as from the validator.
    Raises ``ValueError``, without its password, when the URL is not one.
    """

    def __init__(
        self,
        access: RedisAccess | str,
        *,
        owner: str | None = None,
        settings: JournalSettings | None = None,
        max_requests: int = 20_000,
        max_tokens: int = 8_000_000,
        timeout: float = 5.0,
    ) -> None:
        self._owner = owner or uuid4().hex
        self._timeout = timeout
        # The writer retries by itself, with all that came since.
        self._client = redis_client(access, timeout=timeout)
        self._writing = redis_client(access, timeout=timeout, limited_by_caller=True)
        # There may be hundreds of readers, which must not delay writes.
        self._reading = redis_client(access, timeout=timeout, connections=READ_CONNECTIONS)
        settings = settings or JournalSettings()
        self._listener: LeaseListener | None = None
        self._buffer = WriteBuffer(max_requests, max_tokens)
        self._health = RedisHealth(self._client, settings.settle)
        self._store = RedisStore(self._reading, settings)
        self._orphans = OrphanFinder(self._reading)
        self._writer = RedisWriter(
            self._client, PipelinedConnection(self._writing, timeout), self._health, self._buffer, settings
        )
        self._openings: set[asyncio.Task[Lease | None]] = set()
        self._task: SupervisedTask | None = None

    @property
    def available(self) -> bool:
        """Whether the last exchange with Redis succeeded."""
        return self._writer.available

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
            metrics.JOURNAL_DROPPED.inc()
        return lease

    async def open_if_absent(self, generation: GenerationRequest) -> Lease | None:
        """See ``Journal``. Waits half a second for Redis at most, and then knows only this router's own."""
        self.start()
        request = BufferedRequest(generation, Lease(generation.request_id, self._owner, 1))
        if self._buffer.get(generation.request_id) is not None:
            return None
        if not self._buffer.has_capacity(request):
            return self.open(generation)
        opening = asyncio.create_task(self._open_in_redis(request), name="journal opening")
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(
                self._release_unused
            )  # Redis may have the record by now, with a lease that is not used
            raise

    def append(self, lease: Lease, position: int, delta: AnyDelta) -> None:
        """See ``Journal``. Tokens that would leave a gap are not kept."""
        request = self._writable_request(lease)
        if request is not None and not self._buffer.append(request, position, delta):
            metrics.JOURNAL_DROPPED.inc()

    def append_token(self, lease: Lease, index: int, position: int, token_id: int) -> None:
        """See ``Journal``."""
        request = self._writable_request(lease)
        if request is not None and not self._buffer.append_token(request, index, position, token_id):
            metrics.JOURNAL_DROPPED.inc()

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """See ``Journal``."""
        request = self._writable_request(lease)
        if request is not None:
            request.end = (
                RequestEnd(FinishReason.ABORT, "", usage) if request.cancelled else RequestEnd(reason, error, usage)
            )
            self._buffer.mark_dirty(request)

    def release(self, lease: Lease) -> None:
        """See ``Journal``. A cancelled request ends."""
        request = self._writable_request(lease)
        if request is not None:
            request.released = True
            request.end = RequestEnd(FinishReason.ABORT) if request.cancelled else None
            self._buffer.mark_dirty(request)

    async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """See ``Journal``. A damaged record ends with an error. Nothing is claimed just after Redis was unavailable: a
        router that lives may still have to write what it buffers.
        """
        self.start()
        if not await self._is_not_leased_here(request_id) or await self._may_reappear(request_id):
            return None
        if self._buffer.is_full:
            raise journal_unavailable()
        name = uuid4().hex
        claimed = await self._store.call(request_id, lambda: self._store.claim(request_id, self._owner, name))
        return None if claimed is None else await self._resume_claimed(request_id, *claimed)

    async def read(self, request_id: str, *, tokens_only: bool = False) -> RequestRecord | None:
        """See ``Journal``: what Redis has, which may be a moment behind what was written. Raises UNAVAILABLE
        instead of returning None just after Redis was unavailable.
        """
        with self._health.track_exchange():
            stored = await self._store.call(request_id, lambda: self._store.read(request_id))
        if stored is not None:
            record, *_ = await self._store.call(
                request_id, lambda: read_record(request_id, *stored, tokens_only=tokens_only)
            )
            return record
        if await self._may_reappear(request_id):
            raise journal_unavailable()
        return None

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """See ``Journal``."""
        first = request_ids[0]
        with self._health.track_exchange():
            stored = await self._store.call(first, lambda: self._store.statuses(request_ids))
        records = [await self._status(*each) for each in zip(request_ids, stored, strict=True)]
        if confirm_missing and None in records and await self._may_reappear(first):
            raise journal_unavailable()
        return records

    async def _status(self, request_id: str, stored: tuple[dict[bytes, bytes], int, int]) -> RequestRecord | None:
        fields, prompt, now = stored
        if b"request" not in fields and b"epoch" not in fields:
            return None
        try:
            record = decode_status(request_id, fields, prompt, now)
        except CorruptRecordError:
            raise corrupt_record_error(request_id) from None
        return self._with_local_end(record or await self.read(request_id, tokens_only=True))

    def _with_local_end(self, record: RequestRecord | None) -> RequestRecord | None:
        """The record with the end that this router is about to write: what has ended cannot be cancelled any more."""
        request = None if record is None else self._buffer.get(record.generation.request_id)
        if record is None or request is None or request.end is None or record.finish_reason is not None:
            return record
        end = request.end
        return replace(record, finish_reason=end.reason, error=end.error, usage=end.usage, leased=False)

    def follow(self, request_id: str) -> Follower:
        """See ``Journal``."""
        return _CheckedFollower(partial(self._poll, request_id, RedisFollower(partial(self._read_update, request_id))))

    async def cancel(self, request_id: str) -> bool:
        """See ``Journal``. Another router gets to know it with its next write to the record, or when it renews its
        lease.
        """
        request = self._buffer.get(request_id)
        if request is None:
            return await self._store.call(request_id, lambda: self._store.cancel(request_id))
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
        if request is not None:  # the record may not be written yet, or have to be written again
            request.generation = replace(request.generation, retention=0)
            await self.cancel(request_id)
        deleted = await self._store.call(request_id, lambda: self._store.delete(request_id))
        return deleted or request is not None

    async def orphans(self) -> list[str]:
        """See ``Journal``. Returns none just after Redis was unavailable."""
        if await self._may_reappear("of the background"):
            return []
        return await self._store.call("of the background", self._orphans.find)

    async def flush(self) -> None:
        """Waits until everything written so far is in Redis; for as long as that takes."""
        await self._writer.flush()

    async def close(self) -> None:
        """See ``Journal``."""
        if self._openings:
            await asyncio.wait(self._openings)  # each takes half a second at most
        if self._task is not None:
            await self._stop_writer(self._task)
        await self._client.aclose()
        await self._writing.aclose()
        await self._reading.aclose()

    async def _open_in_redis(self, request: BufferedRequest) -> Lease | None:
        generation, lease = request.generation, request.lease
        try:
            async with asyncio.timeout(MAX_REDIS_WAIT):
                request.opened = await self._store.call_with_retry(lambda: self._store.open(generation, lease))
            if not request.opened:
                return None
        except (RedisError, OSError, TimeoutError) as error:
            if not is_corruption(error):
                self._writer.record_failure(error)  # before the response begins, whose headers say so
        if self._buffer.get(generation.request_id) is not None:
            return None  # the same request came once more while this one waited
        if not self._buffer.add(request):
            metrics.JOURNAL_DROPPED.inc()
        return lease

    def _release_unused(self, opening: "asyncio.Task[Lease | None]") -> None:
        lease = None if opening.cancelled() or opening.exception() is not None else opening.result()
        if lease is not None:
            self.release(lease)

    async def _poll(self, request_id: str, follower: RedisFollower) -> RecordUpdate | None:
        update = await self._store.call(request_id, follower.poll)
        if update is None and await self._may_reappear(request_id):
            return RecordUpdate([], None, "", NO_USAGE, leased=True)
        return update

    async def _read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        with self._health.track_exchange():
            return await self._store.read_update(request_id, names, offset)

    async def _may_reappear(self, request_id: str) -> bool:
        """Whether what Redis has of a record may be older than what its router is about to write, maybe again."""
        with self._health.track_exchange(writes=True):
            await self._store.call(request_id, self._health.check)
        return self._health.is_settling

    async def _stop_writer(self, task: SupervisedTask) -> None:
        try:
            async with asyncio.timeout(min(CLOSE_TIMEOUT, self._timeout)):
                await self._writer.flush()
        except TimeoutError:
            log.warning("the state of %d requests was not written to Redis", len(self._buffer))
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
                raise journal_unavailable()  # the lease expires by itself
            record, *_ = await read_record(request_id, fields, packed)
        except CorruptRecordError:
            await self._fail_corrupt(lease)
            raise internal() from None
        except asyncio.CancelledError:
            self.release(lease)
            raise
        if request.cancelled or not self._buffer.contains(request):
            self.release(lease)  # cancelled or lost while it was read
            return None
        generation = replace(record.generation, deadline=decode_deadline(record.generation, fields, now))
        return replace(record, generation=generation, leased=True), lease

    async def _restore(self, lease: Lease, fields: dict[bytes, bytes], packed: bytes) -> BufferedRequest:
        record, reader, taken = await read_record(lease.request_id, fields, packed, tokens_only=True)
        request = BufferedRequest(record.generation, lease, opened=True)
        request.log = TokenLog.restore(unpack_tokens(packed[: taken * TOKEN_BYTES]), reader)
        request.num_stored, request.checksum = taken, await log_checksum(packed[: taken * TOKEN_BYTES])
        return request

    async def _fail_corrupt(self, lease: Lease) -> None:
        request = self._buffer.get(lease.request_id)
        if request is not None and request.lease == lease:
            self._buffer.remove(request)
        await self._store.call(lease.request_id, lambda: self._store.fail_corrupt(lease))

    async def _is_not_leased_here(self, request_id: str) -> bool:
        """Whether this router has no lease on the record; waits until a release is written."""
        request = self._buffer.get(request_id)
        if request is None:
            return True
        if not request.released or request.end is not None:
            return False
        try:
            async with asyncio.timeout(MAX_REDIS_WAIT):
                await self._writer.wait_written(request)
        except TimeoutError:
            raise journal_unavailable() from None
        return True

    def _writable_request(self, lease: Lease) -> BufferedRequest | None:
        request = self._buffer.get(lease.request_id)
        if request is None or not request.is_writable:
            return None
        if lease is not request.lease and lease != request.lease:  # comparing takes longer than a token may
            metrics.STALE_EPOCHS.inc()
            return None
        return request


class _CheckedFollower:
    """A ``RedisFollower`` with the journal's errors and its care for records that may reappear."""

    def __init__(self, poll: Callable[[], Awaitable[RecordUpdate | None]]) -> None:
        self._poll = poll

    async def poll(self) -> RecordUpdate | None:
        """See ``Follower``."""
        return await self._poll()
