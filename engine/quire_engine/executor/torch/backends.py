"""Chooses the attention backend of an executor. Knows which ones there are, not how they work."""

import logging

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.models.errors import ModelError

log = logging.getLogger(__name__)


def make_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend called ``reference`` or ``cpu``; ``auto`` is cpu, or reference where cpu cannot be built."""
    if name == "reference":
        return ReferenceAttention(shape)
    if name not in ("auto", "cpu"):
        raise ModelError(f"The attention backend {name!r} does not exist; use auto, cpu or reference.")
    try:
        return _cpu(shape)
    except Exception as error:
        # A compiler that is missing or fails shows in many ways; the reference computes the same without one.
        if name == "cpu":
            raise ModelError(f"The cpu attention backend cannot be built: {error}.") from error
        log.warning("Attention runs without its compiled kernel, which is slow: %s", error)
        return ReferenceAttention(shape)


def _cpu(shape: AttentionShape) -> AttentionBackend:
    from quire_engine.attention.cpu import CpuAttention

    return CpuAttention(shape)
