"""Drafts that are right as often as chance has it, for executors whose tokens never repeat."""

from collections import abc
from random import Random

from quire_engine.core.request import Sequence
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import SchedulerOutput, StepTimings

from tests.support.paged_executor import VOCAB_SIZE, digest, next_token, prefix_digests


class Guesser:
    """A ``Speculator`` that knows what ``PagedExecutor`` draws, and guesses it with a probability of ``right``."""

    def __init__(self, random: Random, right: float = 0.7, most: int = 6) -> None:
        self.random, self.right, self.most = random, right, most

    def observe(self, scheduler_output: SchedulerOutput, timings: StepTimings) -> None:
        pass

    def propose(self, sequences: abc.Sequence[Sequence], room: int) -> dict[int, list[int]]:
        drafts = {}
        for sequence in sequences:
            count = min(self.random.randint(0, self.most), room, sequence.group.limit - len(sequence.token_ids) - 1)
            if count > 0:
                drafts[sequence.id] = self.guess(sequence, count)
                room -= count
        return drafts

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        prefix, (request,) = prefix_digests(sequence.token_ids)[-1], sequence.sample_requests
        guessed: list[int] = []
        for _ in range(count):
            is_right = self.random.random() < self.right
            token_id = next_token(prefix, request.seed) if is_right else self.random.randrange(VOCAB_SIZE)
            guessed.append(token_id)
            prefix = digest(prefix, token_id)
        return guessed


class Reminder(Guesser):
    """Guesses what another run drew: ``outputs`` are the tokens of each choice of each request."""

    def __init__(self, random: Random, outputs: abc.Sequence[abc.Sequence[abc.Sequence[int]]], vocab_size: int) -> None:
        super().__init__(random)
        self.outputs, self.vocab_size = outputs, vocab_size

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        drawn = self.outputs[int(sequence.request.request_id)][sequence.index][sequence.num_output :][:count]
        drawn = [*drawn, *(self.random.randrange(self.vocab_size) for _ in range(count - len(drawn)))]
        return [t if self.random.random() < self.right else self.random.randrange(self.vocab_size) for t in drawn]


def guess(scheduler: Scheduler, seed: int) -> None:
    """Has the scheduler guess tokens."""
    scheduler._batch_scheduler.speculator = Guesser(Random(seed))
