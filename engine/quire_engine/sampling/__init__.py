"""Draws tokens from logits. Knows rows, parameters and draws, never requests."""

from quire_engine.sampling.drawn import Drawn
from quire_engine.sampling.prompts import score_prompts
from quire_engine.sampling.step import PendingDraws, StepSampler

__all__ = ["Drawn", "PendingDraws", "StepSampler", "score_prompts"]
