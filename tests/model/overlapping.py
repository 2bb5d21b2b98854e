"""Drives an executor by hand as the engine's loop does, step by step or overlapped, and says what came of it."""

import random
from dataclasses import dataclass, field

import pytest
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.worker.worker import AsyncStep
from quire_proto.errors import ErrorCode
from quire_proto.sampling import TokenLogprobs

from tests.model.models import VOCAB_SIZE
from tests.support.sampling_inputs import ModuloGrammar, Output, make_output
from tests.support.steps import PENDING, KnownChunk, by_sequence, execute, make_step

# Sequences have blocks of their own, enough for all their tokens.
BLOCKS_EACH = 6


@dataclass
class Sequence:
    """What is known of a sequence's tokens, how many are computed, and what came of it."""

    made: Output
    wanted: int
    computed: int = 0
    pending: bool = False
    error: ErrorCode | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.made.token_ids[self.made.request.num_prompt_tokens :]

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self.output) + self.pending >= self.wanted

    def chunk(self, most: int) -> KnownChunk:
        """The next tokens, the pending one among them."""
        id, known = self.made.id, self.made.token_ids + [PENDING] * self.pending
        end = min(len(known), self.computed + most)
        first, start = 1 + id * BLOCKS_EACH, self.computed
        self.computed = end
        return KnownChunk(
            *(id, known[start:end], start, list(range(first, first + BLOCKS_EACH)), (self.made.request,)),
            num_prompt_logprobs=2,
            known=[*self.made.token_ids],
            num_draws=int(end == len(known)),
        )


class Loop:
    """Runs sequences to their ends as the engine's loop does, in steps whose cuts are drawn from a seed."""

    def __init__(self, executor: TorchExecutor, sequences: list[Sequence], seed: int) -> None:
        self._executor = executor
        self._sequences = {one.made.id: one for one in sequences}
        self._random = random.Random(seed)
        self.num_pending = 0

    def run(self) -> None:
        """Step by step."""
        while scheduler_output := self._schedule():
            self._commit(execute(self._executor, scheduler_output))

    def run_overlapped(self) -> None:
        """Each step is launched before the result of the last one is taken."""
        last: tuple[SchedulerOutput, AsyncStep] | None = None
        while True:
            scheduler_output = self._schedule()
            launched = self._executor.execute_model_async(scheduler_output) if scheduler_output else None
            if last is not None:
                self._commit(by_sequence(last[0], last[1].get_output()), launched=scheduler_output)
            if launched is not None:
                launched.sample_tokens()
            elif last is None:
                return
            last = None if scheduler_output is None or launched is None else (scheduler_output, launched)

    def _schedule(self) -> SchedulerOutput | None:
        alive = [one for one in self._sequences.values() if not one.is_done]
        if not alive:
            return None
        scheduler_output = make_step(0, [one.chunk(self._random.randint(1, 40)) for one in self._some(alive)])
        for chunk in scheduler_output.chunks:
            self.num_pending += chunk.awaits_token
            self._sequences[chunk.sequence_id].pending = bool(chunk.num_draws)
        return scheduler_output

    def _some(self, alive: list[Sequence]) -> list[Sequence]:
        return self._random.sample(alive, self._random.randint(1, len(alive)))

    def _commit(self, model_output: ModelOutput, launched: SchedulerOutput | None = None) -> None:
        """``launched`` is already in flight: what it draws is pending."""
        in_flight = {chunk.sequence_id for chunk in launched.chunks if chunk.num_draws} if launched else set()
        for one in self._sequences.values():
            id = one.made.id
            one.prompt_logprobs += model_output.prompt_logprobs.get(id, [])
            if one.error is not None:
                continue
            if id in model_output.errors:
                one.error = model_output.errors[id].code
            if id in model_output.token_ids:
                one.made.token_ids.append(model_output.token_ids[id])
                one.logprobs += [model_output.logprobs[id]] if id in model_output.logprobs else []
            one.pending = id in in_flight


def some_sequences(prompts: list[list[int]]) -> list[Sequence]:
    """Everything that looks at the tokens before: penalties, bad words, grammars that go on, end early or fail."""
    styles: list[dict[str, object]] = [
        {},
        {"temperature": 1.5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 3},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 2.0, "frequency_penalty": 1.0, "logprobs": 0},
        {"grammar": ModuloGrammar(3, VOCAB_SIZE)},
        {"grammar": ModuloGrammar(2, VOCAB_SIZE), "temperature": 2.0, "logprobs": 1},
        {"grammar": ModuloGrammar(1, VOCAB_SIZE)},
        {"grammar": Numbered(5, VOCAB_SIZE)},
        {"bad_words": ((7, 9), (3,)), "logit_bias": ((7, 5.0), (3, 50.0)), "temperature": 1.0},
        {"min_tokens": 4, "stop_token_ids": frozenset({2}), "logit_bias": ((2, 100.0),)},
    ]
    return [
        Sequence(make_output(id, prompts[id], seed=id << 33, **style), wanted=14) for id, style in enumerate(styles)
    ]


@dataclass
class Numbered(ModuloGrammar):
    """Fails once an output has six tokens."""

    def new_matcher(self) -> "object":
        matcher = super().new_matcher()
        accept = matcher.accept_tokens

        def counted(token_ids: list[int]) -> None:
            accept(token_ids)
            if len(matcher.output) >= 6:
                raise self.failure

        matcher.accept_tokens = counted
        return matcher


def came_of(sequences: list[Sequence]) -> list[tuple[list[int], ErrorCode | None]]:
    return [(one.output, one.error) for one in sequences]


def assert_equal(made: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [one.logprob for one in made] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [[id for id, _ in one.top] for one in made] == [[id for id, _ in one.top] for one in expected]
