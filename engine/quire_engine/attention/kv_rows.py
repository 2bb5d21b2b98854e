"""Rows of KV memory: the key or value of one token and one KV head, in the dtype of the KV cache.

In the model's own dtype and in fp8 (e4m3), a row is its ``head_dim`` numbers. In int8 it is ``head_dim`` integers,
followed by 4 bytes with their float32 scale. With a scale per token and head, an outlier in one token costs no other
token precision, and writing a row needs no other row. Scales are stored next to their integers, so a block is always
one contiguous copy.

Rows in fp8 have no scales: the keys and values of the served models are far within the range of ±448. Numbers beyond it
are clamped, as in vLLM without calibrated scales.

This is the reference form for attention kernels. The kernels in ``attention.cpp`` write the same bytes.
"""

import torch

SCALE_BYTES = 4
MAX_INT8 = 127
FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Returns how many elements of ``dtype`` a row of ``head_dim`` numbers takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def store_rows(kv: torch.Tensor, plane: int, pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes the keys (``plane`` 0) or values (1) of T tokens, ``rows`` [T, kv_heads, head_dim], to their ``slots`` [T]
    in their ``pages`` [T] of ``kv`` [blocks, 2, kv_heads, block_size, row_size].
    """
    # torch has no indexed assignment for fp8, so fp8 rows are assigned as bytes.
    _as_bytes(kv)[pages, plane, :, slots] = _as_bytes(encode_rows(rows, kv.dtype))


def load_pages(kv: torch.Tensor, pages: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the ``pages`` [P] of ``kv`` as numbers [P, 2, kv_heads, block_size, head_dim], in the dtype of ``kv``, or
    in float32 if that has 8 bits.
    """
    rows = _as_bytes(kv)[pages]
    return decode_rows(rows if rows.dtype == kv.dtype else rows.view(kv.dtype), head_dim)


def encode_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts numbers [..., head_dim] to rows [..., row_size] of ``dtype``. In int8, a row with infinity or NaN
    becomes a row of NaN.
    """
    if dtype == FP8:
        return rows.clamp(-MAX_FP8, MAX_FP8).to(FP8)
    if dtype != torch.int8:
        return rows.to(dtype)
    numbers = rows.float()
    scales = numbers.abs().amax(-1, keepdim=True) / MAX_INT8
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divisors = torch.where(scales > 0, scales, torch.inf)  # for rows of zeros and rows that are not finite
    integers = (numbers / divisors).round().clamp(-MAX_INT8, MAX_INT8).nan_to_num(0).to(torch.int8)
    return torch.cat((integers, scales.view(torch.int8)), -1)


def decode_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Converts rows [..., row_size] to numbers [..., head_dim], in the dtype of the rows, or in float32 if that has 8
    bits.
    """
    if rows.dtype == torch.int8:
        scales = rows[..., head_dim:].contiguous().view(torch.float32)
        return rows[..., :head_dim].float() * scales
    return rows.float() if rows.dtype == FP8 else rows


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
