"""Request state in this process, for one router without a database. It does not survive the process."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from quire_proto.sampling import FinishReason

from quire_router import metrics
from quire_router.generation import Generation
from quire_router.journal.base import Lease, Record
from quire_router.journal.deliveries import Deliveries

REFUSED_EPOCH = 0  # no record ever has it, so whatever is written with it is refused


@dataclass(slots=True)
class _Kept:
    """A record, its tokens packed."""

    generation: Generation
    lease: Lease
    deliveries: Deliveries = field(init=False)
    finish_reason: FinishReason | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(self.generation.params.n)

    @property
    def tokens(self) -> int:
        return len(self.generation.prompt_token_ids) + len(self.deliveries.values)

    def unpack(self) -> Record:
        return Record(
            generation=self.generation,
            owner=self.lease.owner,
            epoch=self.lease.epoch,
            choices=self.deliveries.read(),
            finish_reason=self.finish_reason,
            error=self.error,
        )


class MemoryJournal:
    """At most ``max_records`` records and ``max_tokens`` tokens of prompts and outputs, at 4 bytes each. Finished
    records are forgotten after ``retention`` seconds, or the oldest of them to make room.

    A running record is never forgotten, so outputs that grow may exceed ``max_tokens``. When running requests take all
    the room, a new one is not kept, and counted.
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
        self._retention = retention
        self._max_records = max_records
        self._max_tokens = max_tokens
        self._tokens = 0
        self._clock = clock
        self._records: dict[str, _Kept] = {}
        self._finished: OrderedDict[str, float] = OrderedDict()
        metrics.JOURNAL_AVAILABLE.set(1)

    @property
    def available(self) -> bool:
        """Always: what is written is kept, as long as the process lives."""
        return True

    def open(self, generation: Generation) -> Lease:
        """See ``Journal``. A request id that is remembered already is not opened again."""
        self._forget_old()
        if generation.request_id in self._records:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        record = _Kept(generation, Lease(generation.request_id, self._owner, 1))
        if self._make_room(1, record.tokens):
            self._records[generation.request_id] = record
            self._tokens += record.tokens
        else:
            metrics.JOURNAL_DROPPED.inc()
        return record.lease

    def append(
        self,
        lease: Lease,
        position: int,
        token_ids: list[int],
        index: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """See ``Journal``. Tokens that would leave a hole are not kept."""
        record = self._writable(lease)
        if record is not None:
            self._tokens += record.deliveries.add(index, position, token_ids, finish_reason)
            self._make_room(0, 0)

    def finish(self, lease: Lease, reason: FinishReason, error: str = "") -> None:
        """See ``Journal``."""
        record = self._writable(lease)
        if record is not None:
            record.finish_reason, record.error = reason, error
            self._finished[lease.request_id] = self._clock() + self._retention
            self._make_room(0, 0)

    async def read(self, request_id: str) -> Record | None:
        """See ``Journal``."""
        self._forget_old()
        record = self._records.get(request_id)
        return None if record is None else record.unpack()

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing to write, nothing to let go of."""

    def _writable(self, lease: Lease) -> _Kept | None:
        record = self._records.get(lease.request_id)
        if record is None or record.finish_reason is not None:
            return None
        if lease != record.lease:
            metrics.STALE_EPOCHS.inc()
            return None
        return record

    def _make_room(self, records: int, tokens: int) -> bool:
        """Forgets finished records until so many more have room; False when too much is running."""
        while self._is_full(records, tokens) and self._finished:
            self._forget_oldest()
        return not self._is_full(records, tokens)

    def _is_full(self, records: int, tokens: int) -> bool:
        return len(self._records) + records > self._max_records or self._tokens + tokens > self._max_tokens

    def _forget_old(self) -> None:
        while self._finished and next(iter(self._finished.values())) <= self._clock():
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        request_id, _ = self._finished.popitem(last=False)
        self._tokens -= self._records.pop(request_id).tokens
