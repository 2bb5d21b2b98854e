"""Request state in Redis, so that neither a dead engine nor a dead router loses a request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from uuid import uuid4

from quire_proto.errors import internal
from quire_proto.sampling import FinishReason
from redis.exceptions import RedisError

from quire_router import metrics
from quire_router.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.journal.base import REFUSED_EPOCH, Follower, Lease, Owners, Piece, Record, Tail
from quire_router.journal.codec import (
    TOKEN_BYTES,
    DamagedRecordError,
    decode_deadline,
    decode_epoch,
    decode_status,
    unpack_tokens,
)
from quire_router.journal.deliveries import Deliveries
from quire_router.journal.follower import Glance, RedisFollower
from quire_router.journal.orphans import Orphans
from quire_router.journal.pending import End, Entry, Pending
from quire_router.journal.reading import checksum, read_record
from quire_router.journal.server import PATIENCE, RedisServer
from quire_router.journal.settings import JournalSettings
from quire_router.journal.store import RedisStore
from quire_router.journal.troubles import damaged, is_damage, unavailable
from quire_router.journal.wire import Wire
from quire_router.journal.writer import RedisWriter
from quire_router.redis_access import RedisAccess
from quire_router.redis_client import redis_client
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger(__name__)
READERS = 32  # connections
LAST_WRITE = 2.0  # seconds that a router which is ending waits for Redis: it may be ending too


class RedisJournal:
    """Records in the Redis at ``place`` (a URL: ``redis://``, ``rediss://`` for TLS, with user and password in it).

    Writes are noted and return; one task writes them, and tries again while Redis is away. At most ``max_requests``
    requests, and ``max_tokens`` tokens that are not written yet, are held here; beyond that records are dropped and
    counted. A token takes 4 bytes, that of a prompt when it came in an ``array``, as from the validator. Raises
    ``ValueError``, without its password, when the URL is not one.
    """

    def __init__(
        self,
        place: RedisAccess | str,
        *,
        owner: str | None = None,
        settings: JournalSettings | None = None,
        max_requests: int = 20_000,
        max_tokens: int = 8_000_000,
        timeout: float = 5.0,
    ) -> None:
        self._owner = owner or uuid4().hex
        self._timeout = timeout
        # The writer tries again by itself, with all that came since.
        self._client = redis_client(place, timeout=timeout)
        self._writing = redis_client(place, timeout=timeout, limited_by_caller=True)
        # Readers may come by the hundred, and must not hold up what is written.
        self._reading = redis_client(place, timeout=timeout, connections=READERS)
        settings = settings or JournalSettings()
        self._owners: Owners | None = None
        self._pending = Pending(max_requests, max_tokens)
        self._server = RedisServer(self._client, settings.settle)
        self._store = RedisStore(self._reading, settings)
        self._orphans = Orphans(self._reading)
        self._writer = RedisWriter(self._client, Wire(self._writing, timeout), self._server, self._pending, settings)
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

    def report_to(self, owners: Owners) -> None:
        """See ``Journal``. They are called by the task that writes, and by ``cancel``."""
        self._owners = owners
        self._writer.report_to(owners)

    def open(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``. A request id that still runs here is not opened again."""
        self.start()
        lease = Lease(generation.request_id, self._owner, 1)
        if self._pending.get(generation.request_id) is not None:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        if not self._pending.add(Entry(generation, lease)):
            metrics.JOURNAL_DROPPED.inc()
        return lease

    async def open_once(self, generation: GenerationRequest) -> Lease | None:
        """See ``Journal``. Waits half a second for Redis at most, and then knows only this router's own."""
        self.start()
        entry = Entry(generation, Lease(generation.request_id, self._owner, 1))
        if self._pending.get(generation.request_id) is not None:
            return None
        if not self._pending.has_room(entry):
            return self.open(generation)
        opening = asyncio.create_task(self._open_once(entry), name="journal opening")
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._let_go_of)  # nobody would hold what Redis may have by now
            raise

    def append(self, lease: Lease, position: int, piece: Piece) -> None:
        """See ``Journal``. Tokens that would leave a hole are not kept."""
        entry = self._writable(lease)
        if entry is not None and not self._pending.extend(entry, position, piece):
            metrics.JOURNAL_DROPPED.inc()

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """See ``Journal``."""
        entry = self._writable(lease)
        if entry is not None:
            entry.end = End(FinishReason.ABORT, "", usage) if entry.cancelled else End(reason, error, usage)
            self._pending.touch(entry)

    def release(self, lease: Lease) -> None:
        """See ``Journal``. What somebody asked to end is ended."""
        entry = self._writable(lease)
        if entry is not None:
            entry.released = True
            entry.end = End(FinishReason.ABORT) if entry.cancelled else None
            self._pending.touch(entry)

    async def claim(self, request_id: str) -> tuple[Record, Lease] | None:
        """See ``Journal``. A record that is damaged is ended with an error. Nothing is claimed just after Redis was
        away: a router that lives may still have to write what it holds.
        """
        self.start()
        if not await self._let_go(request_id) or await self._may_come_back(request_id):
            return None
        if self._pending.is_full:
            raise unavailable()
        name = uuid4().hex
        taken = await self._store.ask(request_id, lambda: self._store.claim(request_id, self._owner, name))
        return None if taken is None else await self._take_over(request_id, *taken)

    async def read(self, request_id: str, *, brief: bool = False) -> Record | None:
        """See ``Journal``: what Redis has, which may be a moment behind what was written. Just after Redis was
        away UNAVAILABLE instead of None.
        """
        with self._server.exchange():
            stored = await self._store.ask(request_id, lambda: self._store.read(request_id))
        if stored is not None:
            record, *_ = await self._store.ask(request_id, lambda: read_record(request_id, *stored, brief=brief))
            return record
        if await self._may_come_back(request_id):
            raise unavailable()
        return None

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[Record | None]:
        """See ``Journal``."""
        first = request_ids[0]
        with self._server.exchange():
            stored = await self._store.ask(first, lambda: self._store.statuses(request_ids))
        records = [await self._status(*each) for each in zip(request_ids, stored, strict=True)]
        if surely and None in records and await self._may_come_back(first):
            raise unavailable()
        return records

    async def _status(self, request_id: str, stored: tuple[dict[bytes, bytes], int, int]) -> Record | None:
        fields, prompt, now = stored
        if b"request" not in fields and b"epoch" not in fields:
            return None
        try:
            record = decode_status(request_id, fields, prompt, now)
        except DamagedRecordError:
            raise damaged(request_id) from None
        return self._as_ended_here(record or await self.read(request_id, brief=True))

    def _as_ended_here(self, record: Record | None) -> Record | None:
        """The record with the end that this router is about to write: what has ended can no longer be cancelled."""
        entry = None if record is None else self._pending.get(record.generation.request_id)
        if record is None or entry is None or entry.end is None or record.finish_reason is not None:
            return record
        end = entry.end
        return replace(record, finish_reason=end.reason, error=end.error, usage=end.usage, held=False)

    def follow(self, request_id: str) -> Follower:
        """See ``Journal``."""
        return _Follower(partial(self._look, request_id, RedisFollower(partial(self._glance, request_id))))

    async def cancel(self, request_id: str) -> bool:
        """See ``Journal``. Another router hears of it with the next write to the record, or when it renews its
        lease.
        """
        entry = self._pending.get(request_id)
        if entry is None:
            return await self._store.ask(request_id, lambda: self._store.cancel(request_id))
        if entry.end is not None:
            return False
        if entry.released:
            entry.end = End(FinishReason.ABORT)
        elif not entry.cancelled and self._owners is not None:
            self._owners.on_cancelled(request_id)
        entry.cancelled = True
        return True

    async def delete(self, request_id: str) -> bool:
        """See ``Journal``."""
        entry = self._pending.get(request_id)
        if entry is not None:  # it may not be there yet, or have to be written again
            entry.generation = replace(entry.generation, retention=0)
            await self.cancel(request_id)
        deleted = await self._store.ask(request_id, lambda: self._store.delete(request_id))
        return deleted or entry is not None

    async def orphans(self) -> list[str]:
        """See ``Journal``. None just after Redis was away."""
        if await self._may_come_back("of the background"):
            return []
        return await self._store.ask("of the background", self._orphans.find)

    async def flush(self) -> None:
        """Waits until everything written so far is in Redis; for as long as that takes."""
        await self._writer.flush()

    async def close(self) -> None:
        """See ``Journal``."""
        if self._openings:
            await asyncio.wait(self._openings)  # each takes half a second at most
        if self._task is not None:
            await self._end_writer(self._task)
        await self._client.aclose()
        await self._writing.aclose()
        await self._reading.aclose()

    async def _open_once(self, entry: Entry) -> Lease | None:
        generation, lease = entry.generation, entry.lease
        try:
            async with asyncio.timeout(PATIENCE):
                entry.opened = await self._store.surely(lambda: self._store.open(generation, lease))
            if not entry.opened:
                return None
        except (RedisError, OSError, TimeoutError) as error:
            if not is_damage(error):
                self._writer.note_failure(error)  # before this answer begins, which says so
        if self._pending.get(generation.request_id) is not None:
            return None  # the same came once more while this one waited
        if not self._pending.add(entry):
            metrics.JOURNAL_DROPPED.inc()
        return lease

    def _let_go_of(self, opening: "asyncio.Task[Lease | None]") -> None:
        lease = None if opening.cancelled() or opening.exception() is not None else opening.result()
        if lease is not None:
            self.release(lease)

    async def _look(self, request_id: str, follower: RedisFollower) -> Tail | None:
        tail = await self._store.ask(request_id, follower.look)
        if tail is None and await self._may_come_back(request_id):
            return Tail([], None, "", NO_USAGE, held=True)
        return tail

    async def _glance(self, request_id: str, names: tuple[str, ...], offset: int) -> Glance:
        with self._server.exchange():
            return await self._store.glance(request_id, names, offset)

    async def _may_come_back(self, request_id: str) -> bool:
        """Whether what Redis has of a record may be older than what its router is about to write, maybe again."""
        with self._server.exchange(writes=True):
            await self._store.ask(request_id, self._server.look)
        return self._server.is_settling

    async def _end_writer(self, task: SupervisedTask) -> None:
        try:
            async with asyncio.timeout(min(LAST_WRITE, self._timeout)):
                await self._writer.flush()
        except TimeoutError:
            log.warning("the state of %d requests was not written to Redis", len(self._pending))
        await task.stop()

    async def _take_over(
        self, request_id: str, fields: dict[bytes, bytes], row: bytes, now: int
    ) -> tuple[Record, Lease] | None:
        """Goes on from a record as it was claimed. It is held from before all of it is read, which may take long."""
        lease = Lease(request_id, self._owner, decode_epoch(fields[b"epoch"]))
        try:
            entry = await self._restore(lease, fields, row)
            if not self._pending.add(entry):
                raise unavailable()  # the lease expires by itself
            record, *_ = await read_record(request_id, fields, row)
        except DamagedRecordError:
            await self._condemn(lease)
            raise internal() from None
        except asyncio.CancelledError:
            self.release(lease)
            raise
        if entry.cancelled or not self._pending.has(entry):
            self.release(lease)  # cancelled or lost while it was read
            return None
        generation = replace(record.generation, deadline=decode_deadline(record.generation, fields, now))
        return replace(record, generation=generation, held=True), lease

    async def _restore(self, lease: Lease, fields: dict[bytes, bytes], row: bytes) -> Entry:
        record, reader, taken = await read_record(lease.request_id, fields, row, brief=True)
        entry = Entry(record.generation, lease, opened=True)
        entry.deliveries = Deliveries.restore(unpack_tokens(row[: taken * TOKEN_BYTES]), reader)
        entry.stored, entry.checksum = taken, await checksum(row[: taken * TOKEN_BYTES])
        return entry

    async def _condemn(self, lease: Lease) -> None:
        entry = self._pending.get(lease.request_id)
        if entry is not None and entry.lease == lease:
            self._pending.drop(entry)
        await self._store.ask(lease.request_id, lambda: self._store.condemn(lease))

    async def _let_go(self, request_id: str) -> bool:
        """Whether this router does not hold the record; waits until it is written that it was released."""
        entry = self._pending.get(request_id)
        if entry is None:
            return True
        if not entry.released or entry.end is not None:
            return False
        try:
            async with asyncio.timeout(PATIENCE):
                await self._writer.written(entry)
        except TimeoutError:
            raise unavailable() from None
        return True

    def _writable(self, lease: Lease) -> Entry | None:
        entry = self._pending.get(lease.request_id)
        if entry is None or not entry.live:
            return None
        if lease is not entry.lease and lease != entry.lease:  # comparing takes longer than a token may
            metrics.STALE_EPOCHS.inc()
            return None
        return entry


class _Follower:
    """A look after a record."""

    def __init__(self, look: Callable[[], Awaitable[Tail | None]]) -> None:
        self._look = look

    async def look(self) -> Tail | None:
        """See ``Follower``."""
        return await self._look()
