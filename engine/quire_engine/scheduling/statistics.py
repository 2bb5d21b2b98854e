"""Counters that only grow, for metrics and benchmarks."""

from collections import Counter
from dataclasses import dataclass, field

from quire_engine.scheduling.preemption import PreemptionMode, PreemptionReason


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start: tokens, sequences and blocks, as their names say. ``prefix_device_tokens`` of the prompts
    were found in the device pool, and ``prefix_host_tokens`` came back from the host's. ``blocks_copied_out`` and
    ``_in`` are all that moved between the pools, those swapped among them; ``blocks_parted`` those copied because a
    sequence wrote into a shared one. ``out_of_memory`` requests were alone and could not grow.
    """

    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_device_tokens: int = 0
    prefix_host_tokens: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_copied_out: int = 0
    blocks_copied_in: int = 0
    blocks_parted: int = 0
    out_of_memory: int = 0
    preemptions: Counter[tuple[PreemptionMode, PreemptionReason]] = field(default_factory=Counter)

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens that were found in either pool."""
        return self.prefix_device_tokens + self.prefix_host_tokens

    @property
    def preemptions_by_swap(self) -> int:
        """Victims that were swapped out."""
        return sum(count for (way, _), count in self.preemptions.items() if way is PreemptionMode.SWAP)

    @property
    def preemptions_by_recompute(self) -> int:
        """Victims that were sent back to the start."""
        return sum(count for (way, _), count in self.preemptions.items() if way is PreemptionMode.RECOMPUTE)
