"""How a preempted sequence is away, and what that costs: plain data."""

from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """How a victim is preempted, as metrics and spans name it: swapped to the host pool, or recomputed later."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class PreemptionReason(StrEnum):
    """Why that mode was chosen."""

    CHEAPER = "cheaper"
    HOST_FULL = "host_full"
    TOO_MANY_SWAPPED = "too_many_swapped"
    CONFIGURED = "configured"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SwapCost:
    """The cost of preempting a table: the bytes that swapping it out and in would move, or the uncached tokens that
    would be recomputed. Blocks that move either way, because the host's cache has them, count in neither.
    """

    bytes_to_move: int
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class TimeAway:
    """How long a preempted sequence was away, in seconds. ``mode`` is recompute if any part of it was recomputed."""

    mode: PreemptionMode
    seconds: float


@dataclass(slots=True)
class Absence:
    """A preempted sequence that has not caught up yet. ``since`` is in nanoseconds since 1970. ``num_computed_tokens``
    is how many tokens it had computed, including tokens of the steps in flight.
    """

    since: int
    mode: PreemptionMode
    num_computed_tokens: int
