"""Request state in this process, for one router without a database. It does not survive the process."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from quire_proto.sampling import FinishReason

from quire_router import metrics
from quire_router.admission.lazy_heap import LazyHeap
from quire_router.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.journal.base import REFUSED_EPOCH, Lease, Owners, Piece, Record, Tail, Told, part_of_more
from quire_router.journal.bounds import MAX_ORPHANS, is_bounded, size
from quire_router.journal.deliveries import Deliveries, RowReader
from quire_router.journal.pending import End
from quire_router.journal.reading import read_part, read_row
from quire_router.journal.settings import SHORTEST_RETENTION


@dataclass(slots=True)
class _Kept:
    """A record, its tokens packed."""

    generation: GenerationRequest
    lease: Lease
    deliveries: Deliveries = field(init=False)
    end: End | None = None
    held: bool = True
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(self.generation.params.n)

    @property
    def tokens(self) -> int:
        """What it takes, in tokens of 4 bytes."""
        return size(self.generation) + len(self.deliveries.values)

    async def unpack(self, *, brief: bool) -> Record:
        """The record as it is now."""
        state = self.state([])
        record = Record(
            generation=self.generation,
            owner=self.lease.owner,
            epoch=self.lease.epoch,
            pieces=[],
            finish_reason=state.finish_reason,
            error=state.error,
            usage=state.usage,
            held=state.held,
        )
        reader = RowReader(self.generation.params.n, brief=brief)
        record.pieces, _ = await read_row(reader, self.deliveries.values)
        return record

    def status(self) -> Record:
        """The record without its pieces."""
        state, generation = self.state([]), self.generation
        told = Usage(len(generation.prompt_token_ids), self.deliveries.told)
        return Record(
            generation=generation,
            owner=self.lease.owner,
            epoch=self.lease.epoch,
            pieces=[],
            finish_reason=state.finish_reason,
            error=state.error,
            usage=told if state.usage == NO_USAGE else state.usage,
            held=state.held,
        )

    def state(self, pieces: list[Told]) -> Tail:
        """How it is with it now, and what is new to a reader."""
        if self.end is None:
            return Tail(pieces, None, "", NO_USAGE, self.held)
        return Tail(pieces, self.end.reason, self.end.error, self.end.usage, held=False)


class MemoryJournal:
    """At most ``max_records`` records and ``max_tokens`` tokens of prompts and outputs, at 4 bytes each. Records that
    were finished or released are forgotten after ``retention`` seconds, or the oldest of them to make room.

    A record that is held is never forgotten, so outputs that grow may exceed ``max_tokens``. When running requests take
    all the room, a new one is not kept, and counted. A lease has no end: who holds it lives as long as the record.
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
        self._owners: Owners | None = None
        self._retention = retention
        self._max_records = max_records
        self._max_tokens = max_tokens
        self._tokens = 0
        self._clock = clock
        self._records: dict[str, _Kept] = {}
        self._resting: OrderedDict[str, None] = OrderedDict()  # without a holder, in the order of release
        self._kept_until: LazyHeap[str] = LazyHeap()  # the same
        self._named = 0  # orphans, in this round
        metrics.JOURNAL_AVAILABLE.set(1)

    @property
    def available(self) -> bool:
        """Always: what is written is kept, as long as the process lives."""
        return True

    def report_to(self, owners: Owners) -> None:
        """See ``Journal``."""
        self._owners = owners

    def open(self, generation: GenerationRequest) -> Lease:
        """See ``Journal``. A request id that is remembered already is not opened again."""
        self._forget_old()
        if generation.request_id in self._records:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        record = _Kept(generation, Lease(generation.request_id, self._owner, 1))
        if is_bounded(generation) and self._make_room(1, record.tokens):
            self._records[generation.request_id] = record
            self._tokens += record.tokens
        else:
            metrics.JOURNAL_DROPPED.inc()
        return record.lease

    async def open_once(self, generation: GenerationRequest) -> Lease | None:
        """See ``Journal``."""
        self._forget_old()
        return None if generation.request_id in self._records else self.open(generation)

    def append(self, lease: Lease, position: int, piece: Piece) -> None:
        """See ``Journal``. Tokens that would leave a hole are not kept."""
        record = self._writable(lease)
        if record is not None:
            self._tokens += record.deliveries.add(position, piece)
            self._make_room(0, 0)

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """See ``Journal``."""
        record = self._writable(lease)
        if record is not None:
            self._end(record, End(FinishReason.ABORT, "", usage) if record.cancelled else End(reason, error, usage))

    def release(self, lease: Lease) -> None:
        """See ``Journal``. What somebody asked to end is ended."""
        record = self._writable(lease)
        if record is not None and record.cancelled:
            self._end(record, End(FinishReason.ABORT))
        elif record is not None:
            self._rest(record)

    async def claim(self, request_id: str) -> tuple[Record, Lease] | None:
        """See ``Journal``."""
        self._forget_old()
        record = self._records.get(request_id)
        if record is None or record.held or record.end is not None:
            return None
        self._wake(request_id)
        record.held = True
        record.lease = Lease(request_id, self._owner, record.lease.epoch + 1)
        try:
            claimed = await record.unpack(brief=False), record.lease
        except BaseException:
            self.release(record.lease)
            raise
        if record.cancelled:  # while it was read
            self.release(record.lease)
            return None
        return claimed

    async def read(self, request_id: str, *, brief: bool = False) -> Record | None:
        """See ``Journal``."""
        record = self._find(request_id)
        return None if record is None else await record.unpack(brief=brief)

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[Record | None]:  # noqa: ARG002 - it is
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
        if not record.held:
            self._wake(request_id)
            record.lease = Lease(request_id, "", record.lease.epoch + 1)
            self._end(record, End(FinishReason.ABORT))
        elif not record.cancelled:
            record.cancelled = True
            if self._owners is not None:
                self._owners.on_cancelled(request_id)
        return True

    async def delete(self, request_id: str) -> bool:
        """See ``Journal``."""
        record = self._find(request_id)
        if record is not None and record.held:
            record.generation = replace(record.generation, retention=0)
            await self.cancel(request_id)
        elif record is not None:
            self._forget(request_id)
        return record is not None

    async def orphans(self) -> list[str]:
        """See ``Journal``."""
        self._forget_old()
        resting = (self._records[request_id] for request_id in self._resting)
        orphans = [record for record in resting if record.generation.background and record.end is None]
        if self._named >= len(orphans):
            self._named = 0
        named = orphans[self._named : self._named + MAX_ORPHANS]
        self._named += len(named)
        return [record.lease.request_id for record in named]

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing to write, nothing to let go of."""

    def _find(self, request_id: str) -> _Kept | None:
        self._forget_old()
        return self._records.get(request_id)

    def _writable(self, lease: Lease) -> _Kept | None:
        record = self._records.get(lease.request_id)
        if record is None or record.end is not None:
            return None
        if lease is not record.lease and lease != record.lease:  # comparing takes longer than a token may
            metrics.STALE_EPOCHS.inc()
            return None
        return record if record.held else None

    def _end(self, record: _Kept, end: End) -> None:
        record.end = end
        self._rest(record)

    def _rest(self, record: _Kept) -> None:
        """From now on the record may be forgotten."""
        record.held = False
        own, request_id = record.generation.retention, record.lease.request_id
        retention = self._retention if own is None else max(SHORTEST_RETENTION, own)
        self._resting[request_id] = None
        self._kept_until.put(request_id, self._clock() + retention)
        self._make_room(0, 0)

    def _wake(self, request_id: str) -> None:
        """The record is held again, or it is forgotten."""
        del self._resting[request_id]
        self._kept_until.discard(request_id)

    def _make_room(self, records: int, tokens: int) -> bool:
        """Forgets records that nobody holds until so many more have room; False when too much is running."""
        while self._is_full(records, tokens) and self._resting:
            self._forget(next(iter(self._resting)))
        return not self._is_full(records, tokens)

    def _is_full(self, records: int, tokens: int) -> bool:
        return len(self._records) + records > self._max_records or self._tokens + tokens > self._max_tokens

    def _forget_old(self) -> None:
        while self._kept_until and self._kept_until.key(oldest := self._kept_until.first()) <= self._clock():
            self._forget(oldest)

    def _forget(self, request_id: str) -> None:
        self._wake(request_id)
        self._tokens -= self._records.pop(request_id).tokens


class MemoryFollower:
    """A look after one record of a ``MemoryJournal``."""

    def __init__(self, request_id: str, find: Callable[[str], _Kept | None]) -> None:
        self._request_id = request_id
        self._find = find
        self._record: _Kept | None = None
        self._reader = RowReader(0)
        self._position = 0

    async def look(self) -> Tail | None:
        """See ``Follower``."""
        record = self._find(self._request_id)
        if self._record is None and record is not None:
            self._record, self._reader = record, RowReader(record.generation.params.n)
        if record is None or record is not self._record:
            return None
        values = record.deliveries.values
        pieces, taken = (
            await read_part(self._reader, values, self._position) if self._position < len(values) else ([], 0)
        )
        self._position += taken
        return part_of_more(pieces) if self._position < len(values) else record.state(pieces)
