"""Draws without an engine: histories, logits, and a grammar small enough to check by hand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from quire_engine.core.step import GrammarError, ModelOutput, SampleRequest
from quire_engine.sampling import metadata as noise
from quire_engine.sampling.sampler import Sampler
from quire_proto.sampling import SamplingParams


@dataclass
class ModuloGrammar:
    """Allows a token unless it and the sum of the output so far add up to a multiple of ``modulus``.

    An output that gets ``poison`` raises ``failure``. ``modulus`` 1 allows nothing at all.
    """

    modulus: int = 3
    vocab_size: int = 50
    poison: int | None = None
    failure: BaseException = field(default_factory=lambda: GrammarError("it is poisoned"))

    def new_matcher(self) -> "ModuloMatcher":
        return ModuloMatcher(self)

    def allows(self, output: Sequence[int], token_id: int) -> bool:
        return (sum(output) + token_id) % self.modulus != 0


class ModuloMatcher:
    def __init__(self, grammar: ModuloGrammar) -> None:
        self.grammar = grammar
        self.output: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self.output += token_ids
        if self.grammar.poison in token_ids:
            raise self.grammar.failure

    def fill_bitmask_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> None:
        after = ModuloMatcher(self.grammar)
        after.accept_tokens([*self.output, *draft_token_ids])
        after.fill_bitmask(mask)

    def fill_bitmask(self, mask: memoryview) -> None:
        words = np.frombuffer(mask, np.int32)
        assert not words.any()
        bits = np.zeros(32 * len(words), dtype=np.uint8)
        bits[: self.grammar.vocab_size] = [
            self.grammar.allows(self.output, token_id) for token_id in range(self.grammar.vocab_size)
        ]
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)


def some_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def some_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def make_sample_request(id: int, prompt: Sequence[int], output: Sequence[int] = (), **wanted: object) -> SampleRequest:
    """A request for the token after ``prompt`` and ``output``; its fields by name, others are parameters'."""
    names = ("seed", "stop_token_ids", "grammar", "num_candidates")
    fields = {name: wanted.pop(name) for name in names if name in wanted}
    params = wanted.pop("params", None) or SamplingParams(**{"temperature": 0, "max_tokens": 1000} | wanted)
    return SampleRequest(id, params, fields.pop("seed", 0), [*prompt, *output], len(prompt), **fields)


def run_step(sampler: Sampler, sample_requests: Sequence[SampleRequest], logits: torch.Tensor) -> ModelOutput:
    """One step with a row of logits for each request."""
    model_output = ModelOutput()
    sampler.sample(sampler.prepare(sample_requests), logits, range(len(sample_requests))).fetch_into(model_output)
    return model_output


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """The keys of ``noise.row_keys`` as a tensor, [B, 2] int32."""
    return torch.from_numpy(noise.row_keys(seeds, positions))
