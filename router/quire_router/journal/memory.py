"""Request state in this process, for one router without a database. It does not survive the process."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from quire_proto.sampling import FinishReason

from quire_router import metrics
from quire_router.generation import Generation
from quire_router.journal.base import Lease, Record

REFUSED_EPOCH = 0  # no record ever has it, so whatever is written with it is refused


class MemoryJournal:
    """At most ``max_records`` records; finished ones are forgotten after ``retention`` seconds, or to make room.

    When every record is of a running request, a new one is not kept, and counted.
    """

    def __init__(
        self,
        *,
        owner: str = "router",
        retention: float = 3600.0,
        max_records: int = 10_000,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._owner = owner
        self._retention = retention
        self._max_records = max_records
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._finished: OrderedDict[str, float] = OrderedDict()
        metrics.JOURNAL_AVAILABLE.set(1)

    @property
    def available(self) -> bool:
        """Always: what is written is kept, as long as the process lives."""
        return True

    def open(self, generation: Generation) -> Lease:
        """See ``Journal``. A request id that is remembered already is not opened again."""
        self._make_room()
        if generation.request_id in self._records:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        if len(self._records) >= self._max_records:
            metrics.JOURNAL_DROPPED.inc()
        else:
            self._records[generation.request_id] = Record(generation, self._owner, 1)
        return Lease(generation.request_id, self._owner, 1)

    def append(self, lease: Lease, position: int, token_ids: list[int]) -> None:
        """See ``Journal``. Tokens that would leave a hole are not kept."""
        record = self._writable(lease)
        if record is not None and position <= len(record.token_ids):
            record.token_ids.extend(token_ids[len(record.token_ids) - position :])

    def finish(self, lease: Lease, reason: FinishReason, error: str = "") -> None:
        """See ``Journal``."""
        record = self._writable(lease)
        if record is not None:
            record.finish_reason, record.error = reason, error
            self._finished[lease.request_id] = self._clock() + self._retention

    async def read(self, request_id: str) -> Record | None:
        """See ``Journal``."""
        self._forget_old()
        record = self._records.get(request_id)
        return None if record is None else replace(record, token_ids=list(record.token_ids))

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing to write, nothing to let go of."""

    def _writable(self, lease: Lease) -> Record | None:
        record = self._records.get(lease.request_id)
        if record is None or record.finish_reason is not None:
            return None
        if lease.epoch != record.epoch or lease.owner != record.owner:
            metrics.STALE_EPOCHS.inc()
            return None
        return record

    def _make_room(self) -> None:
        self._forget_old()
        if len(self._records) >= self._max_records and self._finished:
            self._forget_oldest()

    def _forget_old(self) -> None:
        while self._finished and next(iter(self._finished.values())) <= self._clock():
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        request_id, _ = self._finished.popitem(last=False)
        del self._records[request_id]
