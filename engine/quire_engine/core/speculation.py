"""Speculative decoding without a draft model: proposes tokens where a sequence's text repeats itself, as long as it
pays off.

A step computes a sequence's last known token and its drafts together, and samples a token after each. Sampling depends
only on the seed, the position and the logits. Each sampled token is therefore the one that would have been sampled
without drafts, and a draft is accepted if it equals that token. Outputs are the same with and without speculation, also
with random sampling.
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

_MARGIN = 1.05  # minimum gain of a draft relative to its cost: time models are not exact
_WARM = 3  # steps that are ignored first: they pay for one-time costs


class Speculator:
    """Chooses the drafts of a step that make the most tokens per second, from past step times and the probability of
    each draft.

    ``times`` models only steps without prompts. The model of all steps, which schedules and routes prompts, is less
    exact for these and needs several prompts first.
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
        """Adds the duration of a step."""
        work, seconds = StepWork.of(scheduler_output), timings.forward + timings.sample
        if not work.prompt_tokens and work.sequences:
            self._num_steps += 1
            self._seconds += seconds
            if self._num_steps > _WARM:
                self.times.observe(work, seconds, self._seconds)

    def propose(self, sequences: abc.Sequence[Sequence], room: int) -> dict[int, list[int]]:
        """Returns drafts by sequence id, at most ``room`` in all, for a step that computes one known token of each
        sequence. A draft is worth it while its probability is above the number of tokens that the step makes in the
        time that the draft costs. The most probable drafts come first, so the first that is not worth it ends the
        choice.
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
        """Returns the sequence's own proposer, up to date with its tokens."""
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
        """Returns the most drafts of a sequence: one more token is sampled after them, and it may be the last."""
        return max(0, min(self._most, sequence.group.limit - len(sequence.token_ids) - 1))


def can_take_drafts(running: Iterable[Sequence]) -> bool:
    """Whether the next step samples exactly one token of each running sequence, and may therefore have drafts."""
    return all(each.num_unscheduled_tokens == 1 and len(each.sample_requests) == 1 for each in running)
