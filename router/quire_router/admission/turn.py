"""A request that waits for capacity."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request that wants to run.

    ``tokens`` is what it may cost an engine: its prompt and the maximum output of all choices. ``bytes`` is the memory
    that it takes in this process. Within one tenant, a smaller ``priority`` goes first. ``deadline`` is in seconds of
    the monotonic clock.
    """

    request_id: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    priority: int = 0
    deadline: float | None = None
