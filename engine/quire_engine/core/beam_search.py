"""Beam search as arithmetic on candidates: which beams continue, which are finished, and when the search ends.

The rules are the same as in transformers, so that the same model gives the same beams. A step looks at the best ``width
* max(2, 1 + stop tokens)`` continuations of all beams together. A continuation that ends becomes a hypothesis if it is
among the best ``width``. The best ``width`` that do not end continue.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from quire_proto.sampling import FinishReason, SamplingParams

from quire_engine.core.step import BeamCandidates


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam ``parent`` with one more token. ``logprob`` is the sum over all its output tokens."""

    parent: int
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output: its tokens without a stop token, its score, and why it ended."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The search of one request.

    ``logprobs`` belong to the beams that continue, best first. ``finished`` holds at most ``width`` hypotheses, best
    first. ``length`` counts the output tokens of every beam.
    """

    def __init__(self, params: SamplingParams, stop_token_ids: frozenset[int]) -> None:
        self.width = params.beam_width
        self.num_candidates = self.width * max(2, 1 + len(stop_token_ids))
        self.finished: list[Hypothesis] = []
        self.logprobs = [0.0]
        self.length = 0
        self._stop_token_ids = stop_token_ids
        self._max_length = params.max_tokens
        self._penalty = params.length_penalty
        self._early_stopping = params.early_stopping

    def advance(self, beams: Sequence[tuple[list[int], BeamCandidates]]) -> list[Continuation]:
        """Runs one step from each beam's output tokens and candidates, in the order of ``logprobs``. Returns the beams
        that continue, best first; none if the search has ended.
        """
        best = self._best_continuations([candidates for _, candidates in beams])
        self.length += 1
        at_limit = self.length >= self._max_length
        ends = [at_limit or each.token_id in self._stop_token_ids for each in best]
        if not (self._early_stopping is True and self._is_full):
            ended_now = [each for each, ended in zip(best[: self.width], ends, strict=False) if ended]
            self._finish([self._hypothesis(beams[each.parent][0], each) for each in ended_now])
        going_on = [each for each, ended in zip(best, ends, strict=True) if not ended][: self.width]
        self.logprobs = [each.logprob for each in going_on]
        return going_on if going_on and self._can_improve() else []

    def _best_continuations(self, rows: Sequence[BeamCandidates]) -> list[Continuation]:
        """Returns the best continuations of all beams. Ties go to the earlier beam, then to the lower token id."""
        # Each row is sorted already, so merging reads little more than it keeps.
        merged = merge(*(self._continuations(parent, row) for parent, row in enumerate(rows)))
        best = islice(merged, self.num_candidates)
        return [Continuation(parent, token_id, -negative) for negative, parent, token_id in best]

    def _continuations(self, parent: int, row: BeamCandidates) -> Iterator[tuple[float, int, int]]:
        before = self.logprobs[parent]
        for token_id, logprob in zip(row.token_ids, row.logprobs, strict=True):
            yield -(before + logprob), parent, token_id

    def _hypothesis(self, token_ids: list[int], last: Continuation) -> Hypothesis:
        score = self._score(last.logprob, self.length)
        if last.token_id in self._stop_token_ids:
            return Hypothesis(token_ids, score, FinishReason.STOP)
        return Hypothesis([*token_ids, last.token_id], score, FinishReason.LENGTH)

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        self.finished = sorted(self.finished + hypotheses, key=lambda each: -each.score)[: self.width]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.width

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._penalty)

    def _can_improve(self) -> bool:
        """Whether a continuing beam may still beat a hypothesis. This is a guess unless early stopping is "never"."""
        if not self._is_full:
            return True
        if self._early_stopping is True:
            return False
        optimistic = self._early_stopping == "never" and self._penalty > 0
        length = self._max_length if optimistic else self.length
        return self._score(self.logprobs[0], length) > self.finished[-1].score
