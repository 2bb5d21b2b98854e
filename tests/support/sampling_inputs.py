"""Draws without an engine: histories, logits, and a grammar small enough to check by hand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from quire_engine.core.step import GrammarError, ModelOutput, SampleRequest
from quire_engine.sampling import metadata as noise
from quire_engine.sampling.logits_processors import Draw, SamplingState
from quire_engine.sampling.sampler import PlainSamplerOutput, Sampler, SamplerInput, SamplerOutput
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


@dataclass(eq=False)
class Output:
    """An output by its number: how it is drawn, and its tokens so far, which a test may append to."""

    id: int
    request: SampleRequest
    token_ids: list[int]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def known(self) -> npt.NDArray[np.int32]:
        return np.array(self.token_ids, np.int32)


def make_output(id: int, prompt: Sequence[int], output: Sequence[int] = (), **wanted: object) -> Output:
    """An output after ``prompt`` and ``output``; fields of its request by name, others are parameters'."""
    names = ("seed", "stop_token_ids", "grammar", "num_candidates")
    fields = {name: wanted.pop(name) for name in names if name in wanted}
    params = wanted.pop("params", None) or SamplingParams(**{"temperature": 0, "max_tokens": 1000} | wanted)
    request = SampleRequest(params, fields.pop("seed", 0), len(prompt), **fields)
    return Output(id, request, [*prompt, *output])


class KeepingSampler(Sampler):
    """A sampler with the states of the outputs that it draws, by their ids, as a worker keeps them by rows."""

    def __init__(self, vocab_size: int, *, allow_sync: bool | None = None) -> None:
        super().__init__(vocab_size, allow_sync=allow_sync)
        self.states: dict[int, tuple[Output, SamplingState]] = {}

    def draws(self, outputs: Sequence[Output]) -> list[Draw]:
        """A draw of each, whose number is its id."""
        for output in outputs:
            if self.states.get(output.id, (None,))[0] is not output:
                self.states[output.id] = output, SamplingState(output.request, self.vocab_size)
        return [Draw(output.id, self.states[output.id][1], output.known) for output in outputs]

    def prepare_outputs(self, outputs: Sequence[Output]) -> SamplerInput:
        return self.prepare(self.draws(outputs))


def answers(sampled: SamplerOutput | PlainSamplerOutput) -> ModelOutput:
    """What came of draws, each part by their numbers, and no token where there is another answer."""
    made = ModelOutput({})
    sampled.fetch_into(made)
    made.token_ids = dict(made.token_ids if isinstance(made.token_ids, dict) else enumerate(made.token_ids))
    for number in (*made.draw_errors, *made.candidates):
        made.token_ids.pop(number, None)
    made.errors = made.draw_errors
    return made


def run_step(sampler: KeepingSampler, outputs: Sequence[Output], logits: torch.Tensor) -> ModelOutput:
    """One step with a row of logits for each output."""
    return answers(sampler.sample(sampler.prepare_outputs(outputs), logits, range(len(outputs))))


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """The keys of ``noise.row_keys`` as a tensor, [B, 2] int32."""
    return torch.from_numpy(noise.row_keys(seeds, positions))
