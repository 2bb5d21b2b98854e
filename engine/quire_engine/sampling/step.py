"""From the logits of one step to its result: which draw is made how. Knows plans and rows of logits, no model.

Draws are sorted into groups that are made alike, so that a draw pays for what it asks for and nothing else: a greedy
one is an argmax of the model's own logits, only rows that a processor changes are copied, and only rows that ask for
log-probabilities are normalised.

On a device of its own the step's forward pass may still run when its draws are made, so nothing is read from there on
the way: whatever can go wrong becomes a flag that is read with the tokens. Only the CPU, where there is nothing to wait
for, is asked what it has found where that saves work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quire_engine.device.transfers import Download, upload_arrays
from quire_engine.sampling.argmax import lowest_argmax
from quire_engine.sampling.drawn import Downloads, Drawn, numbers_told
from quire_engine.sampling.grammar_mask import MaskFiller, Masks, PendingMasks, no_masks
from quire_engine.sampling.groups import Group, Groups, index_array, take
from quire_engine.sampling.logprobs import measure_logprobs
from quire_engine.sampling.processors import process
from quire_engine.sampling.ranking import best
from quire_engine.sampling.sampler import finite_rows, sample
from quire_engine.sampling.state import SequenceState, SequenceStates
from quire_engine.scheduling.plan import ModelOutput, SampleRequest


@dataclass(frozen=True, slots=True)
class PendingDraws:
    """The draws of a step whose logits are being computed, and the masks that are being filled meanwhile."""

    states: list[SequenceState]
    masks: PendingMasks | None

    def collect(self) -> Masks:
        """Waits for the masks, which the host makes."""
        return no_masks() if self.masks is None else self.masks.collect()


class StepSampler:
    """Makes the draws of one step after the other, and keeps what their sequences need for the next. Used by one
    thread. ``may_wait``: whether a draw may wait for the device where that saves it work; by default only on the CPU.
    It makes no difference to what is drawn.
    """

    def __init__(self, vocab_size: int, *, may_wait: bool | None = None) -> None:
        self._states = SequenceStates(vocab_size)
        self._filler = MaskFiller(vocab_size)
        self._may_wait = may_wait

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is kept for sequences that have ended."""
        self._states.drop(sequence_ids)

    def begin(self, draws: Sequence[SampleRequest]) -> PendingDraws:
        """Looks up what the draws need, and begins to fill the masks of those that have a grammar: their lists hold
        every token before the one to be drawn by now.
        """
        states = [self._states.of(draw) for draw in draws]
        return PendingDraws(states, self._filler.start([state.place for state in states if state.place is not None]))

    def draw(self, pending: PendingDraws, logits: torch.Tensor, rows: Sequence[int]) -> Drawn:
        """Has each draw made from its row of ``logits`` [R, V], any float dtype: ``rows[i]`` is the row of draw i.
        Everything is enqueued on the device of ``logits``, which is not waited for, and from then on ``logits`` may be
        overwritten by what is enqueued later.
        """
        may_wait = logits.device.type == "cpu" if self._may_wait is None else self._may_wait
        step = _Step(logits, torch.zeros(len(rows), dtype=torch.int64, device=logits.device), may_wait)
        groups = _sort(pending.states, rows)
        step.draw_plain(groups)  # while the masks are being filled
        masks = pending.collect()
        groups = groups.without(masks.errors)
        return Drawn(step.token_ids, pending.states, rows, groups, masks.errors, step.draw_rest(groups, masks, rows))

    def finish(self, pending: PendingDraws, logits: torch.Tensor, rows: Sequence[int], result: ModelOutput) -> None:
        """Makes the draws, waits for them, and writes into ``result`` what came of each."""
        self.draw(pending, logits, rows).collect(result)

    def close(self) -> None:
        """Ends the thread that fills masks."""
        self._filler.close()


def _sort(states: Sequence[SequenceState], rows: Sequence[int]) -> Groups:
    """The draws by how they are made."""
    groups = Groups()
    for place, (state, row) in enumerate(zip(states, rows, strict=True)):
        groups.add(state, place, row)
    return groups


@dataclass(frozen=True, slots=True)
class _Step:
    """What the draws of one step are made from, and where their tokens go."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    may_wait: bool

    def draw_plain(self, groups: Groups) -> None:
        """Makes the draws from the model's own logits."""
        if groups.greedy:
            self._put(groups.greedy, lowest_argmax(groups.greedy.take(self.logits), may_wait=self.may_wait))
        if groups.random:
            self._put(groups.random, self._sample(groups.random, groups.random.copy(self.logits)))

    def draw_rest(self, groups: Groups, masks: Masks, rows: Sequence[int]) -> Downloads:
        """Makes the other draws, and sends what the host will ask for on its way."""
        finite = finite_rows(self.logits, may_wait=self.may_wait)
        possible = self._draw_processed(groups.processed, masks)
        possible_beams, *candidates = self._find(groups.beams, masks)
        self.token_ids.mul_(take(finite, rows))
        return Downloads(
            token_ids=Download([self.token_ids]),
            checks=Download([finite, torch.cat((possible, possible_beams))]),
            told=Download(self._measure(groups.told)),
            candidates=Download(candidates),
        )

    def _put(self, group: Group, token_ids: torch.Tensor) -> None:
        if len(group) == len(self.token_ids):
            self.token_ids.copy_(token_ids)
        else:
            (places,) = upload_arrays((index_array(group.places),), self.token_ids.device)
            self.token_ids.index_copy_(0, places, token_ids)

    def _sample(self, group: Group, scores: torch.Tensor) -> torch.Tensor:
        return sample(scores, group.columns(), may_wait=self.may_wait)

    def _draw_processed(self, group: Group, masks: Masks) -> torch.Tensor:
        """Which of the draws have a token left, [D] bool."""
        if not group:
            return self._none()
        scores = group.copy(self.logits)
        process(scores, group.states, masks)
        possible = scores.amax(-1) > -torch.inf
        self._put(group, self._sample(group, scores).mul_(possible))
        return possible

    def _find(self, group: Group, masks: Masks) -> list[torch.Tensor]:
        """Which of the draws have a token left, [D] bool, and the best candidates of each: log-probabilities and token
        ids. Normalised first and processed then, as in transformers' beam search.
        """
        if not group:
            return [self._none()]
        scores = group.take(self.logits).float().log_softmax(-1)
        process(scores, group.states, masks)
        count = max(state.draw.num_candidates for state in group.states)
        return [scores.amax(-1) > -torch.inf, *best(scores, count, may_wait=self.may_wait)]

    def _measure(self, group: Group) -> list[torch.Tensor]:
        """The log-probabilities that draws are told."""
        if not group:
            return []
        token_ids = take(self.token_ids, group.places)
        return measure_logprobs(group.take(self.logits), token_ids, max(numbers_told(group)), may_wait=self.may_wait)

    def _none(self) -> torch.Tensor:
        return torch.ones(0, dtype=torch.bool, device=self.logits.device)
