"""Chooses the attention backend of an executor. Knows which ones there are, not how they work."""

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.models.errors import ModelError


def make_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend called ``reference`` or ``cpu``, or ``auto``: cpu, in torch where its kernel cannot be compiled."""
    match name:
        case "auto":
            return CpuAttention(shape)
        case "cpu":
            return _compiled(shape)
        case "reference":
            return ReferenceAttention(shape)
    raise ModelError(f"The attention backend {name!r} does not exist; use auto, cpu or reference.")


def _compiled(shape: AttentionShape) -> CpuAttention:
    try:
        return CpuAttention(shape, use_kernel=True)
    except RuntimeError:
        raise ModelError("The attention backend cpu needs a C++ compiler, and the log says what failed.") from None
