"""Samples tokens from logits."""

from quire_engine.sampling.drawn import SamplerOutput
from quire_engine.sampling.prompts import compute_prompt_logprobs
from quire_engine.sampling.step import Sampler, SamplerInput

__all__ = ["Sampler", "SamplerInput", "SamplerOutput", "compute_prompt_logprobs"]
