"""Rows of KV memory in eight bits: how far they are from the numbers, and what the kernel writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_rows import FP8, MAX_FP8, decode_rows, encode_rows, load_pages, row_size, store_rows
from quire_engine.kernels import bindings

from tests.unit.engine.attention.test_cpu_attention import Sequence, place, shape_of

HEAD_DIM = 24
NUMBERS = st.floats(width=32, allow_subnormal=True)
ROWS = st.lists(NUMBERS, min_size=HEAD_DIM, max_size=HEAD_DIM).map(torch.tensor)
FINITE = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)


@given(row=st.lists(FINITE, min_size=HEAD_DIM, max_size=HEAD_DIM).map(torch.tensor))
def test_a_number_in_int8_is_at_most_half_a_step_off(row):
    row[row.abs() < 1e-30] = 0
    step = row.abs().max() / 127
    off = (decode_rows(encode_rows(row, torch.int8), HEAD_DIM) - row).abs()
    assert (off <= 0.5001 * step).all()


@given(row=ROWS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=75, deadline=None)
@pytest.mark.skipif(bindings.library() is None, reason="the kernels cannot be compiled here")
def test_the_kernel_writes_the_same_bytes(row, dtype):
    """Zeros, subnormal numbers, infinity and NaN among them; only the bits of a NaN may differ."""
    shape = shape_of(group=1, kv_heads=1, head_dim=HEAD_DIM, block_size=1)
    rows = row.to(dtype).view(1, 1, HEAD_DIM)
    case = place(shape, [Sequence(rows, rows, -rows)], seed=1, int8=True)
    case.run(CpuAttention(shape, use_kernel=True))
    page = int(case.batch.page_ids[0])
    for plane, expected in enumerate((rows, -rows)):
        made, wanted = case.kv[page, 1, plane, 0, 0], encode_rows(expected[0, 0], torch.int8)
        assert torch.equal(made[:HEAD_DIM], wanted[:HEAD_DIM])
        scales = [each[HEAD_DIM:].contiguous().view(torch.float32) for each in (made, wanted)]
        assert torch.equal(*scales) or (scales[0].isnan() & scales[1].isnan()).all()


def test_a_row_without_numbers_stays_without_numbers():
    for odd in (torch.nan, torch.inf, -torch.inf):
        row = torch.ones(HEAD_DIM)
        row[3] = odd
        assert decode_rows(encode_rows(row, torch.int8), HEAD_DIM).isnan().all()


def test_fp8_rows_are_cut_to_their_range_and_exact_inside_of_it():
    row = torch.tensor([0.0, 1.0, -1.5, 448.0, 449.0, -1e9, 0.001953125, 240.0])
    made = decode_rows(encode_rows(row, FP8), 8)
    assert made.tolist() == [0.0, 1.0, -1.5, 448.0, MAX_FP8, -MAX_FP8, 0.001953125, 240.0]
    assert decode_rows(encode_rows(torch.tensor([torch.nan]), FP8), 1).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
def test_rows_are_read_from_where_they_were_stored(dtype):
    kv = torch.zeros(5, 2, 2, 4, row_size(HEAD_DIM, dtype), dtype=torch.uint8 if dtype == FP8 else dtype)
    kv = kv.view(dtype)
    pages, slots = torch.tensor([4, 1, 4]), torch.tensor([0, 3, 2])
    rows = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    store_rows(kv, 1, pages, slots, rows)
    read = load_pages(kv, torch.tensor([4, 1]), HEAD_DIM)
    expected = decode_rows(encode_rows(rows, dtype), HEAD_DIM)
    assert torch.equal(torch.stack((read[0, 1, :, 0], read[1, 1, :, 3], read[0, 1, :, 2])), expected)
    assert int((read != 0).any(-1).sum()) == 6
