"""The small operations around a layer's matrix products, each in one pass over memory: embedding, norms, sums,
activation and rotation.

Each uses the compiled kernel on the CPU in bf16 and fp32, FlashInfer's kernel on a GPU in bf16 and fp16 (see
``cuda_ops``), and torch otherwise. Results agree up to the last rounding. On the CPU, norm and activation round where
torch's separate operations would round, and rotation rounds only once.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from quire_engine.kernels.bindings import DTYPES, library
from quire_engine.kernels.cuda_ops import (
    flashinfer_add_rms_norm,
    flashinfer_gelu_mul,
    flashinfer_rms_norm,
    flashinfer_rotate,
    flashinfer_silu_mul,
)
from quire_engine.kernels.norm_rotate import triton_norm_rotate


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of the query heads, which are the first ``num_queries`` heads, and of the key
    heads. ``offset`` is as in ``rms_norm``.
    """

    query: torch.Tensor
    key: torch.Tensor
    num_queries: int
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``, with ``gate`` clamped to at most
    ``limit`` and ``up`` to [-``limit``, ``limit``].
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Maps ``gate_up`` [T, 2F], gate first, to [T, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * (gate * torch.sigmoid(gate * self.alpha))


def embed(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the rows ``token_ids`` [T] int64 of ``table`` [vocabulary, N], [T, N]. Raises ``IndexError`` for an id
    beyond the table.
    """
    kernels = _kernels_for(table)
    if kernels is None or token_ids.dtype is not torch.int64 or not token_ids.is_contiguous():
        return F.embedding(token_ids, table)
    check_ids(token_ids, len(table))
    out = torch.empty(len(token_ids), table.shape[1], dtype=table.dtype)
    row_bytes = table.stride(0) * table.element_size()
    kernels.quire_embed(table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), len(token_ids), row_bytes)
    return out


def check_ids(ids: torch.Tensor, size: int) -> None:
    """Raises ``IndexError`` if one of ``ids`` [N] int64, on the CPU and contiguous, is outside of a table of ``size``
    rows.
    """
    # Read in place, because during a capture torch may not compute.
    if not len(ids):
        return
    numbers = np.frombuffer(memoryview((ctypes.c_int64 * len(ids)).from_address(ids.data_ptr())), np.int64)
    if not 0 <= numbers.min() <= numbers.max() < size:
        raise IndexError(f"a row beyond the {size} of the table")


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns ``x`` [T, N] times ``factor``. May overwrite ``x``."""
    kernels = _kernels_for(x)
    if kernels is None or not x.is_contiguous():
        return x * factor
    kernels.quire_scale(x.data_ptr(), *x.shape, factor, _is_bf16(x))
    return x


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines, both [T, N] float32, of ``positions`` [T] times ``frequencies`` [N] float32. They
    are multiplied by ``scales`` [N] float32.
    """
    kernels = _kernels_for(frequencies, scales)
    if kernels is None:
        angles = positions.float()[:, None] * frequencies
        return angles.cos().mul_(scales), angles.sin().mul_(scales)
    if positions.dtype is not torch.int32 or not positions.is_contiguous():
        positions = positions.to(torch.int32).contiguous()
    tokens, width = len(positions), len(frequencies)
    cos, sin = torch.empty(tokens, width), torch.empty(tokens, width)
    kernels.quire_cos_sin(
        *(positions.data_ptr(), frequencies.data_ptr(), scales.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(tokens, width),
    )
    return cos, sin


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """Returns ``x / rms(x) * (offset + weight)`` over the last dimension, in the shape of ``x``. Computes in fp32.

    ``x`` is [T, N], or [T, heads, N] for a norm per head, with any strides of T and heads; ``weight`` is [N]. Without
    an ``offset`` the quotient is rounded before the product, as in transformers.
    """
    if x.is_cuda and (normed := flashinfer_rms_norm(x, weight, eps, offset=offset)) is not None:
        return normed
    kernels = _kernels_for(x, weight)
    if kernels is None or x.stride(-1) != 1:
        return _torch_rms_norm(x, weight, eps, offset)
    return _call_rms_norm_kernel(kernels, x, None, weight, eps, offset=offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Adds ``x`` [T, N] to ``residual`` [T, N] in place, and returns the ``rms_norm`` of the sum, [T, N]. May overwrite
    ``x``.
    """
    if x.is_cuda and (normed := flashinfer_add_rms_norm(x, residual, weight, eps, offset=offset)) is not None:
        return normed
    kernels = _kernels_for(x, residual, weight)
    if kernels is None or x.stride(-1) != 1 or not residual.is_contiguous():
        residual += x
        return _torch_rms_norm(residual, weight, eps, offset)
    _check(x.shape == residual.shape, "x and residual must have one shape")
    return _call_rms_norm_kernel(kernels, x, residual, weight, eps, offset=offset)


def square_sums(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the sum of squares of each row of ``x`` [T, N] to ``out`` [T] float32. Both may have any stride of T."""
    kernels = _kernels_for(x)
    if kernels is None or x.stride(1) != 1:
        out.copy_(x.float().square().sum(-1))
        return
    _check(out.dtype is torch.float32 and out.shape == x.shape[:1], "out must be [T] in fp32")
    (tokens, dim), threads = x.shape, torch.get_num_threads()
    kernels.quire_square_sums(
        x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), tokens, dim, _is_bf16(x), threads
    )


def norm_by_sums(x: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, eps: float, *, width: int) -> None:
    """Applies ``rms_norm`` in place to rows of ``width`` numbers, of which ``x`` [T, N] and ``weight`` [N] are a part.
    ``sums`` [T] are the ``square_sums`` of whole rows.
    """
    kernels = _kernels_for(x, weight)
    if kernels is None or x.stride(1) != 1:
        normed = x.float() * torch.rsqrt(sums / width + eps)[:, None]
        x.copy_(normed.to(x.dtype) * weight)
        return
    _check(sums.dtype is torch.float32 and sums.shape == x.shape[:1], "sums must be [T] in fp32")
    _check(weight.shape == x.shape[1:] and weight.is_contiguous(), "weight must be [N], as long as x's rows")
    kernels.quire_norm_by_sums(
        *(x.data_ptr(), x.stride(0), sums.data_ptr(), sums.stride(0), weight.data_ptr()),
        *(*x.shape, width, eps, _is_bf16(x), torch.get_num_threads()),
    )


def add(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Adds ``x`` to ``residual`` in place. Both have one shape."""
    kernels = _kernels_for(x, residual)
    if kernels is None or not (x.is_contiguous() and residual.is_contiguous()):
        residual += x
        return
    _check(x.shape == residual.shape, "x and residual must have one shape")
    kernels.quire_add(x.data_ptr(), residual.data_ptr(), x.numel(), _is_bf16(x), torch.get_num_threads())


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns ``silu(gate) * up`` [T, F] of ``gate_up`` [T, 2F], gate first."""
    if gate_up.is_cuda and (product := flashinfer_silu_mul(gate_up)) is not None:
        return product
    if (kernels := _kernels_for_halves(gate_up)) is not None:
        return _call_gated_kernel(kernels.quire_silu_mul, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns ``gelu(gate) * up`` [T, F] of ``gate_up`` [T, 2F], gate first. Uses the tanh approximation of GELU."""
    if gate_up.is_cuda and (product := flashinfer_gelu_mul(gate_up)) is not None:
        return product
    if (kernels := _kernels_for_halves(gate_up)) is not None:
        return _call_gated_kernel(kernels.quire_gelu_mul, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates ``x`` [T, heads, head_dim] in place by the angles of its tokens.

    ``cos`` and ``sin`` [T, R/2] in fp32 rotate the pairs (d, d + R/2) of the first R numbers of each head. The rest
    stays.
    """
    _check_angles(x, cos, sin)
    if x.is_cuda and flashinfer_rotate(x, cos, sin):
        return
    kernels = _kernels_for(x)
    if kernels is None or x.stride(2) != 1:
        _torch_rotate(x, cos, sin)
    else:
        _call_rotate_kernel(kernels, x, None, cos, sin)


def norm_rotate(x: torch.Tensor, norms: HeadNorms, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Applies ``rms_norm`` to each head of ``x`` [T, heads, head_dim], query heads before key heads, then ``rotate``,
    both in place.
    """
    if x.is_cuda:
        _check_angles(x, cos, sin)
        queries, eps = norms.num_queries, norms.eps
        if not norms.offset and triton_norm_rotate(
            x, cos, sin, query=norms.query, key=norms.key, num_queries=queries, eps=eps
        ):
            return
    kernels = _kernels_for(x, norms.query, norms.key)
    if kernels is None or x.stride(2) != 1:
        parts = x.tensor_split((norms.num_queries,), dim=1)
        for part, weight in zip(parts, (norms.query, norms.key), strict=True):
            part.copy_(rms_norm(part, weight, norms.eps, offset=norms.offset))
        rotate(x, cos, sin)
        return
    _check_angles(x, cos, sin)
    for weight in (norms.query, norms.key):
        _check(weight.shape == x.shape[2:] and weight.is_contiguous(), "a norm must be [head_dim]")
    _call_rotate_kernel(kernels, x, norms, cos, sin)


def _kernels_for_halves(gate_up: torch.Tensor) -> ctypes.CDLL | None:
    kernels = _kernels_for(gate_up)
    return None if kernels is None or gate_up.stride(1) != 1 or gate_up.shape[1] % 2 else kernels


def _call_gated_kernel(kernel: Callable[..., object], gate_up: torch.Tensor) -> torch.Tensor:
    tokens, width = gate_up.shape
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype)
    kernel(
        *(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr()),
        *(tokens, width // 2, _is_bf16(out), torch.get_num_threads()),
    )
    return out


def _call_rotate_kernel(
    kernels: ctypes.CDLL, x: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    (tokens, heads, dim), (token, head, _) = x.shape, x.stride()
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    query = key = None
    queries, eps, offset = 0, 0.0, 0.0
    if norms is not None:
        query, key = norms.query.data_ptr(), norms.key.data_ptr()
        queries, eps, offset = norms.num_queries, norms.eps, norms.offset
    kernels.quire_rotate(
        *(x.data_ptr(), token, head, cos.data_ptr(), sin.data_ptr(), cos.stride(0), query, key),
        *(tokens, heads, queries, dim, cos.shape[1], eps, offset, _is_bf16(x), torch.get_num_threads()),
    )


def _check_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    tokens, _, dim = x.shape
    half = cos.shape[-1]
    _check(cos.shape == sin.shape == (tokens, half) and 2 * half <= dim, "cos and sin must be [T, R/2]")
    _check(cos.dtype is sin.dtype is torch.float32, "cos and sin must be fp32")
    _check(cos.device == sin.device == x.device, "cos and sin must be where x is")


def _torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + offset)).to(x.dtype) if offset else normed.to(x.dtype) * weight


def _torch_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    x[..., : 2 * half] = rotated.to(x.dtype)


def _call_rms_norm_kernel(
    kernels: ctypes.CDLL,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float,
) -> torch.Tensor:
    shape, stride = x.shape, x.stride()
    _check(len(shape) in (2, 3), "x must be [T, N] or [T, heads, N]")
    _check(weight.shape == shape[-1:] and weight.is_contiguous(), "weight must be [N], as long as x's rows")
    heads = shape[1] if len(shape) == 3 else 1
    out = torch.empty(shape, dtype=x.dtype)
    added = None if residual is None else residual.data_ptr()
    kernels.quire_rms_norm(
        *(x.data_ptr(), stride[0], stride[-2], added, weight.data_ptr(), out.data_ptr()),
        *(shape[0], heads, shape[-1], eps, offset, _is_bf16(x), torch.get_num_threads()),
    )
    return out


def _kernels_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Returns the kernels if all tensors are on the CPU and have one dtype that they support, else None."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return None
    return library() if dtype in DTYPES else None


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype is torch.bfloat16)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
