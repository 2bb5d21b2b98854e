"""Pools and tables: who gets which block, and what is copied when a sequence is swapped."""

import pytest
from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.events import Removed, Stored, Tier
from quire_engine.kv.memory import KvMemory
from quire_engine.kv.pool import BlockPool
from quire_engine.kv.table import BlockTable

SIZE = 4


def memory(device: int = 20, host: int = 20, **settings: bool) -> KvMemory:
    return KvMemory(KvCapacity(SIZE, device, host), **settings)


def filled(kv: KvMemory, tokens: list[int]) -> BlockTable:
    """A table whose tokens are all computed."""
    table = BlockTable(b"")
    kv.admit(table, kv.match(table, tokens))
    kv.grow(table, len(tokens))
    kv.name_full_blocks(table, tokens, len(tokens))
    return table


def test_the_null_page_is_never_handed_out() -> None:
    kv = memory(device=4)
    table = filled(kv, list(range(12)))
    assert sorted(table.block_ids) == [1, 2, 3]
    assert kv.device.num_free == 0


def test_blocks_without_a_name_are_reused_before_named_ones() -> None:
    pool = BlockPool(4, Tier.DEVICE)
    blocks = [pool.allocate() for _ in range(4)]
    pool.name(blocks[0], b"a" * 16)
    pool.name(blocks[2], b"c" * 16)
    for block in blocks:
        pool.release(block)
    assert [pool.allocate() for _ in range(4)] == [blocks[3], blocks[1], blocks[0], blocks[2]]


def test_a_prefix_outlives_what_follows_it() -> None:
    kv = memory(device=5)
    tokens = list(range(16))
    kv.release(filled(kv, tokens))
    filled(kv, [100 + token for token in range(8)])
    assert len(kv.match(BlockTable(b""), [*tokens, 99])) == 2, (
        "the first two blocks should be left, the last two reused"
    )


def test_a_freed_block_is_revived_with_its_contents() -> None:
    kv = memory()
    tokens = list(range(9))
    first = filled(kv, tokens)
    blocks = first.block_ids[:2]
    kv.release(first)
    second = BlockTable(b"")
    assert kv.match(second, tokens) == blocks
    assert kv.admit(second, blocks) == 8
    kv.check()


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    kv = memory()
    tokens = list(range(8))
    filled(kv, tokens)
    assert len(kv.match(BlockTable(b""), tokens)) == 1


def test_requests_with_another_salt_share_nothing() -> None:
    kv = memory()
    filled(kv, list(range(9)))
    assert kv.match(BlockTable(b"other"), list(range(9))) == []


def test_what_is_swapped_out_and_in_again_is_copied_once_each_way() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    out = kv.swap_out(table, 10)
    assert len(out) == 3
    assert not table.block_ids
    evicting = filled(kv, [50 + token for token in range(19 * SIZE)])
    kv.release(evicting)
    back = kv.swap_in(table)
    assert [copy.source for copy in back] == [copy.target for copy in out]
    assert not table.host_block_ids
    kv.check()


def test_blocks_that_are_still_there_are_not_copied_again() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    out = kv.swap_out(table, 10)
    back = kv.swap_in(table)
    assert len(back) == 1, "the device still held both full blocks under their names"
    again = kv.swap_out(table, 10)
    assert len(again) == 1, "the host still held both full blocks under their names"
    assert len(out) == 3


@pytest.mark.parametrize("evicted", [0, 9, 19])
@pytest.mark.parametrize("num_tokens", [10, 12, 13, 20])
def test_what_a_swap_in_will_take_is_known_before(evicted: int, num_tokens: int) -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    sharing = filled(kv, list(range(5))) if evicted == 9 else None
    kv.swap_out(table, 10)
    kv.release(filled(kv, [50 + token for token in range(evicted * SIZE)]))
    before, missing = kv.device.num_free, kv.missing_on_device(table, num_tokens)
    kv.swap_in(table)
    kv.grow(table, num_tokens)
    assert before - kv.device.num_free == missing
    assert sharing is None or missing == kv.blocks_for(num_tokens) - 1


def test_blocks_that_came_back_can_be_hit_again() -> None:
    kv = memory()
    table = filled(kv, list(range(10)))
    kv.swap_out(table, 10)
    kv.release(filled(kv, [50 + token for token in range(19 * SIZE)]))
    assert kv.match(BlockTable(b""), list(range(10))) == []
    kv.swap_in(table)
    assert kv.match(BlockTable(b""), list(range(10))) == table.block_ids[:2]


def test_two_sequences_swap_a_shared_prefix_once() -> None:
    kv = memory()
    one, two = filled(kv, [*range(8), 20]), filled(kv, [*range(8), 30])
    assert one.block_ids[:2] == two.block_ids[:2]
    assert len(kv.swap_out(one, 9)) == 3
    assert len(kv.swap_out(two, 9)) == 1
    kv.release(one)
    kv.release(two)
    kv.check()
    assert kv.host.num_free == kv.host.num_blocks


def test_events_tell_exactly_what_can_be_hit() -> None:
    kv = memory(device=4)
    kv.release(filled(kv, list(range(12))))
    stored = [event.block_hash for event in kv.drain_events() if isinstance(event, Stored)]
    assert stored == kv.device.names()
    filled(kv, [70, 71, 72, 73])
    changes = kv.drain_events()
    assert changes[0] == Removed(stored[2], Tier.DEVICE), "the tail goes first"
    assert isinstance(changes[1], Stored)


def test_without_prefix_caching_nothing_is_named_or_found() -> None:
    kv = memory(prefix_caching=False)
    kv.release(filled(kv, list(range(12))))
    assert kv.match(BlockTable(b""), list(range(12))) == []
    assert kv.drain_events() == []
