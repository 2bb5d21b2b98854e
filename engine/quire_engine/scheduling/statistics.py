"""Counters that only grow, for metrics and benchmarks."""

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Totals since the start: tokens, sequences and blocks, as their names say."""

    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions_by_swap: int = 0
    preemptions_by_recompute: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
