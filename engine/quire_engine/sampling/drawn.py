"""The tokens that a step has drawn, while they are copied to the host, and the result that is made of them there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_engine.device.transfers import HostCopy
from quire_engine.sampling.grammar_mask import grammar_param
from quire_engine.sampling.groups import DrawGroup, DrawGroups
from quire_engine.sampling.logprobs import to_token_logprobs
from quire_engine.sampling.state import SequenceSamplingState
from quire_engine.scheduling.plan import BeamCandidates, ModelOutput, SampleRequest


@dataclass(frozen=True, slots=True)
class HostCopies:
    """What is copied to the host; None for what no draw asks for.

    ``finite`` [R] bool: which rows of the logits are finite. ``allowed`` [D] bool: for which draws of the group
    ``processed`` any token is allowed. ``candidates``: log-probabilities and token ids of the group ``beams``, both [D,
    C], and for which of them any token is allowed, [D] bool. ``logprobs``: of the group ``with_logprobs``, as
    ``compute_logprobs`` returns them.
    """

    token_ids: HostCopy
    finite: HostCopy
    allowed: HostCopy | None
    candidates: HostCopy | None
    logprobs: HostCopy | None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The draws of a step. ``token_ids`` [D] int64 are on the device of the logits, in the order of the draws, for the
    next step to read; a draw that fails or that is a beam's has token 0.
    """

    token_ids: torch.Tensor
    _states: Sequence[SequenceSamplingState]
    _rows: Sequence[int]
    _groups: DrawGroups
    _grammar_errors: Mapping[int, QuireError]
    _copies: HostCopies

    def fetch_into(self, result: ModelOutput) -> None:
        """Waits until the draws are made, and writes into ``result`` what came of each: a token, with its
        log-probabilities where they are asked for, candidates, or an error. A draw that has an error there already is
        left out.
        """
        self._fetch_errors(result)
        (token_ids,) = self._copies.token_ids.wait()
        for state, token_id in zip(self._states, token_ids.tolist(), strict=True):
            if not state.is_beam and state.sequence_id not in result.errors:
                result.token_ids[state.sequence_id] = token_id
        if self._copies.logprobs is not None:
            self._fetch_logprobs(self._copies.logprobs, result)
        if self._copies.candidates is not None:
            self._fetch_candidates(self._copies.candidates, result)

    def _fetch_errors(self, result: ModelOutput) -> None:
        """Writes what went wrong, for each draw the first error."""
        finite = self._copies.finite.wait()[0].tolist()
        for state, row in zip(self._states, self._rows, strict=True):
            if not finite[row]:
                result.errors.setdefault(state.sequence_id, non_finite_error())
            elif state.sequence_id in self._grammar_errors:
                result.errors.setdefault(state.sequence_id, self._grammar_errors[state.sequence_id])
        groups = (self._groups.processed, self._copies.allowed), (self._groups.beams, self._copies.candidates)
        for group, copy in groups:
            if copy is not None:
                for state, is_allowed in zip(group.states, copy.wait()[-1].tolist(), strict=True):
                    if not is_allowed:
                        result.errors.setdefault(state.sequence_id, _no_token_allowed_error(state.draw))

    def _fetch_logprobs(self, copy: HostCopy, result: ModelOutput) -> None:
        group = self._groups.with_logprobs
        logprobs_of = to_token_logprobs(copy.wait(), num_top_logprobs(group))
        for state, logprobs in zip(group.states, logprobs_of, strict=True):
            if state.sequence_id in result.token_ids:
                result.logprobs[state.sequence_id] = logprobs

    def _fetch_candidates(self, copy: HostCopy, result: ModelOutput) -> None:
        values, ids = (part.tolist() for part in copy.wait()[:2])
        for state, token_ids, logprobs in zip(self._groups.beams.states, ids, values, strict=True):
            if state.sequence_id not in result.errors:
                count = min(state.draw.num_candidates, sum(logprob > -torch.inf for logprob in logprobs))
                result.candidates[state.sequence_id] = BeamCandidates(token_ids[:count], logprobs[:count])


def num_top_logprobs(group: DrawGroup) -> list[int]:
    """How many of the most probable tokens each draw wants with its own."""
    return [state.draw.params.logprobs or 0 for state in group.states]


def non_finite_error() -> QuireError:
    """The error of a sequence whose logits are not finite."""
    return QuireError(ErrorCode.INTERNAL, "The model computed numbers that are not finite for this request.")


def _no_token_allowed_error(draw: SampleRequest) -> QuireError:
    param = grammar_param(draw) if draw.grammar else "bad_words" if draw.params.bad_words else "min_tokens"
    return invalid(param, f"The output cannot go on: {param} and what it is combined with allow no token any more.")
