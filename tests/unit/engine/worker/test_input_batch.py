"""The batches of layers with a window begin where the window does, and what attention makes of them is the same, bit
for bit, wherever that is.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from quire_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.core.block_pool import NULL_BLOCK, KVCacheGroup
from quire_engine.worker.input_batch import WINDOW_ALIGNMENT

from tests.support.steps import KnownChunk, prepare

SIZE, WINDOW = 16, 100
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=SIZE, scale=0.25)
GROUPS = (KVCacheGroup(), KVCacheGroup(WINDOW))


def chunk(start: int, length: int, first_block: int) -> KnownChunk:
    """With tables as the manager leaves them: what the window has left is the null block."""
    count = -(-(start + length) // SIZE)
    blocks = list(range(first_block, first_block + count))
    left = KVCacheGroup(WINDOW).first_block(start, SIZE)
    others = [[NULL_BLOCK] * left + [100 + block for block in blocks[left:]]]
    return KnownChunk(start, [1] * length, start, blocks, other_block_ids=others)


def test_a_window_has_the_pages_that_it_reaches_and_few_before_them() -> None:
    chunks = [chunk(0, 40, 1), chunk(1500, 1, 1), chunk(1120, 80, 1)]
    batch = prepare(chunks, SIZE, GROUPS).model_input
    whole, window = batch.attention
    assert batch.positions.tolist() == [*range(40), 1500, *range(1120, 1200)]
    assert torch.equal(whole.positions, batch.positions)
    assert whole.context_lens.tolist() == [40, 1501, 1200]
    skipped = [0, 1024, 512]
    assert window.context_lens.tolist() == [40, 1501 - 1024, 1200 - 512]
    assert window.positions.tolist() == [*range(40), 1500 - 1024, *range(1120 - 512, 1200 - 512)]
    assert torch.equal(window.last_page_len, whole.last_page_len)
    bounds = window.page_indptr.tolist()
    for number, each in enumerate(chunks):
        assert (
            window.page_ids[bounds[number] : bounds[number + 1]].tolist()
            == each.other_block_ids[0][skipped[number] // SIZE :]
        )


@pytest.mark.parametrize("size", [16, 48, 1])
def test_contexts_begin_at_whole_blocks_and_whole_tiles(size: int) -> None:
    for start in range(0, 2000, 37):
        table = list(range(1, 2100))
        batch = prepare([KnownChunk(0, [1], start, table)], size, [KVCacheGroup(WINDOW)]).model_input
        (attention,) = batch.attention
        skipped = start + 1 - int(attention.context_lens)
        assert skipped % WINDOW_ALIGNMENT == skipped % size == 0
        assert skipped <= max(0, start + 1 - WINDOW)


@pytest.mark.parametrize("make", [ReferenceAttention, CpuAttention, partial(CpuAttention, use_kernel=False)])
@pytest.mark.parametrize(("start", "length"), [(1500, 1), (1100, 150), (620, 3)])
def test_what_is_skipped_changes_no_bit(
    make: Callable[[AttentionShape], AttentionBackend], start: int, length: int
) -> None:
    noise = torch.Generator().manual_seed(start)
    blocks = -(-(start + length) // SIZE)
    kv = torch.randn(200 + blocks, 2, 2, SIZE, SHAPE.head_dim, generator=noise)
    kv[NULL_BLOCK] = 7.0  # finite, as pads leave it
    heads = torch.randn(length, 8, SHAPE.head_dim, generator=noise)
    given = chunk(start, length, 1)
    _, window = prepare([given], SIZE, GROUPS).model_input.attention
    assert int(window.context_lens) < start + length
    (whole,) = prepare([KnownChunk(0, [1] * length, start, given.other_block_ids[0])], SIZE).model_input.attention

    def attend(batch: AttentionBatch) -> torch.Tensor:
        backend = make(SHAPE)
        backend.prepare(batch, batch)
        query, key, value = heads.split((4, 2, 2), dim=1)
        return backend.forward(query, key, value, kv.clone(), WINDOW, group=1)

    made, expected = attend(window), attend(whole)
    torch.testing.assert_close(made, expected)
    assert make is ReferenceAttention or torch.equal(made, expected), "its sums are of other lengths, theirs are not"
