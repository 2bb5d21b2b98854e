"""Memory is divided so that states never lack room, and KV blocks have the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.state_memory import MAX_CHECKPOINT_TOKENS, MIN_CHECKPOINT_TOKENS, StateLayout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def layout(
    state_bytes: int, token_bytes: int, *, block_size: int = 16, longest: int = 1 << 16, seqs: int = 256
) -> StateLayout:
    kv_block = (block_size, block_size * token_bytes)
    return StateLayout.choose(state_bytes, kv_block, longest, max_num_seqs=seqs, max_num_batched_tokens=2048)


@pytest.mark.parametrize(
    ("state_bytes", "token_bytes", "expected"),
    [
        (149 * MIB, 64 * KIB, MAX_CHECKPOINT_TOKENS),  # 48 gated delta nets
        (120 * KIB, 12 * KIB, MIN_CHECKPOINT_TOKENS),  # 10 short convolutions
        (19 * MIB, 24 * KIB, 816),
    ],
)
def test_a_checkpoint_takes_about_the_memory_of_the_tokens_before_it(
    state_bytes: int, token_bytes: int, expected: int
) -> None:
    assert layout(state_bytes, token_bytes).block_size == expected


@given(st.sampled_from([1, 16, 24, 600, 4096]), st.integers(1, 1 << 17))
def test_checkpoints_are_at_ends_of_kv_blocks_and_even_short_sequences_have_some(block_size: int, longest: int) -> None:
    tokens = layout(MIB, KIB, block_size=block_size, longest=longest).block_size
    assert tokens % block_size == 0
    assert tokens <= max(block_size, longest // 4)


@given(
    state_bytes=st.integers(1, 100 * KIB),
    token_bytes=st.integers(1, 10 * KIB),
    more=st.integers(0, GIB),
    swap_bytes=st.integers(0, GIB),
    seqs=st.integers(1, 300),
)
def test_the_pools_take_what_there_is_and_have_room_for_all_that_run(
    state_bytes: int, token_bytes: int, more: int, swap_bytes: int, seqs: int
) -> None:
    chosen, min_kv_bytes = layout(state_bytes, token_bytes, seqs=seqs), 2 * 16 * token_bytes
    sizes = CacheSizes(chosen.min_bytes + min_kv_bytes + more, swap_bytes)
    states, left = chosen.divide(sizes, min_kv_bytes)
    rows = states.device_blocks + states.max_num_seqs
    assert rows * state_bytes + left.kv_cache_bytes == sizes.kv_cache_bytes
    assert states.host_blocks * state_bytes + left.swap_bytes == swap_bytes
    assert left.kv_cache_bytes >= min_kv_bytes
    assert left.swap_bytes >= 0
    assert 1 <= states.max_num_seqs <= seqs
    # Each has the state that its chunk begins with, and each of its tokens may be in another block.
    assert states.device_blocks - 1 >= 2 * states.max_num_seqs + -(-2048 // states.block_size)


def test_fewer_sequences_run_where_their_states_would_take_most_of_the_memory() -> None:
    large = layout(149 * MIB, 64 * KIB)
    states, left = large.divide(CacheSizes(40 * GIB, 4 * GIB), MIB)
    assert states.max_num_seqs == 45
    assert 12 * GIB < left.kv_cache_bytes < 20 * GIB
    assert states.host_blocks == 14
    states, left = layout(120 * KIB, 12 * KIB).divide(CacheSizes(2 * GIB, GIB), MIB)
    assert states.max_num_seqs == 256
    assert left.kv_cache_bytes > 1.8 * GIB
