"""A mixture of experts on CUDA as grouped products, in Triton, which comes with torch for CUDA: the way of vLLM's
``fused_moe``.

Pairs of a token and one of its experts are sorted by expert, and filled up so that a tile of rows has one expert: the
programs of one launch compute the tiles of all experts. How many tiles there are is known to the device alone; there
are programs for as many as can be, and those without a tile end at once. So the host waits for nothing, and a CUDA
graph can capture it all.

Tiles are always the same, and a program adds the products in the order of K in float32: what a token gets depends on
neither the other tokens nor its position.
"""

import functools
from typing import Any, NamedTuple

import torch

from quire_engine.kernels.ops import silu_mul

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

ROWS, COLUMNS, DEPTH = 16, 64, 64
"""The size of a tile of the result, and how much of K is multiplied at once. Few rows, as a step that decodes has few
tokens for each expert.
"""
_LARGE_ROWS = 64
"""Rows of a tile where there are that many tokens for each expert, unless results must not depend on their number."""
_WARPS, _STAGES = 4, 4


@functools.cache
def grouped_linear_kernel() -> Any:
    """The Triton kernel, one program for each tile of the result. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["pairs", "experts"])
    def grouped_linear(  # noqa: PLR0917 -- a launch passes them by position
        x,  # [pairs / share, depth]
        weight,  # [experts, columns, depth]
        out,  # [pairs, columns]
        sorted_pairs,  # [tiles * row_tile]
        tile_experts,  # [tiles]
        pairs,
        experts,
        columns,
        depth,
        x_stride,
        share: tl.constexpr,
        row_tile: tl.constexpr,
        column_tile: tl.constexpr,
        depth_tile: tl.constexpr,
        precision: tl.constexpr,
    ):
        """``out[p] = x[p // share] @ weight[expert].T`` for the pairs p of one tile, all of which have one expert."""
        tile = tl.program_id(0)
        expert = tl.load(tile_experts + tile)
        if expert < experts:
            pair = tl.load(sorted_pairs + tile * row_tile + tl.arange(0, row_tile))
            is_pair = pair < pairs
            column = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
            inner = tl.arange(0, depth_tile)
            x_rows = x + tl.where(is_pair, pair // share, 0)[:, None] * x_stride
            weight_columns = weight + expert * columns * depth + (column % columns).to(tl.int64)[None, :] * depth
            total = tl.zeros((row_tile, column_tile), dtype=tl.float32)
            for start in range(0, depth, depth_tile):
                offset = start + inner
                within = offset < depth
                left = tl.load(x_rows + offset[None, :], mask=within[None, :], other=0.0)
                right = tl.load(weight_columns + offset[:, None], mask=within[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision=precision)
            target = out + tl.where(is_pair, pair, 0)[:, None] * columns + column[None, :]
            tl.store(target, total.to(out.dtype.element_ty), mask=is_pair[:, None] & (column < columns)[None, :])

    return grouped_linear


@functools.cache
def combine_kernel() -> Any:
    """The Triton kernel, one program for some columns of one token. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["first", "experts"])
    def combine(  # noqa: PLR0917 -- a launch passes them by position
        outputs,  # [tokens * top, columns]
        weights,  # [tokens, top]
        chosen,  # [tokens, top]
        out,  # [tokens, columns]
        first,
        experts,
        columns,
        top: tl.constexpr,
        rounds: tl.constexpr,
        block: tl.constexpr,
    ):
        """``out[t]``: the sum over a token's experts of weight times output, in their order, of those held here."""
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        within = column < columns
        total = tl.zeros((block,), dtype=tl.float32)
        for place in range(top):
            pair = token * top + place
            expert = tl.load(chosen + pair) - first
            held = within & (expert >= 0) & (expert < experts)
            part = tl.load(outputs + pair * columns + column, mask=held, other=0.0).to(tl.float32)
            part *= tl.load(weights + pair)
            if rounds:
                part = part.to(out.dtype.element_ty).to(tl.float32)
            total += tl.where(held, part, 0.0)
        tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=within)

    return combine


class ExpertTiles(NamedTuple):
    """Which pairs a tile of rows has: ``pairs`` [tiles * rows] int64, the number of pairs where there is none, and
    ``experts`` [tiles] int64, counted from the first that is held, the number of them for a tile that is not needed.
    """

    pairs: torch.Tensor
    experts: torch.Tensor


def sort_by_expert(chosen: torch.Tensor, first: int, experts: int, rows: int) -> ExpertTiles:
    """Tiles of ``rows`` for ``chosen`` [T, top] of the ``experts`` from ``first`` on. Nothing waits for the device."""
    expert = chosen.flatten() - first
    expert = torch.where((expert >= 0) & (expert < experts), expert, experts)
    num_pairs = expert.numel()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    padded = (counts + rows - 1) // rows * rows
    ends = padded[:experts].cumsum(0)
    # No expert needs more than one tile that is not full, and none more tiles than it has pairs.
    num_tiles = min(num_pairs, num_pairs // rows + experts)
    starts = torch.arange(num_tiles, device=chosen.device) * rows
    tile_experts = torch.searchsorted(ends, starts, right=True)
    order = expert.argsort(stable=True)
    by_expert = expert[order]
    within = torch.arange(num_pairs, device=chosen.device) - (counts.cumsum(0) - counts)[by_expert]
    begins = torch.cat((ends - padded[:experts], starts.new_full((1,), num_tiles * rows)))
    # Pairs of experts that are not here all go to one place behind the last.
    places = (begins[by_expert] + within).clamp_(max=num_tiles * rows)
    pairs = torch.full((num_tiles * rows + 1,), num_pairs, dtype=torch.int64, device=chosen.device)
    pairs.scatter_(0, places, order)
    return ExpertTiles(pairs[:-1], tile_experts)


class FusedExperts:
    """The experts ``first`` and following of a mixture, as ``Experts`` of ``layers/mlp.py``.

    Args: ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], contiguous, of one dtype, of
    the ``num_experts`` that the mixture has.
    ``round_weights``: products with weights are rounded to that dtype. With ``deterministic`` tiles are the same for
    every number of tokens, and so are a token's results, bit for bit.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first: int,
        num_experts: int,
        *,
        round_weights: bool,
        deterministic: bool,
    ) -> None:
        self._gate_up, self._down, self._first, self._num_experts = gate_up, down, first, num_experts
        self._round_weights, self._deterministic = round_weights, deterministic

    def __call__(self, states: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        (tokens, hidden), (experts, top) = states.shape, (len(self._gate_up), chosen.shape[1])
        out = torch.empty_like(states)
        if tokens == 0 or experts == 0:
            return out.zero_()
        many = tokens * top >= _LARGE_ROWS * self._num_experts and not self._deterministic
        rows = _LARGE_ROWS if many else ROWS
        tiles = sort_by_expert(chosen, self._first, experts, rows)
        between = silu_mul(_grouped_linear(states, self._gate_up, tiles, tokens * top, top))
        outputs = _grouped_linear(between, self._down, tiles, tokens * top, 1)
        rounds = self._round_weights and states.dtype is not torch.float32
        combine_kernel()[tokens, -(-hidden // _COMBINED)](
            *(outputs, weights, chosen, out, self._first, experts, hidden), top=top, rounds=rounds, block=_COMBINED
        )
        return out


_COMBINED = 512


def _grouped_linear(x: torch.Tensor, weight: torch.Tensor, tiles: ExpertTiles, pairs: int, share: int) -> torch.Tensor:
    """[pairs, columns]; rows of pairs whose experts are not here hold anything, and nothing reads them."""
    experts, columns, depth = weight.shape
    out = x.new_empty(pairs, columns)
    num_tiles = len(tiles.experts)
    grouped_linear_kernel()[num_tiles, -(-columns // COLUMNS)](
        *(x, weight, out, tiles.pairs, tiles.experts, pairs, experts, columns, depth, x.stride(0)),
        share=share,
        row_tile=len(tiles.pairs) // num_tiles,
        column_tile=COLUMNS,
        depth_tile=DEPTH,
        precision="ieee",
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
