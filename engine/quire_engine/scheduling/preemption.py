"""How a victim gives way: swapped to the host pool, or computed again later. The cheaper one, in seconds."""

from enum import StrEnum

from quire_engine.kv.memory import SwapCost
from quire_engine.scheduling.rates import Rates


class PreemptionMode(StrEnum):
    """The two ways, as metrics and spans name them."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class PreemptionReason(StrEnum):
    """Why a victim went that way."""

    CHEAPER = "cheaper"
    HOST_FULL = "host_full"
    TOO_MANY_SWAPPED = "too_many_swapped"
    LOST = "lost"


def choose_preemption_mode(
    cost: SwapCost, rates: Rates, *, host_has_room: bool, may_swap: bool
) -> tuple[PreemptionMode, PreemptionReason]:
    """How a victim with this cost gives way, and why: ``host_has_room`` for its blocks, and ``may_swap`` one more."""
    if not cost.bytes_to_move:
        return PreemptionMode.RECOMPUTE, PreemptionReason.CHEAPER
    if not host_has_room:
        return PreemptionMode.RECOMPUTE, PreemptionReason.HOST_FULL
    if not may_swap:
        return PreemptionMode.RECOMPUTE, PreemptionReason.TOO_MANY_SWAPPED
    swap = cost.bytes_to_move / rates.bytes_per_second
    recompute = cost.uncached_tokens / rates.tokens_per_second
    return (PreemptionMode.SWAP if swap <= recompute else PreemptionMode.RECOMPUTE), PreemptionReason.CHEAPER
