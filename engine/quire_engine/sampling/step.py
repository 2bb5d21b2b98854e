"""From the logits of one step to its result: which draw is made how. Knows plans and rows of logits, no model.

Draws are sorted into groups that are made alike, so that a draw pays for what it asks for and nothing else: a greedy
one is an argmax of the model's own logits, and only rows that a processor changes are copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_engine.sampling.grammar_mask import MaskFiller, Masks, PendingMasks, grammar_param, no_masks
from quire_engine.sampling.logprobs import token_logprobs
from quire_engine.sampling.processors import process
from quire_engine.sampling.ranking import best
from quire_engine.sampling.rows import SamplingRows
from quire_engine.sampling.sampler import finite_rows, most_probable, sample
from quire_engine.sampling.state import SequenceState, SequenceStates
from quire_engine.scheduling.plan import Candidates, Draw, StepResult


@dataclass(frozen=True, slots=True)
class PendingDraws:
    """The draws of a step whose logits are being computed, and the masks that are being filled meanwhile."""

    states: list[SequenceState]
    masks: PendingMasks | None

    def collect(self) -> Masks:
        """Waits for the masks."""
        return no_masks() if self.masks is None else self.masks.collect()


@dataclass(frozen=True, slots=True)
class _Group:
    """Draws that are made alike, and the row of the logits that each is made from."""

    states: list[SequenceState] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, state: SequenceState, row: int) -> None:
        self.states.append(state)
        self.rows.append(row)

    def only(self, kept: Sequence[bool]) -> "_Group":
        """The draws whose place in ``kept`` is true."""
        group = _Group()
        for state, row, keep in zip(self.states, self.rows, kept, strict=True):
            if keep:
                group.add(state, row)
        return group

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each draw, [D, V]; without a copy where they are all of ``logits`` in their order."""
        if self.rows == list(range(len(logits))):
            return logits
        return logits.index_select(0, torch.tensor(self.rows, dtype=torch.int64, device=logits.device))

    def copy(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each draw as float32 [D, V], which may be changed."""
        taken = self.take(logits)
        return taken.to(torch.float32, copy=taken is logits)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The draws of a step. Those of ``told`` are in one of the others too."""

    greedy: _Group = field(default_factory=_Group)
    random: _Group = field(default_factory=_Group)
    processed: _Group = field(default_factory=_Group)
    beams: _Group = field(default_factory=_Group)
    told: _Group = field(default_factory=_Group)

    def add(self, state: SequenceState, row: int) -> None:
        self._of(state).add(state, row)
        if state.wants_logprobs:
            self.told.add(state, row)

    def _of(self, state: SequenceState) -> _Group:
        if state.is_beam:
            return self.beams
        if state.is_processed:
            return self.processed
        return self.greedy if state.greedy else self.random


class StepSampler:
    """Makes the draws of one step after the other, and keeps what their sequences need for the next. Used by one
    thread.
    """

    def __init__(self, vocab_size: int) -> None:
        self._states = SequenceStates(vocab_size)
        self._filler = MaskFiller(vocab_size)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is kept for sequences that have ended."""
        self._states.drop(sequence_ids)

    def begin(self, draws: Sequence[Draw]) -> PendingDraws:
        """Looks up what the draws need, and begins to fill the masks of those that have a grammar."""
        states = [self._states.of(draw) for draw in draws]
        return PendingDraws(states, self._filler.start([state.place for state in states if state.place is not None]))

    def finish(self, pending: PendingDraws, logits: torch.Tensor, rows: Sequence[int], result: StepResult) -> None:
        """Writes into ``result`` what each draw makes of its row of ``logits`` [R, V], any float dtype: ``rows[i]`` is
        the row of draw i. A draw that has an error there already is left out.
        """
        groups = _sort(pending.states, logits, rows, result)
        if groups.greedy.states:
            _report(groups.greedy, most_probable(groups.greedy.take(logits)), result)
        if groups.random.states:
            _report(groups.random, sample(groups.random.copy(logits), _columns(groups.random)), result)
        if groups.processed.states or groups.beams.states:
            masks = pending.collect()
            _draw_processed(groups.processed, logits, masks, result)
            _find_candidates(groups.beams, logits, masks, result)
        _tell_logprobs(groups.told, logits, result)

    def close(self) -> None:
        """Ends the thread that fills masks."""
        self._filler.close()


def not_finite() -> QuireError:
    """The error of a sequence whose logits are no numbers."""
    return QuireError(ErrorCode.INTERNAL, "The model computed numbers that are not finite for this request.")


def _sort(states: Sequence[SequenceState], logits: torch.Tensor, rows: Sequence[int], result: StepResult) -> _Groups:
    """The draws that can be made, by how; the others' errors are written."""
    finite, groups = finite_rows(logits).tolist(), _Groups()
    for state, row in zip(states, rows, strict=True):
        if state.sequence_id in result.errors:
            continue
        if finite[row]:
            groups.add(state, row)
        else:
            result.errors[state.sequence_id] = not_finite()
    return groups


def _columns(group: _Group) -> SamplingRows:
    draws = [state.draw for state in group.states]
    seeds, positions = [draw.seed for draw in draws], [len(draw.token_ids) for draw in draws]
    return SamplingRows.of([draw.params for draw in draws], seeds, positions)


def _report(group: _Group, token_ids: torch.Tensor, result: StepResult) -> None:
    result.token_ids.update(zip([state.sequence_id for state in group.states], token_ids.tolist(), strict=True))


def _draw_processed(group: _Group, logits: torch.Tensor, masks: Masks, result: StepResult) -> None:
    group = _without_errors(group, masks, result)
    group, scores = _processed(group, group.copy(logits), masks, result)
    if group.states:
        _report(group, sample(scores, _columns(group)), result)


def _find_candidates(group: _Group, logits: torch.Tensor, masks: Masks, result: StepResult) -> None:
    """Normalised first and processed then, as in transformers' beam search."""
    group = _without_errors(group, masks, result)
    group, scores = _processed(group, group.take(logits).float().log_softmax(-1), masks, result)
    if not group.states:
        return
    values, ids = best(scores, max(state.draw.num_candidates for state in group.states))
    for state, token_ids, logprobs in zip(group.states, ids.tolist(), values.tolist(), strict=True):
        count = min(state.draw.num_candidates, sum(logprob > -torch.inf for logprob in logprobs))
        result.candidates[state.sequence_id] = Candidates(token_ids[:count], logprobs[:count])


def _without_errors(group: _Group, masks: Masks, result: StepResult) -> _Group:
    """The draws whose grammar can go on; the others' errors are written."""
    failed = [masks.errors.get(state.sequence_id) for state in group.states]
    for state, error in zip(group.states, failed, strict=True):
        if error is not None:
            result.errors[state.sequence_id] = error
    return group.only([error is None for error in failed])


def _processed(group: _Group, scores: torch.Tensor, masks: Masks, result: StepResult) -> tuple[_Group, torch.Tensor]:
    """The draws that have a token left after the processors, and their scores; the others' errors are written."""
    if not group.states:
        return group, scores
    process(scores, group.states, masks)
    possible = scores.amax(-1) > -torch.inf
    if bool(possible.all()):
        return group, scores
    kept = possible.tolist()
    for state, keep in zip(group.states, kept, strict=True):
        if not keep:
            result.errors[state.sequence_id] = _nothing_allowed(state.draw)
    return group.only(kept), scores[possible]


def _nothing_allowed(draw: Draw) -> QuireError:
    param = grammar_param(draw) if draw.grammar else "bad_words" if draw.params.bad_words else "min_tokens"
    return invalid(param, f"The output cannot go on: {param} and what it is combined with allow no token any more.")


def _tell_logprobs(group: _Group, logits: torch.Tensor, result: StepResult) -> None:
    group = group.only([state.sequence_id in result.token_ids for state in group.states])
    if not group.states:
        return
    ids = [state.sequence_id for state in group.states]
    num_top = [state.draw.params.logprobs or 0 for state in group.states]
    told = token_logprobs(group.take(logits), [result.token_ids[id] for id in ids], num_top)
    result.logprobs.update(zip(ids, told, strict=True))
