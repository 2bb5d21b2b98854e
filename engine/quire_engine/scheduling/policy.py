"""In which order those that wait are admitted: one small function a policy. The lowest rank goes first, and of equal
ranks whoever came first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_engine.config import Policy


AGING = 0.02


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """What a policy may know of a sequence that waits: the tokens that it needs computed and that no cache holds, all
    tokens that the engine had computed when it arrived, and its request's priority.
    """

    uncached_tokens: int
    served_at_arrival: int
    priority: int


def fcfs(job: QueuedRequest) -> float:
    """First come, first served."""
    del job
    return 0.0


def sjf(job: QueuedRequest) -> float:
    """The shortest job first, by the tokens that it needs computed, aged by those that others were given meanwhile.

    Waiting while the engine computes a token counts as much as being ``AGING`` tokens shorter. The token that is served
    now is the same for all that wait, so it cancels out, and the rank of a job never changes with time. Aging by tokens
    instead of seconds is SGLang's idea.
    """
    return job.uncached_tokens + AGING * job.served_at_arrival


def priority(job: QueuedRequest) -> float:
    """Small numbers first; first come, first served among equals."""
    return float(job.priority)


POLICIES: "Mapping[Policy, Callable[[QueuedRequest], float]]" = {"fcfs": fcfs, "sjf": sjf, "priority": priority}
