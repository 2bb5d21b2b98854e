"""The journal in memory, for one router without a database. It does not survive the process."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from quire_proto.sampling import FinishReason

from quire_router.admission.fair_queue import LazyHeap
from quire_router.core import metrics
from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.usage import Account, MemoryLedger, UsageRow, difference, largest, used
from quire_router.journal.base import (
    MAX_ORPHANS,
    REFUSED_EPOCH,
    AnyDelta,
    Lease,
    LeaseListener,
    RecordedDelta,
    RecordUpdate,
    RequestRecord,
    partial_update,
    unrecorded,
)
from quire_router.journal.codec import MIN_RETENTION
from quire_router.journal.token_log import TokenLog, TokenLogReader, read_chunk, read_log
from quire_router.journal.write_buffer import RequestEnd


@dataclass(slots=True)
class _MemoryRecord:
    """A record, with its token log packed."""

    generation: GenerationRequest
    lease: Lease
    share: "_Share"
    log: TokenLog = field(init=False)
    end: RequestEnd | None = None
    leased: bool = True
    cancelled: bool = False
    counted: Usage = NO_USAGE
    version: ModelVersion = UNKNOWN_VERSION

    def __post_init__(self) -> None:
        self.log = TokenLog(self.generation.params.n)

    @property
    def size(self) -> int:
        """Memory, in tokens of 4 bytes."""
        return self.generation.stored_size + len(self.log.values)

    async def to_record(self, *, tokens_only: bool) -> RequestRecord:
        """The record as it is now."""
        state = self.update([])
        record = RequestRecord(
            generation=self.generation,
            owner=self.lease.owner,
            epoch=self.lease.epoch,
            deltas=[],
            finish_reason=state.finish_reason,
            error=state.error,
            usage=state.usage,
            leased=state.leased,
            version=self.version,
        )
        reader = TokenLogReader(self.generation.params.n, tokens_only=tokens_only)
        record.deltas, _ = await read_log(reader, self.log.values)
        return record

    def status(self) -> RequestRecord:
        """The record without its deltas."""
        state, generation = self.update([]), self.generation
        so_far = Usage(len(generation.prompt_token_ids), self.log.num_tokens)
        return RequestRecord(
            generation=generation,
            owner=self.lease.owner,
            epoch=self.lease.epoch,
            deltas=[],
            finish_reason=state.finish_reason,
            error=state.error,
            usage=so_far if state.usage == NO_USAGE else state.usage,
            leased=state.leased,
        )

    def update(self, deltas: list[RecordedDelta]) -> RecordUpdate:
        """The state of the record now, with ``deltas`` that are new to a reader."""
        if self.end is None:
            return RecordUpdate(deltas, None, "", NO_USAGE, self.leased)
        return RecordUpdate(deltas, self.end.reason, self.end.error, self.end.usage, leased=False)


@dataclass(slots=True)
class _Share:
    """What one tenant has of the journal: its ``records``, which take ``tokens``. Of these, those without a lease are
    in the order of release, and take ``unleased_tokens``.
    """

    tenant: str
    records: int = 0
    tokens: int = 0
    unleased: dict[str, None] = field(default_factory=dict)
    unleased_tokens: int = 0


class MemoryJournal:
    """At most ``max_records`` records and ``max_tokens`` tokens of prompts and outputs, at 4 bytes each. Records that
    were finished or released are deleted after ``retention`` seconds. To make space, the oldest of the tenant that has
    most are deleted sooner, so that none evicts what others have in their share.

    A leased record is never deleted, so outputs that grow may exceed ``max_tokens``. When running requests take all the
    space, or those of one of several tenants half of it, a new one is not kept, which a metric counts. A lease never
    expires: its owner lives as long as the record.
    """

    def __init__(
        self,
        *,
        owner: str = "router",
        retention: float = 3600.0,
        max_records: int = 10_000,
        max_tokens: int = 4_000_000,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._owner = owner
        self._listener: LeaseListener | None = None
        self._retention = retention
        self._max_records = max_records
        self._max_tokens = max_tokens
        self._tokens = 0
        self._clock = clock
        self._records: dict[str, _MemoryRecord] = {}
        self._shares: dict[str, _Share] = {}
        self._largest: LazyHeap[str] = LazyHeap()  # tenants with records that can be deleted, by what they have
        self._unleased: OrderedDict[str, None] = OrderedDict()  # records without a lease, in the order of release
        self._expirations: LazyHeap[str] = LazyHeap()  # the same, by when they expire
        self._ledger = MemoryLedger()
        self._uncounted: dict[Lease, GenerationRequest] = {}  # those that run without a record
        self._deleted: dict[Lease, _MemoryRecord] = {}  # those that were deleted and still run
        self._counted: OrderedDict[str, None] = OrderedDict()  # the last ones of these that were counted
        self._orphan_offset = 0  # how many the calls of this round have returned
        metrics.JOURNAL_AVAILABLE.set(1)

    @property
    def available(self) -> bool:
        """Always True: records are kept as long as the process lives."""
        return True

    def is_durable(self, _request_ids: Sequence[str]) -> bool:
        """See ``Journal``. Always True."""
        return True

    def set_listener(self, listener: LeaseListener) -> None:
        """See ``Journal``."""
        self._listener = listener

    def open(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``. A request id that has a record is not opened again."""
        self._remove_expired()
        if generation.request_id in self._records:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        share = self._shares.get(generation.tenant) or _Share(generation.tenant)
        record = _MemoryRecord(generation, Lease(generation.request_id, self._owner, 1), share)
        if not (generation.is_storable and self._add(record)):
            self._uncounted[record.lease] = generation
            metrics.JOURNAL_DROPPED.inc()
        return record.lease

    def open_unrecorded(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``."""
        lease = unrecorded(generation.request_id)
        self._uncounted[lease] = generation
        return lease

    async def open_if_absent(self, generation: GenerationRequest) -> Lease | None:
        """See ``Journal``."""
        self._remove_expired()
        return None if generation.request_id in self._records else self.open(generation)

    def set_version(self, lease: Lease, version: ModelVersion) -> None:
        """See ``Journal``."""
        record = self._writable_record(lease)
        if record is not None:
            record.version = version

    def append(self, lease: Lease, position: int, delta: AnyDelta) -> None:
        """See ``Journal``. Tokens that would leave a gap are not kept."""
        record = self._writable_record(lease)
        if record is not None:
            added = record.log.append(position, delta)
            self._tokens += added
            record.share.tokens += added
            if self._tokens > self._max_tokens:
                self._evict_to_fit()

    def append_token(self, lease: Lease, index: int, position: int, token_id: int) -> None:
        """See ``Journal``."""
        record = self._records.get(lease.request_id)
        if record is None or record.lease is not lease or record.end is not None or not record.leased:
            record = self._writable_record(lease)
        if record is not None:
            added = record.log.append_token(index, position, token_id)
            self._tokens += added
            record.share.tokens += added
            if self._tokens > self._max_tokens:
                self._evict_to_fit()

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """See ``Journal``."""
        record = self._writable_record(lease)
        if record is not None:
            self._end(
                record,
                RequestEnd(FinishReason.ABORT, "", usage) if record.cancelled else RequestEnd(reason, error, usage),
            )
        self._count_unrecorded(lease, usage)

    def release(self, lease: Lease, usage: Usage = NO_USAGE) -> None:
        """See ``Journal``. A cancelled request ends."""
        record = self._writable_record(lease)
        if record is not None and record.cancelled:
            self._end(record, RequestEnd(FinishReason.ABORT, "", usage))
        elif record is not None:
            self._count(record, usage)
            self._begin_retention(record)
        self._count_unrecorded(lease, usage)

    async def flush_end(self, lease: Lease) -> bool:
        """See ``Journal``."""
        record = self._records.get(lease.request_id)
        return record is not None and record.end is not None

    async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """See ``Journal``."""
        self._remove_expired()
        record = self._records.get(request_id)
        if record is None or record.leased or record.end is not None:
            return None
        self._end_retention(request_id)
        record.leased = True
        record.lease = Lease(request_id, self._owner, record.lease.epoch + 1)
        try:
            claimed = await record.to_record(tokens_only=False), record.lease
        except BaseException:
            self.release(record.lease)
            raise
        if record.cancelled:  # while it was being read
            self.release(record.lease)
            return None
        return claimed

    async def read(self, request_id: str, *, tokens_only: bool = False) -> RequestRecord | None:
        """See ``Journal``."""
        record = self._find(request_id)
        return None if record is None else await record.to_record(tokens_only=tokens_only)

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:  # noqa: ARG002 - it is
        """See ``Journal``."""
        return [None if each is None else each.status() for each in map(self._find, request_ids)]

    def follow(self, request_id: str) -> "MemoryFollower":
        """See ``Journal``."""
        return MemoryFollower(request_id, self._find)

    async def cancel(self, request_id: str) -> bool:
        """See ``Journal``."""
        record = self._find(request_id)
        if record is None or record.end is not None:
            return False
        if not record.leased:
            self._end_retention(request_id)
            record.lease = Lease(request_id, "", record.lease.epoch + 1)
            self._end(record, RequestEnd(FinishReason.ABORT))
        elif not record.cancelled:
            record.cancelled = True
            if self._listener is not None:
                self._listener.on_cancelled(request_id)
        return True

    async def delete(self, request_id: str) -> bool:
        """See ``Journal``."""
        record = self._find(request_id)
        if record is None:
            return False
        if record.leased:
            await self.cancel(request_id)
        if record.leased:  # else that has ended it
            self._deleted[record.lease] = record
        self._remove(request_id)
        return True

    async def orphans(self) -> list[str]:
        """See ``Journal``."""
        self._remove_expired()
        unleased = (self._records[request_id] for request_id in self._unleased)
        orphans = [record for record in unleased if record.generation.background and record.end is None]
        if self._orphan_offset >= len(orphans):
            self._orphan_offset = 0
        found = orphans[self._orphan_offset : self._orphan_offset + MAX_ORPHANS]
        self._orphan_offset += len(found)
        return [record.lease.request_id for record in found]

    async def usage(self, since: float, until: float, tenant: str | None = None) -> list[UsageRow]:
        """See ``Journal``: what was used since the process began."""
        return self._ledger.rows(since, until, tenant)

    def count_usage(self, lease: Lease, account: Account, usage: Usage) -> None:
        """See ``Journal``."""
        if usage == NO_USAGE or lease.request_id in self._counted:
            return
        self._ledger.add(account, difference(usage, NO_USAGE))
        self._counted[lease.request_id] = None
        if len(self._counted) > self._max_records:
            self._counted.popitem(last=False)

    async def settle_usage(self) -> None:
        """Nothing is ever left to be counted."""

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing to write, nothing to close."""

    def _find(self, request_id: str) -> _MemoryRecord | None:
        self._remove_expired()
        return self._records.get(request_id)

    def _writable_record(self, lease: Lease) -> _MemoryRecord | None:
        record = self._records.get(lease.request_id)
        if record is None or record.end is not None:
            return None
        if lease is not record.lease and lease != record.lease:  # comparing takes longer than a token may
            metrics.STALE_EPOCHS.inc()
            return None
        return record if record.leased else None

    def _end(self, record: _MemoryRecord, end: RequestEnd) -> None:
        record.end = end
        self._count(record, end.usage)
        self._begin_retention(record)

    def _count_unrecorded(self, lease: Lease, usage: Usage) -> None:
        if (record := self._deleted.pop(lease, None)) is not None:
            self._count(record, usage)
        if (generation := self._uncounted.pop(lease, None)) is not None:
            self.count_usage(lease, Account.of(generation), usage)

    def _count(self, record: _MemoryRecord, usage: Usage) -> None:
        """Adds what the request used since it was counted last to the ledger."""
        generation = record.generation
        total = used(usage, len(generation.prompt_token_ids), record.log.num_tokens)
        if any(counts := difference(total, record.counted)):
            self._ledger.add(Account.of(generation), counts)
            record.counted = largest(total, record.counted)

    def _begin_retention(self, record: _MemoryRecord) -> None:
        """Gives up the lease: from now on the record may be deleted."""
        record.leased = False
        own, request_id, share = record.generation.retention, record.lease.request_id, record.share
        retention = self._retention if own is None else max(MIN_RETENTION, own)
        self._unleased[request_id] = share.unleased[request_id] = None
        share.unleased_tokens += record.size
        self._expirations.put(request_id, self._clock() + retention)
        self._rank(share)
        self._evict_to_fit()

    def _end_retention(self, request_id: str) -> None:
        """The record is leased again, or deleted."""
        record = self._records[request_id]
        del self._unleased[request_id], record.share.unleased[request_id]
        record.share.unleased_tokens -= record.size
        self._expirations.discard(request_id)
        self._rank(record.share)

    def _add(self, record: _MemoryRecord) -> bool:
        """Adds a record that has a lease, if it can have space; returns whether."""
        share, size, request_id = record.share, record.size, record.lease.request_id
        running, tokens = share.records - len(share.unleased), share.tokens - share.unleased_tokens + size
        if share.tenant and (2 * running >= self._max_records or 2 * tokens > self._max_tokens):
            return False
        self._records[request_id] = record
        self._shares[share.tenant] = share
        self._tokens += size
        share.tokens += size
        share.records += 1
        self._rank(share)
        if self._evict_to_fit():
            return True
        self._remove(request_id)
        return False

    def _rank(self, share: _Share) -> None:
        """Ranks a tenant by the larger of its shares of records and of tokens. It is not ranked again for each token of
        its answers, which a tenant has few of at a time.
        """
        if share.unleased:
            self._largest.put(share.tenant, -max(share.records / self._max_records, share.tokens / self._max_tokens))
        else:
            self._largest.discard(share.tenant)

    def _evict_to_fit(self) -> bool:
        """Deletes records without a lease until all others fit; False if too much is running."""
        while self._is_full and self._largest:
            self._remove(next(iter(self._shares[self._largest.first()].unleased)))
        return not self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self._records) > self._max_records or self._tokens > self._max_tokens

    def _remove_expired(self) -> None:
        while self._expirations and self._expirations.key(oldest := self._expirations.first()) <= self._clock():
            self._remove(oldest)

    def _remove(self, request_id: str) -> None:
        if request_id in self._unleased:
            self._end_retention(request_id)
        record = self._records.pop(request_id)
        share, size = record.share, record.size
        self._tokens -= size
        share.tokens -= size
        share.records -= 1
        if not share.records:
            del self._shares[share.tenant]
        elif share.unleased:
            self._rank(share)


class MemoryFollower:
    """Follows one record of a ``MemoryJournal``."""

    def __init__(self, request_id: str, find: Callable[[str], _MemoryRecord | None]) -> None:
        self._request_id = request_id
        self._find = find
        self._record: _MemoryRecord | None = None
        self._reader = TokenLogReader(0)
        self._position = 0

    async def poll(self) -> RecordUpdate | None:
        """See ``Follower``."""
        record = self._find(self._request_id)
        if self._record is None and record is not None:
            self._record, self._reader = record, TokenLogReader(record.generation.params.n)
        if record is None or record is not self._record:
            return None
        values = record.log.values
        deltas, taken = (
            await read_chunk(self._reader, values, self._position) if self._position < len(values) else ([], 0)
        )
        self._position += taken
        return partial_update(deltas) if self._position < len(values) else record.update(deltas)
