"""``norm_rotate`` on CUDA in one launch: the norm of each head, then its rotation. It uses Triton, which comes with
torch for CUDA. Separate kernels would be five short ones per layer, which take more than 10 % of a decode step.
"""

import functools
from typing import Any

import torch

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

_HEADS = 8  # per program
_DIMS = (16, 32, 64, 128, 256, 512)


@functools.cache
def norm_rotate_kernel() -> Any:
    """Returns the Triton kernel, with one program for some heads of a token. Raises ``ImportError`` without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["heads", "queries"])
    def norm_rotate(  # noqa: PLR0917 -- a launch passes them by position
        x,  # [tokens, heads, 2 * half], updated in place
        query,  # [2 * half], and so is key
        key,
        cos,  # [tokens, half], and so is sin
        sin,
        heads,
        queries,
        eps,
        x_token,
        x_head,
        angle_token,
        half: tl.constexpr,
        block: tl.constexpr,
    ):
        """Sets ``x[t, h] = rotate(norm(x[t, h]))`` for ``block`` heads of one token. The first ``queries`` heads are
        queries.
        """
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * block + tl.arange(0, block)
        at = tl.arange(0, half)
        held = (head < heads)[:, None]
        first_at = x + token * x_token + head[:, None] * x_head + at[None, :]
        first = tl.load(first_at, mask=held, other=0.0).to(tl.float32)
        second = tl.load(first_at + half, mask=held, other=0.0).to(tl.float32)
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        of_query = (head < queries)[:, None]
        first_weight = tl.where(of_query, tl.load(query + at)[None, :], tl.load(key + at)[None, :]).to(tl.float32)
        second_weight = tl.where(of_query, tl.load(query + half + at)[None, :], tl.load(key + half + at)[None, :])
        # Rounded once, after the weight, like FlashInfer's norm.
        first = (first * scale * first_weight).to(x.dtype.element_ty).to(tl.float32)
        second = (second * scale * second_weight.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
        cosines = tl.load(cos + token * angle_token + at)[None, :]
        sines = tl.load(sin + token * angle_token + at)[None, :]
        tl.store(first_at, (first * cosines - second * sines).to(x.dtype.element_ty), mask=held)
        tl.store(first_at + half, (second * cosines + first * sines).to(x.dtype.element_ty), mask=held)

    return norm_rotate


def triton_norm_rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    num_queries: int,
    eps: float,
) -> bool:
    """Does ``ops.norm_rotate`` with the norm weights ``query`` and ``key`` [head_dim]. Returns False, and changes
    nothing, if it cannot: without Triton, for heads that are only partly rotated, or for tensors of several dtypes.
    """
    (tokens, heads, dim), half = x.shape, cos.shape[1]
    is_plain = x.stride(2) == 1 and cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0)
    if dim not in _DIMS or dim != 2 * half or not is_plain or not x.dtype == query.dtype == key.dtype:
        return False
    try:
        kernel = norm_rotate_kernel()
    except ImportError:
        return False
    if tokens:
        kernel[tokens, -(-heads // _HEADS)](
            *(x, query, key, cos, sin, heads, num_queries, eps, x.stride(0), x.stride(1), cos.stride(0)),
            half=half,
            block=_HEADS,
            num_warps=4,
        )
    return True
