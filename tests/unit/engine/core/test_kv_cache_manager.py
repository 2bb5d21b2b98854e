"""Pools and tables: which sequence gets which block, and what is copied when a sequence is swapped."""

import pytest
from quire_engine.core.absence import SwapCost
from quire_engine.core.block_pool import BlockPool, BlockRemoved, BlockStored, KVCacheConfig, Tier
from quire_engine.core.block_table import BlockTable, CachedBlocks, GroupTable
from quire_engine.core.kv_cache_manager import KVCacheManager

SIZE = 4


def memory(device: int = 20, host: int = 20, **settings: bool) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(SIZE, device, host), **settings)


def filled(kv: KVCacheManager, tokens: list[int]) -> BlockTable:
    """A table whose tokens are all computed."""
    table = BlockTable(b"")
    cached = kv.attach_cached_blocks(table, kv.get_cached_blocks(table, tokens))
    kv.allocate_slots(table, cached, len(tokens))
    kv.cache_full_blocks(table, tokens, len(tokens))
    return table


def only(table: BlockTable) -> GroupTable:
    """The table of its one group."""
    (group,) = table.groups
    return group


def on_device(hits: list[CachedBlocks]) -> list[int]:
    assert all(hit.tier is Tier.DEVICE for (hit,) in hits)
    return [hit.block_id for (hit,) in hits]


def test_the_null_block_is_never_allocated() -> None:
    kv = memory(device=4)
    table = filled(kv, list(range(12)))
    assert sorted(only(table).block_ids) == [1, 2, 3]
    assert kv.device_pool.num_free == 0


def test_states_say_of_each_block_whether_it_is_free_findable_used_or_shared() -> None:
    pool = BlockPool(6, Tier.DEVICE, reserved=1)
    blocks = [pool.allocate() for _ in range(4)]
    pool.cache_block(blocks[0], b"a" * 16)
    pool.cache_block(blocks[1], b"b" * 16)
    pool.incref(blocks[1])
    pool.decref(blocks[0])
    pool.decref(blocks[3])
    assert pool.block_states() == bytes([1, 3, 2, 0, 0])


def test_blocks_without_a_hash_are_reused_before_hashed_ones() -> None:
    pool = BlockPool(4, Tier.DEVICE)
    blocks = [pool.allocate() for _ in range(4)]
    pool.cache_block(blocks[0], b"a" * 16)
    pool.cache_block(blocks[2], b"c" * 16)
    for block in blocks:
        pool.decref(block)
    assert [pool.allocate() for _ in range(4)] == [blocks[3], blocks[1], blocks[0], blocks[2]]


def test_a_prefix_is_evicted_after_the_blocks_that_follow_it() -> None:
    kv = memory(device=5, host=0)
    tokens = list(range(16))
    kv.free(filled(kv, tokens))
    filled(kv, [100 + token for token in range(8)])
    assert len(kv.get_cached_blocks(BlockTable(b""), [*tokens, 99])) == 2, (
        "the first two blocks should be left, the last two reused"
    )


def test_a_freed_block_is_revived_with_its_contents() -> None:
    kv = memory()
    tokens = list(range(9))
    first = filled(kv, tokens)
    blocks = only(first).block_ids[:2]
    kv.free(first)
    second = BlockTable(b"")
    hits = kv.get_cached_blocks(second, tokens)
    assert on_device(hits) == blocks
    assert kv.attach_cached_blocks(second, hits) == 8
    kv.check_integrity()


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    kv = memory()
    tokens = list(range(8))
    filled(kv, tokens)
    assert len(kv.get_cached_blocks(BlockTable(b""), tokens)) == 1


def test_requests_with_different_salts_share_no_blocks() -> None:
    kv = memory()
    filled(kv, list(range(9)))
    assert kv.get_cached_blocks(BlockTable(b"other"), list(range(9))) == []


def test_blocks_swapped_out_and_in_are_copied_once_each_way() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    assert kv.swap_out(table, 10) == 3
    out = kv.take_pending_copies().blocks_to_swap_out
    assert not only(table).block_ids
    evicting = filled(kv, [50 + token for token in range(19 * SIZE)])
    kv.free(evicting)
    assert kv.swap_in(table) == 3
    back = kv.take_pending_copies().blocks_to_swap_in
    assert [copy.source for copy in back] == [copy.target for copy in out]
    assert not only(table).host_block_ids
    kv.check_integrity()


def test_what_was_swapped_ahead_is_not_copied_when_the_table_is_swapped_out() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    assert [kv.swap_ahead(table, 1), kv.swap_ahead(table, 5), kv.swap_ahead(table, 5)] == [1, 1, 0]
    ahead = kv.take_pending_copies().blocks_to_swap_ahead
    assert [copy.source for copy in ahead] == only(table).block_ids[:2]
    assert kv.host_pool.num_free == kv.host_pool.num_blocks, "a copy is held"
    assert kv.swap_out(table, 10) == 1
    assert only(table).host_block_ids[:2] == [copy.target for copy in ahead]
    assert kv.host.num_used_ahead == 2
    kv.swap_in(table)
    kv.take_pending_copies()
    assert [kv.swap_ahead(table, 5), kv.swap_out(table, 10), kv.host.num_used_ahead] == [0, 1, 2], "counted twice"
    kv.free(table)
    kv.check_integrity()


def test_a_block_swapped_ahead_that_the_host_gave_up_is_copied_again() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    assert kv.swap_ahead(table, 5) == 2
    kv.take_pending_copies()
    for _ in range(kv.host_pool.num_blocks):
        kv.host_pool.allocate()
    for block_id in range(kv.host_pool.num_blocks):
        kv.host_pool.decref(block_id)
    assert kv.swap_out(table, 10) == 3
    kv.swap_in(table)
    kv.take_pending_copies()
    assert kv.swap_out(table, 10) == 1
    assert kv.host.num_used_ahead == 0, "what an earlier swap had left on the host counts"


def test_blocks_that_are_still_cached_are_not_copied_again() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    out = kv.swap_out(table, 10)
    back = kv.swap_in(table)
    assert back == 1, "the device still cached both full blocks"
    again = kv.swap_out(table, 10)
    assert again == 1, "the host still cached both full blocks"
    assert out == 3


@pytest.mark.parametrize("evicted", [0, 9, 19])
@pytest.mark.parametrize("num_tokens", [10, 12, 13, 20])
def test_the_blocks_that_a_swap_in_needs_are_counted_beforehand(evicted: int, num_tokens: int) -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    sharing = filled(kv, list(range(5))) if evicted == 9 else None
    kv.swap_out(table, 10)
    kv.free(filled(kv, [50 + token for token in range(evicted * SIZE)]))
    before, missing = kv.device_pool.num_free, kv.num_blocks_needed_to_swap_in(table, num_tokens)
    kv.swap_in(table)
    kv.allocate_slots(table, 10, num_tokens)
    assert before - kv.device_pool.num_free == missing
    assert sharing is None or missing == kv.num_blocks_for(num_tokens) - 1


def test_blocks_that_were_swapped_in_can_be_hit_again() -> None:
    kv = memory(host_caching=False)
    table = filled(kv, list(range(10)))
    kv.swap_out(table, 10)
    kv.free(filled(kv, [50 + token for token in range(19 * SIZE)]))
    assert kv.get_cached_blocks(BlockTable(b""), list(range(10))) == []
    kv.swap_in(table)
    assert on_device(kv.get_cached_blocks(BlockTable(b""), list(range(10)))) == only(table).block_ids[:2]


def test_two_sequences_swap_a_shared_prefix_once() -> None:
    kv = memory()
    one, two = filled(kv, [*range(8), 20]), filled(kv, [*range(8), 30])
    assert only(one).block_ids[:2] == only(two).block_ids[:2]
    assert kv.swap_out(one, 9) == 3
    assert kv.swap_out(two, 9) == 1
    kv.free(one)
    kv.free(two)
    kv.check_integrity()
    assert kv.host_pool.num_free == kv.host_pool.num_blocks


def test_events_match_exactly_the_blocks_that_can_be_hit() -> None:
    kv = memory(device=4, host=0)
    kv.free(filled(kv, list(range(12))))
    assert kv.take_events() == kv.stored_blocks()
    stored = [event.block_hash for event in kv.stored_blocks()]
    filled(kv, [70, 71, 72, 73])
    changes = kv.take_events()
    assert changes[0] == BlockRemoved(stored[2], Tier.DEVICE), "the tail goes first"
    assert isinstance(changes[1], BlockStored)


def filler(start: int = 50, blocks: int = 4) -> list[int]:
    """A prompt of so many blocks that nothing else begins with."""
    return [start + token for token in range(blocks * SIZE)]


def test_a_block_used_once_is_evicted_without_a_copy() -> None:
    kv = memory(device=5)
    for start in range(0, 1000, 20):
        kv.free(filled(kv, filler(start)))
    assert kv.take_pending_copies().blocks_to_swap_out == []
    assert kv.host_pool.stored_blocks() == []


def test_a_block_recomputed_after_its_eviction_is_kept_the_second_time() -> None:
    kv = memory(device=5)
    for _ in range(2):
        kv.free(filled(kv, list(range(13))))
        kv.take_pending_copies()
        kv.free(filled(kv, filler()))
    assert len(kv.take_pending_copies().blocks_to_swap_out) == 3
    hits = kv.get_cached_blocks(BlockTable(b""), list(range(13)))
    assert [hit.tier for (hit,) in hits] == [Tier.HOST] * 3


def test_the_hashes_of_evicted_blocks_are_bounded() -> None:
    kv = memory(device=5, host=3)
    for start in range(0, 4000, 20):
        kv.free(filled(kv, filler(start)))
    assert len(kv.host._evicted_after_one_use) <= 8


def test_a_reused_block_does_not_inherit_its_former_use_count() -> None:
    kv = memory(device=5)
    for _ in range(2):
        kv.free(filled(kv, list(range(13))))
    kv.free(filled(kv, filler()))
    assert len(kv.take_pending_copies().blocks_to_swap_out) == 3, "what was used twice"
    kv.free(filled(kv, filler(100)))
    assert kv.take_pending_copies().blocks_to_swap_out == []


def test_a_block_evicted_from_the_device_after_a_second_use_is_copied_back_from_the_host() -> None:
    kv = memory(device=5)
    tokens = list(range(13))
    for _ in range(2):
        kv.free(filled(kv, tokens))
    kv.take_events()
    evicting = filled(kv, [50 + token for token in range(4 * SIZE)])
    out = kv.take_pending_copies().blocks_to_swap_out
    assert len(out) == 3
    assert [event.tier for event in kv.take_events() if isinstance(event, BlockStored)].count(Tier.HOST) == 3
    kv.free(evicting)
    table = BlockTable(b"")
    hits = kv.get_cached_blocks(table, tokens)
    assert [hit.tier for (hit,) in hits] == [Tier.HOST] * 3
    assert kv.attach_cached_blocks(table, hits) == 12
    copies = kv.take_pending_copies()
    assert {copy.source for copy in copies.blocks_to_swap_in} == {copy.target for copy in out}
    assert [copy.target for copy in copies.blocks_to_swap_in] == only(table).block_ids
    assert on_device(kv.get_cached_blocks(BlockTable(b""), tokens)) == only(table).block_ids
    kv.free(table)
    kv.check_integrity()


def test_a_host_block_that_is_to_be_read_is_not_written_in_the_same_plan() -> None:
    kv = memory(device=5, host=3)
    tokens = list(range(13))
    for _ in range(2):
        kv.free(filled(kv, tokens))
    kv.free(filled(kv, [50 + token for token in range(4 * SIZE)]))
    kv.take_pending_copies()
    table = BlockTable(b"")
    hits = kv.get_cached_blocks(table, tokens)
    assert {hit.tier for (hit,) in hits} == {Tier.HOST}
    kv.attach_cached_blocks(table, hits)
    copies = kv.take_pending_copies()
    assert not {copy.target for copy in copies.blocks_to_swap_out} & {copy.source for copy in copies.blocks_to_swap_in}


def test_events_of_both_tiers_match_the_blocks_that_can_be_hit() -> None:
    kv = memory(device=5, host=3)
    known: set[BlockStored] = set()
    for start in range(0, 400, 16):
        for _ in range(2):
            kv.free(filled(kv, [start + token for token in range(16)]))
        for event in kv.take_events():
            (known.add if isinstance(event, BlockStored) else known.discard)(BlockStored(event.block_hash, event.tier))
        assert known == set(kv.stored_blocks())
    assert {event.tier for event in known} == {Tier.DEVICE, Tier.HOST}


def test_forked_sequences_share_all_but_the_block_that_one_of_them_writes() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    forks = [kv.fork(table) for _ in range(3)]
    assert kv.device_pool.num_blocks - kv.device_pool.num_free == 3
    for fork in (table, *forks[:2]):
        assert kv.num_blocks_needed(fork, 10, 11) == 1
        kv.allocate_slots(fork, 10, 11)
    assert kv.num_blocks_needed(forks[2], 10, 11) == 0, "the last one has the block for itself"
    kv.allocate_slots(forks[2], 10, 11)
    copies = kv.take_pending_copies().blocks_to_copy
    assert [copy.source for copy in copies] == [only(forks[2]).block_ids[2]] * 3
    assert len({only(fork).block_ids[2] for fork in (table, *forks)}) == 4
    assert all(only(fork).block_ids[:2] == only(table).block_ids[:2] for fork in forks)
    for fork in (table, *forks):
        kv.free(fork)
    kv.check_integrity()
    assert kv.device_pool.num_free == kv.device_pool.num_blocks


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    kv = memory()
    table = filled(kv, list(range(8)))
    fork = kv.fork(table)
    kv.allocate_slots(fork, 8, 9)
    kv.allocate_slots(table, 8, 9)
    assert kv.take_pending_copies().blocks_to_copy == []


def test_blocks_that_others_reference_cost_nothing_to_recompute() -> None:
    kv = KVCacheManager(KVCacheConfig(SIZE, 20, 20, block_bytes=100))
    one, two = filled(kv, [*range(8), 20]), filled(kv, [*range(8), 30])
    assert kv.swap_cost(one, 9) == SwapCost(bytes_to_move=600, uncached_tokens=1)
    kv.free(two)
    assert kv.swap_cost(one, 9) == SwapCost(bytes_to_move=600, uncached_tokens=9)
    kv.swap_out(one, 9)
    kv.swap_in(one)
    kv.take_pending_copies()
    assert kv.swap_cost(one, 9) == SwapCost(bytes_to_move=200, uncached_tokens=1), "what the host has moves either way"
    kv.tiers.tiers = ()
    assert kv.swap_cost(one, 9) == SwapCost(bytes_to_move=400, uncached_tokens=9)


def test_without_prefix_caching_nothing_is_hashed_or_hit() -> None:
    kv = memory(prefix_caching=False)
    kv.free(filled(kv, list(range(12))))
    assert kv.get_cached_blocks(BlockTable(b""), list(range(12))) == []
    assert kv.take_events() == []
