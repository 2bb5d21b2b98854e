"""How a victim gives way: swapped to the host pool, or computed again later. The cheaper one, in seconds."""

from enum import StrEnum

from quire_engine.kv.memory import SwapCost
from quire_engine.scheduling.rates import Rates


class Preemption(StrEnum):
    """The two ways, as metrics and spans name them."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class Reason(StrEnum):
    """Why a victim went that way."""

    CHEAPER = "cheaper"
    HOST_FULL = "host_full"
    TOO_MANY_SWAPPED = "too_many_swapped"
    LOST = "lost"


def decide(cost: SwapCost, rates: Rates, *, host_has_room: bool, may_swap: bool) -> tuple[Preemption, Reason]:
    """How a victim with this cost gives way, and why: ``host_has_room`` for its blocks, and ``may_swap`` one more."""
    if not cost.bytes_to_move:
        return Preemption.RECOMPUTE, Reason.CHEAPER
    if not host_has_room:
        return Preemption.RECOMPUTE, Reason.HOST_FULL
    if not may_swap:
        return Preemption.RECOMPUTE, Reason.TOO_MANY_SWAPPED
    swap = cost.bytes_to_move / rates.bytes_per_second
    recompute = cost.uncached_tokens / rates.tokens_per_second
    return (Preemption.SWAP if swap <= recompute else Preemption.RECOMPUTE), Reason.CHEAPER
