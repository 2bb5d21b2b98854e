"""``batch_invariant_linear``: a matrix product for CUDA whose order of summation does not depend on the number of rows
(batch invariance, He and Thinking Machines Lab 2025). It uses Triton, which comes with torch for CUDA.

A library chooses tiles, and whether to split the sum over K, by the shape of the whole product. Here the tiles are
always the same. One program computes one tile and adds the products in the order of K in float32, so the result of a
row depends only on that row. The price is the speed of the library's choice.
"""

import functools
from typing import Any

import torch

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


@functools.cache
def linear_kernel() -> Any:
    """Returns the Triton kernel, with one program per tile of the result. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    # A kernel specialized for one row, or for a multiple of 16, could sum in another order.
    @triton.jit(do_not_specialize=["rows"])
    def linear(  # noqa: PLR0917 -- a launch passes them by position
        x,  # [rows, depth]
        weight,  # [columns, depth]
        bias,
        out,  # [rows, columns]
        rows,
        columns,
        depth,
        x_stride,
        has_bias: tl.constexpr,
        row_tile: tl.constexpr,
        column_tile: tl.constexpr,
        depth_tile: tl.constexpr,
    ):
        """Computes one tile of ``out = x @ weight.T + bias``.

        The tiles of one group of columns are adjacent, so that all but the first read its weights from the cache. Rows
        and columns beyond the edge repeat earlier ones and are not stored.
        """
        row_tiles = tl.cdiv(rows, row_tile)
        tile = tl.program_id(0)
        row = (tile % row_tiles) * row_tile + tl.arange(0, row_tile)
        column = (tile // row_tiles) * column_tile + tl.arange(0, column_tile)
        inner = tl.arange(0, depth_tile)
        x_rows = x + (row % rows).to(tl.int64)[:, None] * x_stride
        weight_columns = weight + (column % columns).to(tl.int64)[None, :] * depth
        total = tl.zeros((row_tile, column_tile), dtype=tl.float32)
        for start in range(0, depth, depth_tile):
            offset = start + inner
            within = offset < depth
            left = tl.load(x_rows + offset[None, :], mask=within[None, :], other=0.0)
            right = tl.load(weight_columns + offset[:, None], mask=within[:, None], other=0.0)
            total = tl.dot(left, right, total)
        if has_bias:
            total += tl.load(bias + column % columns).to(tl.float32)[None, :]
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])

    return linear


ROWS, COLUMNS, DEPTH = 64, 64, 64
"""The size of a tile of the result, and the part of K that is multiplied at a time."""

_WARPS, _STAGES = 4, 4


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns ``x @ weight.T + bias`` [M, N], summed in float32 and rounded once. Raises ``ValueError`` if the shapes
    or dtypes do not match.

    ``x`` [M, K] has contiguous rows. ``weight`` [N, K] and ``bias`` [N] or None are contiguous. All have the same
    dtype, bf16 or fp16.
    """
    (rows, depth), (columns, inner) = x.shape, weight.shape
    if depth != inner or x.dtype != weight.dtype or (bias is not None and bias.shape != (columns,)):
        raise ValueError(f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)} make no product")
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tiles = -(-rows // ROWS) * -(-columns // COLUMNS)
    linear_kernel()[(tiles,)](
        *(x, weight, bias, out, rows, columns, depth, x.stride(0)),
        has_bias=bias is not None,
        row_tile=ROWS,
        column_tile=COLUMNS,
        depth_tile=DEPTH,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
