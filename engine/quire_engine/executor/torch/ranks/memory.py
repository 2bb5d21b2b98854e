"""The KV pools of several ranks: one decision from what all of them measured. Pure arithmetic; knows no device."""

from collections.abc import Sequence
from dataclasses import replace

from quire_engine.executor.torch.sizing import CacheBudget, CacheSizes, MemoryProfile, compute_cache_sizes
from quire_engine.kv.capacity import KVCacheConfig


def compute_rank_cache_sizes(
    request: CacheBudget, measures: Sequence[MemoryProfile], smallest: CacheSizes
) -> tuple[CacheSizes, MemoryProfile]:
    """The pools of each rank, equal on all, and what decided them. ``measures`` are the ranks', ``smallest`` is the
    least for one rank.

    On the CPU the ranks share one memory, and what was asked for is for all of them. On CUDA each has a GPU of its own,
    of which the fullest decides, and they share the memory of the host pools. Raises ``ModelError`` as
    ``compute_cache_sizes`` does.
    """
    size = len(measures)
    if size == 1:
        return compute_cache_sizes(request, measures[0], smallest), measures[0]
    if measures[0].host_available is None:
        whole = sum_profiles(measures)
        pools = compute_cache_sizes(
            request, whole, CacheSizes(smallest.kv_cache_bytes * size, smallest.swap_bytes * size)
        )
        return CacheSizes(pools.kv_cache_bytes // size, pools.swap_bytes // size), whole
    each = replace(request, swap_bytes=request.swap_bytes // size)
    own = [replace(one, host_available=(one.host_available or 0) // size) for one in measures]
    decided = [(compute_cache_sizes(each, one, smallest), one) for one in own]
    least, fullest = min(decided, key=lambda pair: pair[0].kv_cache_bytes)
    return CacheSizes(least.kv_cache_bytes, min(pools.swap_bytes for pools, _ in decided)), fullest


def with_all_ranks_bytes(capacity: KVCacheConfig, measures: Sequence[MemoryProfile]) -> KVCacheConfig:
    """``capacity`` with ``block_bytes`` of all ranks where they share one memory (CPU), unchanged on CUDA."""
    parts = len(measures) if measures[0].host_available is None else 1
    return replace(capacity, block_bytes=capacity.block_bytes * parts)


def sum_profiles(measures: Sequence[MemoryProfile]) -> MemoryProfile:
    """The ranks of one memory as one: what they hold adds up. What they share, as code, counts for each."""
    first, loaded = measures[0], sum(one.used_loaded for one in measures)
    peaks = [one.peak for one in measures if one.peak is not None]
    return replace(
        first,
        used_before=sum(one.used_before for one in measures),
        used_loaded=loaded,
        available=max(0, min(first.limit - loaded, *(one.available for one in measures))),
        peak=sum(peaks) if len(peaks) == len(measures) else None,
        growth_reserve=sum(one.growth_reserve for one in measures),
    )
