"""The times that a journal in Redis keeps to."""

from dataclasses import dataclass

from quire_router.generation import GenerationRequest
from quire_router.journal.codec import MAX_LEASE

MIN_RETENTION = 10  # seconds: routers that follow a record, or wake up and still take it for theirs, see its end
MIN_RUNNING_TTL = 60  # seconds in which a client may come back to what a router that died was at


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Times in seconds. Raises ``ValueError`` for a lease that is longer than any may be.

    A router holds a ``lease`` on each record it writes and renews it four times as often, so that a slow beat does not
    lose it. A record is forgotten ``retention`` after it was finished or, if it is no background request, released, or
    ``running_ttl`` after its last write. A ``pause`` between two flushes lets tokens gather, and the more streams run,
    the longer: half a millisecond or so for each. A router that dies costs at most that many seconds of tokens, which
    are generated again. For ``settle`` after Redis was away, routers may still have to write what they hold.
    """

    lease: float = 4.0
    settle: float = 4.0
    retention: float = 3600.0
    running_ttl: float = 86_400.0
    pause: float = 0.02

    def __post_init__(self) -> None:
        if self.lease_ms > MAX_LEASE:
            raise ValueError(f"a lease of more than {MAX_LEASE} ms is longer than the scripts take for one")

    @property
    def lease_ms(self) -> int:
        """As Redis takes it."""
        return int(self.lease * 1000)

    @property
    def retention_s(self) -> int:
        """As Redis takes it, of requests that say nothing else."""
        return max(1, round(self.retention))

    def retention_of(self, generation: GenerationRequest) -> int:
        """Seconds for which the record of this request is kept after its end, or after it was released."""
        if generation.retention is None:
            return self.retention_s
        return max(MIN_RETENTION, round(generation.retention))

    def running_ttl_of(self, generation: GenerationRequest) -> int:
        """Seconds for which its record is kept after its last write. One that is to go soon after its end is not kept
        for long where its router dies either, unless another one is going to end it.
        """
        if generation.retention is None or generation.background:
            return self.running_ttl_s
        return min(self.running_ttl_s, max(MIN_RUNNING_TTL, self.retention_of(generation)))

    @property
    def running_ttl_s(self) -> int:
        """As Redis takes it."""
        return max(1, round(self.running_ttl))
