"""How a preempted sequence is away, and what that costs: plain data."""

from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """How a victim is preempted, as metrics and spans name it: swapped to the host pool, or computed again later."""

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
    """What a table costs: the bytes that swapping it out and in again moves, or the tokens that no cache holds and that
    would be computed again instead. What moves either way, because the host's cache has it, is no part of either.
    """

    bytes_to_move: int
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class TimeAway:
    """How long a preempted sequence was away, in seconds. ``mode`` is recompute if any of it was computed again."""

    mode: PreemptionMode
    seconds: float


@dataclass(slots=True)
class Absence:
    """A preempted sequence that is not back where it was: since when, in nanoseconds since 1970, by which mode, and how
    many tokens were computed, or would have been by the steps in flight.
    """

    since: int
    mode: PreemptionMode
    num_computed_tokens: int
