"""Draws tokens from logits. Knows rows and parameters, never requests."""

from quire_engine.sampling.rows import SamplingRows
from quire_engine.sampling.sampler import NOT_FINITE, sample

__all__ = ["NOT_FINITE", "SamplingRows", "sample"]
