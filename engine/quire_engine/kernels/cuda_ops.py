"""FlashInfer's kernels for the small operations of ``ops``, for tensors that FlashInfer supports.

Each function computes the same as its namesake in ``ops``, in fp16 and bf16. If it cannot, it returns None or False and
has changed nothing. Norms are rounded once, at the end.
"""

import functools
import importlib
import logging
from collections.abc import Iterable
from typing import Any

import torch

_DTYPES = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16
# In bytes, for tensors [T, N], as FlashInfer's kernel for them requires.
_TENSOR_ALIGNMENT = 128
_ROTATED_AT_ONCE = 8

logger = logging.getLogger(__name__)


def flashinfer_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor | None:
    """See ``ops.rms_norm``. FlashInfer also supports an offset of 1, but not per head."""
    library = _flashinfer_for(x, weight)
    if library is None or not _has_aligned_rows(x, weight) or not _is_tensor_aligned(x):
        return None
    if offset and (offset, x.dim()) != (1.0, 2):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (library.gemma_rmsnorm if offset else library.rmsnorm)(x, weight, eps, out=out)
    return out


def flashinfer_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor | None:
    """See ``ops.add_rms_norm``. The norm overwrites ``x``."""
    library = _flashinfer_for(x, residual, weight)
    if library is None or x.shape != residual.shape or not _has_aligned_rows(x, residual, weight):
        return None
    if offset not in (0.0, 1.0) or not (_is_tensor_aligned(x) and _is_tensor_aligned(residual)):
        return None
    (library.gemma_fused_add_rmsnorm if offset else library.fused_add_rmsnorm)(x, residual, weight, eps)
    return x


def flashinfer_silu_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """See ``ops.silu_mul``."""
    return _gated("silu_and_mul", gate_up)


def flashinfer_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """See ``ops.gelu_mul``."""
    return _gated("gelu_tanh_and_mul", gate_up)


def _gated(name: str, gate_up: torch.Tensor) -> torch.Tensor | None:
    library = _flashinfer_for(gate_up)
    half_row = gate_up.shape[1] // 2 * gate_up.element_size()
    if library is None or not gate_up.is_contiguous() or half_row % _ALIGNMENT or not _is_aligned(gate_up):
        return None
    result: torch.Tensor = getattr(library, name)(gate_up)
    return result


def flashinfer_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """See ``ops.rotate``. FlashInfer rotates a query and a key together; here these are the first head and all others.

    FlashInfer's table has a row per position, cosines first. Here each row belongs to a token, and the table needs no
    copy if ``cos`` and ``sin`` are the halves of one tensor.
    """
    library, (tokens, heads, dim), half = _flashinfer_for(x), x.shape, cos.shape[1]
    if library is None or heads < 2 or half % max(_ROTATED_AT_ONCE, dim // 32) or not _has_aligned_rows(x):
        return False
    table = _cos_sin_table(cos, sin)
    library.apply_rope_with_cos_sin_cache_inplace(_rows(tokens, x.device), x[:, :1], x[:, 1:], dim, table, is_neox=True)
    return True


def _cos_sin_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    tokens, half = cos.shape
    strides = (2 * half, 1)
    halves = cos.stride() == sin.stride() == strides and sin.storage_offset() == cos.storage_offset() + half
    if halves and cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr() and _is_aligned(cos):
        return cos.as_strided((tokens, 2 * half), strides)
    return torch.cat((cos, sin), dim=1)


def _rows(count: int, device: torch.device) -> torch.Tensor:
    """Returns the table row of each of ``count`` tokens: 0, 1, 2 ..."""
    return _cached_arange(max(1 << 16, 1 << (count - 1).bit_length()), device)[:count]


@functools.cache
def _cached_arange(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _flashinfer_for(*tensors: torch.Tensor) -> Any:
    """Returns FlashInfer if all tensors have one dtype that it supports and none is empty, else None."""
    first = tensors[0]
    if first.dtype not in _DTYPES or any(t.dtype != first.dtype or not t.numel() for t in tensors):
        return None
    return _flashinfer()


@functools.cache
def _flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("FlashInfer's kernels are not available, so torch replaces them and is slower: %s", error)
        return None


def _has_aligned_rows(*tensors: torch.Tensor) -> bool:
    """Whether every row is contiguous and begins at a multiple of 16 bytes."""
    return all(
        t.stride(-1) == 1 and _is_aligned(t) and _are_aligned(t.stride()[:-1], t.element_size()) for t in tensors
    ) and _are_aligned((tensors[0].shape[-1],), tensors[0].element_size())


def _are_aligned(strides: Iterable[int], size: int) -> bool:
    return not any(stride * size % _ALIGNMENT for stride in strides)


def _is_tensor_aligned(x: torch.Tensor) -> bool:
    return x.dim() == 3 or (x.dim() == 2 and not x.data_ptr() % _TENSOR_ALIGNMENT)


def _is_aligned(x: torch.Tensor) -> bool:
    return not x.data_ptr() % _ALIGNMENT
