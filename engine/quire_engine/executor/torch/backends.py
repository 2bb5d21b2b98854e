"""Chooses the attention backend of an executor. Knows which ones there are, not how they work."""

import logging
from importlib import import_module

import torch

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.flashinfer import FlashInferAttention, unsupported
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.models.errors import ModelError

log = logging.getLogger(__name__)


def make_attention(
    name: str, shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False
) -> AttentionBackend:
    """The backend called ``name``: cpu, flashinfer, reference or auto.

    On the CPU, auto is cpu, in torch where its kernel cannot be compiled. On a GPU it is flashinfer, and where that
    cannot be had reference, with a warning. ``deterministic`` asks that what is computed for a token depends on its
    sequence alone. Raises ``ModelError``.
    """
    on_gpu = device.type == "cuda"
    match name:
        case "auto":
            return _for_gpu(shape, device, dtype, deterministic) if on_gpu else CpuAttention(shape)
        case "cpu" if not on_gpu:
            return _compiled(shape)
        case "flashinfer" if on_gpu:
            return _flashinfer(shape, device, dtype, deterministic)
        case "reference" if not (on_gpu and deterministic):
            return ReferenceAttention(shape)
        case "reference":
            raise ModelError("The attention backend reference is not deterministic on a GPU; use flashinfer.")
        case "cpu" | "flashinfer":
            raise ModelError(f"The attention backend {name} does not run on {'a GPU' if on_gpu else 'the CPU'}.")
    raise ModelError(f"The attention backend {name!r} does not exist; use auto, cpu, flashinfer or reference.")


def _for_gpu(shape: AttentionShape, device: torch.device, dtype: torch.dtype, deterministic: bool) -> AttentionBackend:
    try:
        return _flashinfer(shape, device, dtype, deterministic)
    except ModelError as error:
        if deterministic:
            raise
        log.warning("attention is computed by its formula, which is slow: %s", error)
        return ReferenceAttention(shape)


def _flashinfer(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> FlashInferAttention:
    try:
        import_module("flashinfer")
    except ModuleNotFoundError:
        raise ModelError("FlashInfer is not installed; it comes with quire-engine[cuda].") from None
    except (ImportError, OSError, RuntimeError) as error:  # parts of unlike versions, or no CUDA libraries
        raise ModelError(f"FlashInfer cannot be loaded: {str(error).partition('. ')[0]}.") from error
    capability = torch.cuda.get_device_capability(device)
    if reason := unsupported(shape, dtype, capability):
        raise ModelError(f"FlashInfer {reason}.")
    if deterministic and capability < (8, 0):  # Triton has no products for older ones
        raise ModelError("On a GPU, --deterministic needs one of compute capability 8.0 or newer.")
    return FlashInferAttention(shape, device, dtype, deterministic=deterministic)


def _compiled(shape: AttentionShape) -> CpuAttention:
    try:
        return CpuAttention(shape, use_kernel=True)
    except RuntimeError:
        raise ModelError("The attention backend cpu needs a C++ compiler, and the log says what failed.") from None
