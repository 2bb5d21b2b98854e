"""The KV pools take the memory that is available, never more, and an error explains when there is too little."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.errors import ModelError
from quire_engine.worker.memory import CacheBudget, CacheSizes, MemoryProfile, compute_cache_sizes, memory_table

MIB, GIB = 1 << 20, 1 << 30
SMALLEST = CacheSizes(2 << 20, 0)
sizes = st.integers(0, 64 * GIB)


@st.composite
def measurements(draw: st.DrawFn) -> MemoryProfile:
    """Mostly of memory that has some room."""
    before, weights, activations, growth = draw(sizes), draw(sizes), draw(sizes), draw(st.integers(0, GIB))
    loaded = before + weights
    taken = loaded + activations + growth
    return MemoryProfile(
        limit=max(1, taken + draw(st.integers(-GIB, 512 * GIB))),
        source="the container's limit",
        dedicated=draw(st.booleans()),
        used_before=before,
        used_loaded=loaded,
        available=max(0, taken - loaded + draw(st.integers(-GIB, 512 * GIB))),
        peak=draw(st.none() | st.just(loaded + activations)),
        growth_reserve=growth,
        host_available=draw(st.none() | sizes),
    )


swaps, parts = st.integers(0, 16 * GIB), st.none() | st.floats(0.5, 1)
filling = st.builds(CacheBudget, st.none(), swaps, parts)
given_sizes = st.builds(CacheBudget, sizes, swaps, parts)


def decided(request: CacheBudget, measured: MemoryProfile) -> CacheSizes | None:
    """The pools, or None where they are refused."""
    try:
        return compute_cache_sizes(request, measured, SMALLEST)
    except ModelError:
        return None


@given(filling, measurements())
def test_pools_fill_the_part_that_may_be_taken_and_no_more(request: CacheBudget, measured: MemoryProfile) -> None:
    room = min(measured.limit, measured.used_loaded + measured.available) - measured.used_without_cache
    if request.utilization is not None or measured.dedicated:
        room = min(room, int(measured.limit * (request.utilization or 0.9)) - measured.used_without_cache)
    else:
        room = min(room // 4, 4 * GIB)
    pools = decided(request, measured)
    if pools is None:
        assert room < 2 * SMALLEST.kv_cache_bytes
    else:
        assert pools.kv_cache_bytes >= SMALLEST.kv_cache_bytes
        assert pools.kv_cache_bytes + (pools.swap_bytes if measured.host_available is None else 0) == room


@given(filling | given_sizes, measurements())
def test_the_host_pool_takes_no_more_than_it_was_given_nor_than_there_is(
    request: CacheBudget, measured: MemoryProfile
) -> None:
    pools = decided(request, measured)
    if pools is None:
        return
    assert 0 <= pools.swap_bytes <= request.swap_bytes
    if measured.host_available is not None:
        assert pools.swap_bytes == min(request.swap_bytes, measured.host_available)
    elif request.kv_cache_bytes is not None:
        assert pools.swap_bytes <= max(0, measured.limit - measured.used_without_cache - request.kv_cache_bytes)
    else:
        assert pools.swap_bytes <= pools.kv_cache_bytes, "swapping serves the device's blocks, and never starves them"


@given(given_sizes, measurements())
def test_a_pool_of_a_given_size_has_it_or_is_refused(request: CacheBudget, measured: MemoryProfile) -> None:
    pools = decided(request, measured)
    assert (pools is not None) == (request.kv_cache_bytes <= measured.limit - measured.used_loaded)
    if pools is not None:
        assert pools.kv_cache_bytes == request.kv_cache_bytes


@given(filling, measurements(), st.integers(0, 64 * GIB))
def test_more_memory_never_makes_a_smaller_pool(request: CacheBudget, measured: MemoryProfile, more: int) -> None:
    larger = replace(measured, limit=measured.limit + more, available=measured.available + more)
    less, greater = decided(request, measured), decided(request, larger)
    if less is not None:
        assert greater is not None
        assert greater.kv_cache_bytes + greater.swap_bytes >= less.kv_cache_bytes + less.swap_bytes


EXAMPLE = MemoryProfile(
    limit=4 * GIB,
    source="the container's limit",
    dedicated=True,
    used_before=300 * MIB,
    used_loaded=800 * MIB,
    available=20 * GIB,
    peak=1000 * MIB,
    growth_reserve=100 * MIB,
)


def test_a_container_is_filled_to_nine_tenths_by_default() -> None:
    pools = compute_cache_sizes(CacheBudget(None, 512 * MIB), EXAMPLE, SMALLEST)
    assert pools == CacheSizes(int(0.9 * 4 * GIB) - 1100 * MIB - 512 * MIB, 512 * MIB)


def test_memory_used_by_other_processes_is_not_taken() -> None:
    busy = replace(EXAMPLE, available=700 * MIB)
    assert compute_cache_sizes(CacheBudget(None, 0), busy, SMALLEST).kv_cache_bytes == (700 - 200 - 100) * MIB


def test_nothing_left_is_refused_with_all_the_numbers() -> None:
    with pytest.raises(ModelError) as caught:
        compute_cache_sizes(CacheBudget(None, 512 * MIB, 0.25), EXAMPLE, SMALLEST)
    for said in ("the container's limit is 4,096.0 MiB", "800.0 MiB", "200.0 MiB", "100.0 MiB", "-76.0 MiB"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "measured", "rule"),
    [
        (CacheBudget(None, 0), EXAMPLE, "90% of it may be taken"),
        (CacheBudget(None, 0, 0.5), EXAMPLE, "50% of it may be taken"),
        (CacheBudget(None, 0), replace(EXAMPLE, dedicated=False), "25% of what is left, at most 4,096.0 MiB"),
        (CacheBudget(1 << 30, 0), replace(EXAMPLE, peak=None), "the KV pool's size was given"),
    ],
)
def test_the_table_shows_the_measurements_and_the_resulting_pools(
    request_: CacheBudget, measured: MemoryProfile, rule: str
) -> None:
    rows = memory_table(request_, measured, KVCacheConfig(16, 1001, 501, MIB), 32768)
    lines = {row.split("  ")[0]: row for row in rows}
    assert rule in lines["limit"]
    assert "500.0 MiB" in lines["weights"]
    assert ("not measured" if measured.peak is None else "200.0 MiB") in lines["activations"]
    assert "1,001.0 MiB" in lines["KV pool"]
    assert "1001 blocks, 16000 tokens" in lines["KV pool"]
    assert "501 blocks, 8016 tokens" in lines["host pool"]
    assert "16000 tokens" in lines["longest request"]
