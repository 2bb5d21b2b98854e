# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernel of ``invariant``: one tile of a product."""

import functools
from typing import Any


@functools.cache
def linear_kernel() -> Any:
    """The kernel, to be launched once for each tile of the result. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    # A kernel that is compiled anew for one row, or for a multiple of 16, could compute it differently.
    @triton.jit(do_not_specialize=["rows"])
    def linear(  # noqa: PLR0917 -- a launch gives them in order
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
        """``out = x @ weight.T + bias`` for one tile.

        The tiles of one group of columns follow each other, so that its weights are read from the cache by all but the
        first. Rows and columns beyond the edge repeat those before it, and are not stored.
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
            at = start + inner
            within = at < depth
            left = tl.load(x_rows + at[None, :], mask=within[None, :], other=0.0)
            right = tl.load(weight_columns + at[:, None], mask=within[:, None], other=0.0)
            total = tl.dot(left, right, total)
        if has_bias:
            total += tl.load(bias + column % columns).to(tl.float32)[None, :]
        places = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])

    return linear
