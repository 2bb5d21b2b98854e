"""What a step has drawn while it is on its way to the host, and what is made of it there. Knows no logits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_engine.device.transfers import Download
from quire_engine.sampling.grammar_mask import grammar_param
from quire_engine.sampling.groups import Group, Groups
from quire_engine.sampling.logprobs import as_logprobs
from quire_engine.sampling.state import SequenceState
from quire_engine.scheduling.plan import BeamCandidates, ModelOutput, SampleRequest


@dataclass(frozen=True, slots=True)
class Downloads:
    """What the host will read. ``checks``: which rows of the logits are finite, and which draws of ``processed`` and
    then ``beams`` have a token left. ``told`` and ``candidates``: as ``measure_logprobs`` and ``best`` made them.
    """

    token_ids: Download
    checks: Download
    told: Download
    candidates: Download


@dataclass(frozen=True, slots=True)
class Drawn:
    """The draws of a step. ``token_ids`` [D] int64 are on the device of the logits, in the order of the draws, for
    whatever comes next there; a draw that fails or that is a beam's has token 0.
    """

    token_ids: torch.Tensor
    _states: Sequence[SequenceState]
    _rows: Sequence[int]
    _groups: Groups
    _grammar_errors: Mapping[int, QuireError]
    _downloads: Downloads

    def collect(self, result: ModelOutput) -> None:
        """Waits until the draws are made, and writes into ``result`` what came of each: a token, with its
        log-probabilities where they are asked for, candidates, or an error. A draw that has an error there already is
        left out.
        """
        for state, error in self._failures():
            result.errors.setdefault(state.sequence_id, error)
        (token_ids,) = self._downloads.token_ids.wait()
        for state, token_id in zip(self._states, token_ids.tolist(), strict=True):
            if not state.is_beam and state.sequence_id not in result.errors:
                result.token_ids[state.sequence_id] = token_id
        self._collect_logprobs(result)
        self._collect_candidates(result)

    def _failures(self) -> Iterator[tuple[SequenceState, QuireError]]:
        """What went wrong, for each draw the first thing first."""
        finite, possible = (flags.tolist() for flags in self._downloads.checks.wait())
        for state, row in zip(self._states, self._rows, strict=True):
            if not finite[row]:
                yield state, not_finite()
            elif state.sequence_id in self._grammar_errors:
                yield state, self._grammar_errors[state.sequence_id]
        processed = self._groups.processed.states + self._groups.beams.states
        yield from (
            (state, _nothing_allowed(state.draw))
            for state, is_possible in zip(processed, possible, strict=True)
            if not is_possible
        )

    def _collect_logprobs(self, result: ModelOutput) -> None:
        group = self._groups.told
        made = as_logprobs(self._downloads.told.wait(), numbers_told(group))
        for state, logprobs in zip(group.states, made, strict=True):
            if state.sequence_id in result.token_ids:
                result.logprobs[state.sequence_id] = logprobs

    def _collect_candidates(self, result: ModelOutput) -> None:
        group = self._groups.beams
        if not group:
            return
        values, ids = (part.tolist() for part in self._downloads.candidates.wait())
        for state, token_ids, logprobs in zip(group.states, ids, values, strict=True):
            if state.sequence_id not in result.errors:
                count = min(state.draw.num_candidates, sum(logprob > -torch.inf for logprob in logprobs))
                result.candidates[state.sequence_id] = BeamCandidates(token_ids[:count], logprobs[:count])


def numbers_told(group: Group) -> list[int]:
    """How many of the most probable tokens each draw asks for."""
    return [state.draw.params.logprobs or 0 for state in group.states]


def not_finite() -> QuireError:
    """The error of a sequence whose logits are no numbers."""
    return QuireError(ErrorCode.INTERNAL, "The model computed numbers that are not finite for this request.")


def _nothing_allowed(draw: SampleRequest) -> QuireError:
    param = grammar_param(draw) if draw.grammar else "bad_words" if draw.params.bad_words else "min_tokens"
    return invalid(param, f"The output cannot go on: {param} and what it is combined with allow no token any more.")
