"""One pass over rows of logits finds what torch finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.kernels.bindings import library
from quire_engine.sampling.sample_ops import scan_rows

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")
VALUES = [0.0, -0.0, 1.0, -1.0, 3.5, -3.5, 1e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


@settings(deadline=None, max_examples=75)
@given(
    width=st.integers(1, 70),
    count=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
    values=st.lists(st.sampled_from(VALUES), min_size=1, max_size=6),
    gap=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_of_equal_and_odd_numbers(
    width: int, count: int, seed: int, values: list[float], gap: int, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (count, width + gap), generator=source)
    rows = torch.tensor(values)[picks].to(dtype)[:, :width]
    finite, places = torch.empty(count, dtype=torch.bool), torch.empty(count, dtype=torch.int64)
    assert scan_rows(rows, finite=finite)
    assert scan_rows(rows, places=places)
    assert torch.equal(finite, rows.isfinite().all(1))
    for row, place in zip(rows, places.tolist(), strict=True):
        if not row.isnan().any():
            assert place == row.eq(row.max()).nonzero()[0]  # the lowest of equal ones
        else:
            assert 0 <= place < width


@settings(deadline=None, max_examples=30)
@given(width=st.integers(1, 5000), seed=st.integers(0, 1 << 20), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_long_rows(width: int, seed: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    places = torch.empty(3, dtype=torch.int64)
    assert scan_rows(rows, places=places)
    assert places.tolist() == [int(row.eq(row.max()).nonzero()[0]) for row in rows]


def test_rows_without_a_kernel_are_left_to_torch() -> None:
    for rows in (torch.zeros(2, 3, dtype=torch.float16), torch.zeros(0, 3), torch.zeros(4, 6)[:, ::2]):
        assert not scan_rows(rows, finite=torch.empty(len(rows), dtype=torch.bool))
        assert not scan_rows(rows, places=torch.empty(len(rows), dtype=torch.int64))
