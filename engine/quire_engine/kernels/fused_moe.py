"""MoE layers on CUDA as grouped products in Triton, which comes with torch for CUDA. Follows vLLM's ``fused_moe`` and
its names.

Pairs of a token and one of its experts (``sorted_token_ids``) are sorted by expert, and padded so that each block of
rows belongs to one expert. One launch computes the blocks of all experts. Only the device knows how many blocks there
are, so there are programs for the largest possible number, and those without a block exit at once. The host never
waits, and a CUDA graph can capture everything.

Blocks always have the same size, and a program adds the products in the order of K in float32. So the result of a token
does not depend on the other tokens or on its position.
"""

import functools
from typing import Any, NamedTuple

import torch

from quire_engine.kernels.ops import silu_mul

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K = 16, 64, 64
"""The size of a block of the result, and the part of K that is multiplied at a time. Blocks have few rows, because a
decode step has few tokens per expert.
"""
_LARGE_BLOCK_SIZE_M = 64
"""Rows of a block if there are at least this many tokens per expert, unless results must not depend on their number."""
_WARPS, _STAGES = 4, 4


@functools.cache
def fused_moe_kernel() -> Any:
    """Returns the Triton kernel, with one program per block of the result. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["num_valid_tokens", "num_experts"])
    def fused_moe(  # noqa: PLR0917 -- a launch passes them by position
        a,  # [num_valid_tokens / top_k, k]
        b,  # [num_experts, n, k]
        c,  # [num_valid_tokens, n]
        sorted_token_ids,  # [blocks * block_size_m]
        expert_ids,  # [blocks]
        num_valid_tokens,
        num_experts,
        n,
        k,
        stride_am,
        top_k: tl.constexpr,
        block_size_m: tl.constexpr,
        block_size_n: tl.constexpr,
        block_size_k: tl.constexpr,
        precision: tl.constexpr,
    ):
        """Computes ``c[p] = a[p // top_k] @ b[expert].T`` for the pairs p of one block, which all have one expert."""
        block = tl.program_id(0)
        expert = tl.load(expert_ids + block)
        if expert < num_experts:
            offs_token = tl.load(sorted_token_ids + block * block_size_m + tl.arange(0, block_size_m))
            token_mask = offs_token < num_valid_tokens
            offs_n = tl.program_id(1) * block_size_n + tl.arange(0, block_size_n)
            offs_k = tl.arange(0, block_size_k)
            a_rows = a + tl.where(token_mask, offs_token // top_k, 0)[:, None] * stride_am
            b_columns = b + expert * n * k + (offs_n % n).to(tl.int64)[None, :] * k
            accumulator = tl.zeros((block_size_m, block_size_n), dtype=tl.float32)
            for start in range(0, k, block_size_k):
                offset = start + offs_k
                within = offset < k
                left = tl.load(a_rows + offset[None, :], mask=within[None, :], other=0.0)
                right = tl.load(b_columns + offset[:, None], mask=within[:, None], other=0.0)
                accumulator = tl.dot(left, right, accumulator, input_precision=precision)
            target = c + tl.where(token_mask, offs_token, 0)[:, None] * n + offs_n[None, :]
            tl.store(target, accumulator.to(c.dtype.element_ty), mask=token_mask[:, None] & (offs_n < n)[None, :])

    return fused_moe


@functools.cache
def moe_sum_kernel() -> Any:
    """Returns the Triton kernel, with one program for some columns of one token. Raises ``ImportError`` without
    Triton.
    """
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["first", "num_experts"])
    def moe_sum(  # noqa: PLR0917 -- a launch passes them by position
        outputs,  # [tokens * top_k, columns]
        topk_weights,  # [tokens, top_k]
        topk_ids,  # [tokens, top_k]
        out,  # [tokens, columns]
        first,
        num_experts,
        columns,
        top_k: tl.constexpr,
        rounds: tl.constexpr,
        block: tl.constexpr,
    ):
        """Sets ``out[t]`` to the sum of weight times output over the token's experts that are held here, in their
        order.
        """
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        within = column < columns
        total = tl.zeros((block,), dtype=tl.float32)
        for place in range(top_k):
            pair = token * top_k + place
            expert = tl.load(topk_ids + pair) - first
            held = within & (expert >= 0) & (expert < num_experts)
            part = tl.load(outputs + pair * columns + column, mask=held, other=0.0).to(tl.float32)
            part *= tl.load(topk_weights + pair)
            if rounds:
                part = part.to(out.dtype.element_ty).to(tl.float32)
            total += tl.where(held, part, 0.0)
        tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=within)

    return moe_sum


class AlignedBlocks(NamedTuple):
    """The pairs of each block of rows. ``sorted_token_ids`` [blocks * block_size] int64 are indices into the flat
    ``topk_ids``; a padding row has their number instead. ``expert_ids`` [blocks] int64 count from the first expert held
    here; an unneeded block has the number of experts. (This replaces vLLM's ``num_tokens_post_padded``.)
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor


def moe_align_block_size(topk_ids: torch.Tensor, block_size: int, first: int, num_experts: int) -> AlignedBlocks:
    """Makes blocks of ``block_size`` rows for ``topk_ids`` [T, top_k] of the ``num_experts`` experts from ``first``.
    Does not wait for the device.
    """
    expert = topk_ids.flatten() - first
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    num_valid_tokens = expert.numel()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=topk_ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded[:num_experts].cumsum(0)
    # No expert needs more than one partial block, or more blocks than it has pairs.
    num_blocks = min(num_valid_tokens, num_valid_tokens // block_size + num_experts)
    starts = torch.arange(num_blocks, device=topk_ids.device) * block_size
    expert_ids = torch.searchsorted(ends, starts, right=True)
    order = expert.argsort(stable=True)
    by_expert = expert[order]
    within = torch.arange(num_valid_tokens, device=topk_ids.device) - (counts.cumsum(0) - counts)[by_expert]
    num_rows = num_blocks * block_size
    begins = torch.cat((ends - padded[:num_experts], starts.new_full((1,), num_rows)))
    # Pairs of experts that are not held here all go to one place after the last.
    places = (begins[by_expert] + within).clamp_(max=num_rows)
    sorted_ids = torch.full((num_rows + 1,), num_valid_tokens, dtype=torch.int64, device=topk_ids.device)
    sorted_ids.scatter_(0, places, order)
    return AlignedBlocks(sorted_ids[:-1], expert_ids)


class FusedExperts:
    """Consecutive experts of an MoE layer, from the expert ``first``. Implements ``Experts`` of ``layers/mlp.py``.

    Args: ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], contiguous and of one dtype.
    The layer has ``num_experts`` experts in total. With ``round_weights``, products with weights are rounded to that
    dtype. With ``deterministic``, blocks have the same size for any number of tokens, and so a token's results have the
    same bits.
    """

    is_capturable = True

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

    def __call__(self, states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        (tokens, hidden), (num_experts, top_k) = states.shape, (len(self._gate_up), topk_ids.shape[1])
        out = torch.empty_like(states)
        if tokens == 0 or num_experts == 0:
            return out.zero_()
        many = tokens * top_k >= _LARGE_BLOCK_SIZE_M * self._num_experts and not self._deterministic
        block_size_m = _LARGE_BLOCK_SIZE_M if many else BLOCK_SIZE_M
        blocks = moe_align_block_size(topk_ids, block_size_m, self._first, num_experts)
        between = silu_mul(_grouped_linear(states, self._gate_up, blocks, tokens * top_k, top_k))
        outputs = _grouped_linear(between, self._down, blocks, tokens * top_k, 1)
        rounds = self._round_weights and states.dtype is not torch.float32
        moe_sum_kernel()[tokens, -(-hidden // _SUMMED)](
            *(outputs, topk_weights, topk_ids, out, self._first, num_experts, hidden),
            top_k=top_k,
            rounds=rounds,
            block=_SUMMED,
        )
        return out


_SUMMED = 512


def _grouped_linear(
    a: torch.Tensor, b: torch.Tensor, blocks: AlignedBlocks, num_valid_tokens: int, top_k: int
) -> torch.Tensor:
    """Returns [num_valid_tokens, n]. Rows of pairs whose experts are not held here are undefined and never read."""
    num_experts, n, k = b.shape
    c = a.new_empty(num_valid_tokens, n)
    num_blocks = len(blocks.expert_ids)
    fused_moe_kernel()[num_blocks, -(-n // BLOCK_SIZE_N)](
        *(a, b, c, blocks.sorted_token_ids, blocks.expert_ids, num_valid_tokens, num_experts, n, k, a.stride(0)),
        top_k=top_k,
        block_size_m=len(blocks.sorted_token_ids) // num_blocks,
        block_size_n=BLOCK_SIZE_N,
        block_size_k=BLOCK_SIZE_K,
        precision="ieee",
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return c
