"""Requests as numbers: prompts, and how many tokens each is to be answered with."""

import random
from dataclasses import dataclass

from quire_engine.bench.lengths import Lengths

# Below, vocabularies keep their special tokens.
FIRST_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """``outputs[i]`` tokens are made for ``prompts[i]``, greedily, whatever they are."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.outputs)


def random_workload(count: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int) -> Workload:
    """``count`` requests of random tokens and random lengths."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    sizes = [(inputs.draw(source), outputs.draw(source)) for _ in range(count)]
    prompts = [[source.randrange(FIRST_TOKEN, vocab_size) for _ in range(size)] for size, _ in sizes]
    return Workload(prompts, [size for _, size in sizes])
