"""Speculation without a draft model: tokens of a sequence are guessed where its text repeats itself, as far as it pays.

A step computes a sequence's last known token and its drafts together, and draws a token behind each. As a draw depends
on nothing but the seed, the position and the logits, each is the one that would have been drawn without drafts, and a
draft is right where it equals it: outputs are the same with speculation and without, sampled ones too.
"""

from collections import abc
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TYPE_CHECKING

from quire_engine.core.draft_proposers import HitRates, NgramProposer, SuffixProposer
from quire_engine.core.executor import Rates
from quire_engine.core.request import Sequence
from quire_engine.core.step import SchedulerOutput, StepTimings
from quire_engine.core.step_time_model import StepTimeEstimator, StepWork

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig

_MARGIN = 1.05  # what a draft has to bring, relative to its cost: models of times are not exact
_WARM = 3  # steps before their times count: the first pay for what is built once


class Speculator:
    """Chooses the drafts of a step: those with which it makes most tokens a second, by the times of past steps and the
    probability of each.

    ``times`` is the step-time model of the steps that compute no prompts. That of all steps, by which prompts are
    scheduled and routed, knows less of them, and waits for several prompts.
    """

    def __init__(self, config: "SchedulerConfig", rates: Rates) -> None:
        self._method = config.speculative_method
        self._most = config.num_speculative_tokens
        self._shortest = config.prompt_lookup_min
        self._longest = config.prompt_lookup_max
        self._hit_rates = HitRates()
        self._num_steps = 0
        self._seconds = 0.0
        self.times = StepTimeEstimator(rates, 0, warm=0)

    def observe(self, scheduler_output: SchedulerOutput, timings: StepTimings) -> None:
        """Takes in how long a step took."""
        work, seconds = StepWork.of(scheduler_output), timings.forward + timings.sample
        if not work.prompt_tokens and work.sequences:
            self._num_steps += 1
            self._seconds += seconds
            if self._num_steps > _WARM:
                self.times.observe(work, seconds, self._seconds)

    def propose(self, sequences: abc.Sequence[Sequence], room: int) -> dict[int, list[int]]:
        """Drafts by sequence id, at most ``room`` in all, for a step that computes one known token of each sequence.

        One more is worth it while the probability that it makes a token is above what the step makes in the time that
        it costs. The most probable come first, so that the first that is not ends the choice.
        """
        guesses = [islice(self._proposer(sequence).guesses(), self._limit(sequence)) for sequence in sequences]
        model, drafts = self.times.model, dict[int, list[int]]()
        if model is None:
            return drafts
        context = sum([len(sequence.token_ids) for sequence in sequences])
        tokens, seconds = float(len(sequences)), model.predict(StepWork(0, len(sequences), 0.0, context))
        cost = model.sequence_seconds + model.context_seconds
        firsts = [(index, next(guessed, None)) for index, guessed in enumerate(guesses)]
        best = [(-first[1], index, first[0]) for index, first in firsts if first is not None]
        heapify(best)
        while best and room > 0:
            gain, index, token_id = -best[0][0], *best[0][1:]
            if gain * seconds <= _MARGIN * cost * tokens:
                break
            tokens, seconds, room = tokens + gain, seconds + cost, room - 1
            drafts.setdefault(sequences[index].id, []).append(token_id)
            following = next(guesses[index], None)
            if following is None:
                heappop(best)
            else:
                heapreplace(best, (-gain * following[1], index, following[0]))
        return drafts

    def _proposer(self, sequence: Sequence) -> NgramProposer | SuffixProposer:
        """The sequence's own, which knows all its tokens."""
        proposer = sequence.proposer
        if proposer is None:
            proposer = sequence.proposer = (
                SuffixProposer(sequence.token_ids, HitRates(self._hit_rates))
                if self._method == "suffix"
                else NgramProposer(sequence.token_ids, self._shortest, self._longest)
            )
        proposer.update()
        return proposer

    def _limit(self, sequence: Sequence) -> int:
        """The most drafts of a sequence: one more token is drawn behind them, and it may be the last."""
        return max(0, min(self._most, sequence.limit - len(sequence.token_ids) - 1))


def can_take_drafts(running: Iterable[Sequence]) -> bool:
    """Whether the next step draws one token of each running sequence, and nothing else: then it may have drafts."""
    return all(each.num_unscheduled_tokens == 1 and len(each.sample_requests) == 1 for each in running)
