"""Weights in MXFP4 are the numbers that the format says, in every dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.quantization.mxfp4 import dequantize_mxfp4

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_a_sign_two_bits_of_an_exponent_and_one_of_a_fraction(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | 5 << 4).view(1, 16)
    numbers = dequantize_mxfp4(blocks, torch.tensor([130], dtype=torch.uint8), dtype)
    assert numbers.dtype == dtype
    for code, number in zip(range(16), numbers[::2].tolist(), strict=True):
        exponent, fraction = code >> 1 & 3, code & 1
        size = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        assert number == 8 * (-size if code & 8 else size)
    assert numbers[1::2].tolist() == [24.0] * 16


@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 4), st.sampled_from(DTYPES))
def test_numbers_are_those_of_transformers(seed: int, rows: int, groups: int, dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    noise = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (1, rows, groups, 16), generator=noise, dtype=torch.uint8)
    scales = torch.randint(100, 150, (1, rows, groups), generator=noise, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), theirs)
