"""Chooses the attention backend of an executor: cpu, flashinfer or reference."""

import logging
from importlib import import_module

import torch
from quire_proto.extras import install_command

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.flashinfer import FlashInferAttention, unsupported_reason, unsupported_shape_reason
from quire_engine.attention.kv_rows import FP8
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.config import KVCacheDtype
from quire_engine.errors import ModelError

log = logging.getLogger(__name__)


def check_attention(name: str, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False) -> None:
    """Raises ``ModelError`` if FlashInfer has to be used, for its name or as ``deterministic``, and does not run here.
    Can be called before a model is loaded.
    """
    if device.type == "cuda" and (name == "flashinfer" or (name == "auto" and deterministic)):
        _check_flashinfer(device, dtype, deterministic=deterministic)


def resolve_kv_cache_dtype(name: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the rows of KV memory for a model of ``dtype``."""
    return {"auto": dtype, "int8": torch.int8, "fp8": FP8}[name]


def make_attention(
    name: str,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    """Makes the attention backend ``name``: cpu, flashinfer, reference or auto.

    On the CPU, auto means cpu, which runs in torch if its kernel cannot be compiled. On a GPU, auto means flashinfer,
    or reference with a warning if flashinfer is not usable. With ``deterministic``, the result of a token depends only
    on its own sequence. ``kv_dtype`` is the dtype of KV memory, by default the model's ``dtype``. Raises
    ``ModelError``.
    """
    match name:
        case "auto" if device.type == "cuda":
            return _auto_for_gpu(shape, device, dtype, kv_dtype or dtype, deterministic)
        case "auto":
            return CpuAttention(shape)
        case "cpu":
            return _compiled_cpu(shape)
        case "flashinfer":
            return _flashinfer(shape, device, dtype, kv_dtype or dtype, deterministic)
        case "reference":
            return ReferenceAttention(shape)
    raise ModelError(f"The attention backend {name!r} does not exist; use auto, cpu, flashinfer or reference.")


def _auto_for_gpu(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, deterministic: bool
) -> AttentionBackend:
    try:
        return _flashinfer(shape, device, dtype, kv_dtype, deterministic)
    except ModelError as error:
        if deterministic:
            raise
        log.warning("attention runs without FlashInfer, which is many times slower: %s", error)
        return ReferenceAttention(shape)


def _flashinfer(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, deterministic: bool
) -> FlashInferAttention:
    _check_flashinfer(device, dtype, deterministic=deterministic)
    if reason := unsupported_shape_reason(shape):
        raise ModelError(f"FlashInfer {reason}.")
    return FlashInferAttention(shape, device, dtype, kv_dtype, deterministic=deterministic)


def _check_flashinfer(device: torch.device, dtype: torch.dtype, *, deterministic: bool) -> None:
    try:
        import_module("flashinfer")
    except ModuleNotFoundError:
        raise ModelError(f"FlashInfer is not installed: {install_command('quire-engine', 'cuda')}.") from None
    except (ImportError, OSError, RuntimeError) as error:  # version mismatch of packages, or missing CUDA libraries
        raise ModelError(f"FlashInfer cannot be loaded: {str(error).partition('. ')[0]}.") from error
    capability = torch.cuda.get_device_capability(device)
    if reason := unsupported_reason(dtype, capability):
        raise ModelError(f"FlashInfer {reason}.")
    if deterministic and capability < (8, 0):  # Triton has no matrix products for older GPUs
        raise ModelError("On a GPU, --deterministic needs one of compute capability 8.0 or newer.")


def _compiled_cpu(shape: AttentionShape) -> CpuAttention:
    try:
        return CpuAttention(shape, use_kernel=True)
    except RuntimeError:
        raise ModelError("The attention backend cpu needs a C++ compiler, and the log says what failed.") from None
