"""The small operations between a layer's products, each in one pass over memory. They know tensors, and
nothing of models.

Each takes the compiled kernel on the CPU in bf16 and fp32, and otherwise computes the same in torch; results
agree to the last rounding. Norm and activation round where torch's separate operations would round, rotation
only once.
"""

import ctypes

import torch
from torch.nn import functional as F

from quire_engine.kernels.library import DTYPES, library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, in fp32 inside.

    ``x`` [T, N] or, for a norm of each head, [T, heads, N] with any strides of T and heads; ``weight`` [N].
    Returns ``x``'s shape.
    """
    kernels = _kernels_for(x, weight)
    if kernels is None or x.stride(-1) != 1:
        return _rms_norm(x, weight, eps)
    return _norm(kernels, x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``x`` [T, N] to ``residual`` [T, N] in place, and returns the norm of the sum, [T, N]."""
    kernels = _kernels_for(x, residual, weight)
    if kernels is None or x.stride(-1) != 1 or not residual.is_contiguous():
        residual += x
        return _rms_norm(residual, weight, eps)
    _check(x.shape == residual.shape, "x and residual must have one shape")
    return _norm(kernels, x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` [T, 2F], gate first -> [T, F]."""
    kernels = _kernels_for(gate_up)
    tokens, width = gate_up.shape
    if kernels is None or gate_up.stride(1) != 1 or width % 2:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype)
    kernels.quire_silu_mul(
        *(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr()),
        *(tokens, width // 2, _is_bf16(out), torch.get_num_threads()),
    )
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates ``x`` [T, heads, head_dim] in place by the angles of its tokens.

    ``cos`` and ``sin`` [T, R/2] in fp32 turn the pairs (d, d + R/2) of the first R numbers of each head; the
    rest stays.
    """
    tokens, heads, dim = x.shape
    half = cos.shape[-1]
    _check(cos.shape == sin.shape == (tokens, half) and 2 * half <= dim, "cos and sin must be [T, R/2]")
    _check(cos.dtype == sin.dtype == torch.float32, "cos and sin must be fp32")
    _check(cos.device == sin.device == x.device, "cos and sin must be where x is")
    kernels = _kernels_for(x)
    if kernels is None or x.stride(2) != 1:
        _rotate(x, cos, sin)
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    kernels.quire_rotate(
        *(x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr()),
        *(tokens, heads, half, _is_bf16(x), torch.get_num_threads()),
    )


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    x[..., : 2 * half] = turned.to(x.dtype)


def _norm(
    kernels: ctypes.CDLL, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    _check(x.dim() in (2, 3), "x must be [T, N] or [T, heads, N]")
    _check(weight.shape == x.shape[-1:] and weight.is_contiguous(), "weight must be [N], as long as x's rows")
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    added = None if residual is None else residual.data_ptr()
    kernels.quire_rms_norm(
        *(x.data_ptr(), x.stride(0), x.stride(-2), added, weight.data_ptr(), out.data_ptr()),
        *(x.shape[0], heads, x.shape[-1], eps, _is_bf16(x), torch.get_num_threads()),
    )
    return out


def _kernels_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, if all the tensors are on the CPU in one dtype that they know."""
    first = tensors[0]
    if first.dtype not in DTYPES or any(t.device.type != "cpu" or t.dtype != first.dtype for t in tensors):
        return None
    return library()


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
