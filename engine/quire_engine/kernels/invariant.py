"""A product for CUDA whose order of summation never depends on the number of rows (batch invariance, He and Thinking
Machines Lab 2025). In Triton, which comes with torch for CUDA.

A library chooses tiles, and whether to split the sum over K, by the shape of the whole product. Here the tiles are
always the same, one program makes one tile, and it adds the products in the order of K in float32: what a row comes to
depends on neither the other rows nor its place among them. The price is what the library's choice gains.
"""

import torch

from quire_engine.kernels.triton_linear import linear_kernel

ROWS, COLUMNS, DEPTH = 64, 64, 64
"""A tile of the result, and how much of K is multiplied at once."""

_WARPS, _STAGES = 4, 4


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once.

    ``x`` [M, K] with adjacent numbers in a row, ``weight`` [N, K] and ``bias`` [N] or None, contiguous and of the same
    dtype, bf16 or fp16 -> [M, N].

    Raises:
        ValueError: the shapes or dtypes do not fit.
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
