"""Draws the tokens of one step from its logits.

Sample requests are sorted into groups that are sampled alike, so that each pays for what it asks for and nothing else:
a greedy one is an argmax of the model's own logits, only rows that a logits processor changes are copied, and only rows
that ask for log-probabilities are normalised.

On a GPU the step's forward pass may still run when its tokens are drawn, so nothing is read from the device on the way:
whatever can go wrong becomes a flag that is read with the tokens. On the CPU there is nothing to wait for, and results
are read in between where that saves work.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.sampling import TokenLogprobs

from quire_engine.core.step import BeamCandidates, ModelOutput, SampleRequest, ScheduledChunk
from quire_engine.device.accelerator import HostCopy, upload_arrays
from quire_engine.sampling.grammar_bitmask import (
    NO_GRAMMARS,
    BitmaskFiller,
    GrammarBitmask,
    PendingBitmask,
    grammar_param,
)
from quire_engine.sampling.logits_processors import SequenceSamplingState, apply_logits_processors
from quire_engine.sampling.metadata import SamplingMetadata, TokenArray
from quire_engine.sampling.sample_kernel import SampledRows, sample_rows
from quire_engine.sampling.sample_ops import (
    compute_logprobs,
    finite_rows,
    lowest_argmax,
    max_rows_at_once,
    sample,
    stable_topk,
    to_token_logprobs,
    token_logprobs,
)


@dataclass(frozen=True, slots=True)
class SamplingGroup:
    """Sample requests that are sampled alike: the state of each one's sequence, its index among the step's sample
    requests, and its row of the logits.
    """

    states: list[SequenceSamplingState] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def joined(self, other: "SamplingGroup") -> "SamplingGroup":
        """The sample requests of both groups."""
        return SamplingGroup(self.states + other.states, self.indices + other.indices, self.rows + other.rows)

    def without(self, sequence_ids: Container[int]) -> "SamplingGroup":
        """The sample requests of all other sequences."""
        kept = [i for i, state in enumerate(self.states) if state.sequence_id not in sequence_ids]
        return SamplingGroup(
            [self.states[i] for i in kept],
            [self.indices[i] for i in kept],
            [self.rows[i] for i in kept],
        )

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each sample request, [D, V]; ``logits`` itself, not copied, if they are all of its rows in
        order.
        """
        return select_rows(logits, self.rows)

    def select_copy(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits of each sample request, float32 [D, V]."""
        taken = self.select(logits)
        return taken.to(torch.float32, copy=taken is logits)

    def sampling_metadata(self) -> SamplingMetadata:
        """The sampling parameters of each sample request."""
        requests = [state.sample_request for state in self.states]
        seeds, positions = [request.seed for request in requests], [len(request.token_ids) for request in requests]
        return SamplingMetadata.from_params([request.params for request in requests], seeds, positions)


@dataclass(frozen=True, slots=True)
class SamplingGroups:
    """The sample requests of a step, grouped by how they are sampled. Those of ``with_logprobs`` are in another group
    too.
    """

    greedy: SamplingGroup = field(default_factory=SamplingGroup)
    random: SamplingGroup = field(default_factory=SamplingGroup)
    processed: SamplingGroup = field(default_factory=SamplingGroup)
    beams: SamplingGroup = field(default_factory=SamplingGroup)
    with_logprobs: SamplingGroup = field(default_factory=SamplingGroup)

    @classmethod
    def from_states(cls, states: Sequence[SequenceSamplingState], rows: Sequence[int]) -> "SamplingGroups":
        """Sorts the sample requests of ``states``, each sampled from its row of ``rows``."""
        groups = cls()
        for index, (state, row) in enumerate(zip(states, rows, strict=True)):
            if state.is_beam:
                group = groups.beams
            elif state.has_processors or (state.bans is not None and state.bans.token_ids()):
                group = groups.processed
            else:
                group = groups.greedy if state.greedy else groups.random
            for each in (group, groups.with_logprobs) if state.wants_logprobs and not state.is_beam else (group,):
                each.states.append(state)
                each.indices.append(index)
                each.rows.append(row)
        return groups

    def without(self, failed: Container[int]) -> "SamplingGroups":
        """The groups without the sequences ``failed``, whose grammars have failed."""
        return replace(self, processed=self.processed.without(failed), beams=self.beams.without(failed))


def select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``rows`` of ``values`` [R, ...]; ``values`` itself, not copied, if they are all of its rows in order."""
    if list(rows) == list(range(len(values))):
        return values
    return values.index_select(0, upload_arrays((index_array(rows),), values.device)[0])


def index_array(indices: Sequence[int]) -> TokenArray:
    """Indices as int64, to be uploaded."""
    return np.array(indices, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HostCopies:
    """What is copied to the host; None for what no sample request asks for.

    ``sampled``: the token ids [D] int64, and which rows of the logits are finite, [R] bool. ``allowed`` [D] bool: for
    which sample requests of the group ``processed`` any token is allowed. ``candidates``: log-probabilities and token
    ids of the group ``beams``, both [D, C], and for which of them any token is allowed, [D] bool. ``logprobs``: of the
    group ``with_logprobs``, as ``compute_logprobs`` returns them.
    """

    sampled: HostCopy
    allowed: HostCopy | None
    candidates: HostCopy | None
    logprobs: HostCopy | None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was sampled in a step. ``token_ids`` [D] int64 are on the device of the logits, in the order of the sample
    requests, for the next step to read; one that fails or that is a beam's has token 0.
    """

    token_ids: torch.Tensor
    _states: Sequence[SequenceSamplingState]
    _rows: Sequence[int]
    _groups: SamplingGroups
    _grammar_errors: Mapping[int, QuireError]
    _copies: HostCopies

    def fetch_into(self, model_output: ModelOutput) -> None:
        """Waits until the tokens are drawn, and writes into ``model_output`` what came of each sample request: a token,
        with its log-probabilities where they are asked for, candidates, or an error. One that has an error there
        already is left out.
        """
        copies = self._copies
        token_ids, finite = copies.sampled.wait()
        row_is_finite = finite.tolist()
        may_forbid = copies.allowed is not None or copies.candidates is not None
        if may_forbid or self._grammar_errors or not all(row_is_finite):
            self._fetch_errors(row_is_finite, model_output)
        for state, token_id in zip(self._states, token_ids.tolist(), strict=True):
            if not state.is_beam and state.sequence_id not in model_output.errors:
                model_output.token_ids[state.sequence_id] = token_id
        if copies.logprobs is not None:
            self._fetch_logprobs(copies.logprobs, model_output)
        if copies.candidates is not None:
            self._fetch_candidates(copies.candidates, model_output)

    def _fetch_errors(self, row_is_finite: Sequence[bool], model_output: ModelOutput) -> None:
        """Writes what went wrong, for each sample request the first error."""
        for state, row in zip(self._states, self._rows, strict=True):
            if not row_is_finite[row]:
                model_output.errors.setdefault(state.sequence_id, non_finite_error())
            elif state.sequence_id in self._grammar_errors:
                model_output.errors.setdefault(state.sequence_id, self._grammar_errors[state.sequence_id])
        groups = (self._groups.processed, self._copies.allowed), (self._groups.beams, self._copies.candidates)
        for group, copy in groups:
            if copy is not None:
                for state, is_allowed in zip(group.states, copy.wait()[-1].tolist(), strict=True):
                    if not is_allowed:
                        model_output.errors.setdefault(state.sequence_id, _no_token_allowed_error(state.sample_request))

    def _fetch_logprobs(self, copy: HostCopy, model_output: ModelOutput) -> None:
        group = self._groups.with_logprobs
        logprobs_of = to_token_logprobs(copy.wait(), num_top_logprobs(group))
        for state, logprobs in zip(group.states, logprobs_of, strict=True):
            if state.sequence_id in model_output.token_ids:
                model_output.logprobs[state.sequence_id] = logprobs

    def _fetch_candidates(self, copy: HostCopy, model_output: ModelOutput) -> None:
        values, ids = (tensor.tolist() for tensor in copy.wait()[:2])
        for state, token_ids, logprobs in zip(self._groups.beams.states, ids, values, strict=True):
            if state.sequence_id not in model_output.errors:
                count = min(state.sample_request.num_candidates, sum(logprob > -torch.inf for logprob in logprobs))
                model_output.candidates[state.sequence_id] = BeamCandidates(token_ids[:count], logprobs[:count])


@dataclass(frozen=True, slots=True)
class PlainSamplerOutput:
    """What was sampled in a step whose draws are all plain, as ``SamplerOutput``."""

    token_ids: torch.Tensor
    sequence_ids: Sequence[int]
    _copy: HostCopy

    def fetch_into(self, model_output: ModelOutput) -> None:
        """See ``SamplerOutput.fetch_into``."""
        token_ids, finite = self._copy.wait()
        drawn = dict(zip(self.sequence_ids, token_ids.tolist(), strict=True))
        failed = [] if finite.all() else (~finite).nonzero().flatten().tolist()
        for index in failed:
            model_output.errors.setdefault(self.sequence_ids[index], non_finite_error())
        for sequence_id in model_output.errors:
            drawn.pop(sequence_id, None)
        model_output.token_ids.update(drawn)


def num_top_logprobs(group: SamplingGroup) -> list[int]:
    """How many of the most probable tokens each sample request wants with its own."""
    return [state.sample_request.params.logprobs or 0 for state in group.states]


def non_finite_error() -> QuireError:
    """The error of a sequence whose logits are not finite."""
    return QuireError(ErrorCode.INTERNAL, "The model computed numbers that are not finite for this request.")


def _no_token_allowed_error(request: SampleRequest) -> QuireError:
    param = grammar_param(request) if request.grammar else "bad_words" if request.params.bad_words else "min_tokens"
    return invalid(param, f"The output cannot go on: {param} and what it is combined with allow no token any more.")


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The sample requests of a step whose logits are being computed, and the grammar bitmask that is being filled
    meanwhile; None where none has a grammar.
    """

    states: list[SequenceSamplingState]
    bitmask: PendingBitmask | None


MAX_CACHED_SEQUENCES = 1 << 16


class Sampler:
    """Samples the tokens of one step after the other, and caches what their sequences need for the next. Used by one
    thread. ``allow_sync``: whether sampling may wait for the device where that saves it work; by default only on the
    CPU. It makes no difference to what is drawn.
    """

    def __init__(self, vocab_size: int, *, allow_sync: bool | None = None) -> None:
        self.vocab_size = vocab_size
        self._states: dict[int, SequenceSamplingState] = {}
        self._filler = BitmaskFiller(vocab_size)
        self._allow_sync = allow_sync

    def remove_finished(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is cached for sequences that have finished; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._states.pop(sequence_id, None)

    def prepare(self, sample_requests: Sequence[SampleRequest]) -> SamplerInput:
        """Looks up the state of each sample request's sequence, and starts to fill the bitmask of those that have a
        grammar. The token lists of these must hold every token before the one to be drawn.
        """
        states = []
        for request in sample_requests:
            if request.draft_of is None:
                states.append(self._state(request))
            else:
                states.append(self._state(request.draft_of).of_draft(request))
        grammars = [state.grammar_state for state in states if state.grammar_state is not None]
        return SamplerInput(states, self._filler.start(grammars) if grammars else None)

    def _state(self, request: SampleRequest) -> SequenceSamplingState:
        """What is cached for the request's sequence."""
        state = self._states.get(request.sequence_id)
        # Cached state is for the same SampleRequest object only: another scheduler may use the same sequence ids.
        if state is None or state.sample_request is not request:
            state = self._states[request.sequence_id] = SequenceSamplingState(request, self.vocab_size)
            if len(self._states) > MAX_CACHED_SEQUENCES:
                del self._states[next(iter(self._states))]
        return state

    def sample(self, prepared: SamplerInput, logits: torch.Tensor, rows: Sequence[int]) -> SamplerOutput:
        """Samples from ``logits`` [R, V], any float dtype: ``rows[i]`` is the row that sample request i draws from.

        Everything is enqueued on the device of ``logits``, which is not waited for; the bitmask, which the host fills,
        is. From then on ``logits`` may be overwritten by what is enqueued later.
        """
        allow_sync = logits.device.type == "cpu" if self._allow_sync is None else self._allow_sync
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        sampling_pass = _SamplingPass(logits, token_ids, allow_sync)
        groups, bitmask = SamplingGroups.from_states(prepared.states, rows), NO_GRAMMARS
        finite = sampling_pass.sample_plain(groups.greedy, groups.random)
        if prepared.bitmask is not None:  # it was being filled meanwhile
            bitmask = prepared.bitmask.wait()
            if bitmask.errors:
                groups = groups.without(bitmask.errors)
        allowed = sampling_pass.sample_processed(groups.processed, bitmask) if groups.processed.states else None
        candidates = sampling_pass.beam_candidates(groups.beams, bitmask) if groups.beams.states else None
        token_ids.mul_(select_rows(finite, rows))
        copies = HostCopies(
            sampled=HostCopy([token_ids, finite]),
            allowed=None if allowed is None else HostCopy([allowed]),
            candidates=None if candidates is None else HostCopy(candidates),
            logprobs=HostCopy(sampling_pass.logprobs(groups.with_logprobs)) if groups.with_logprobs.states else None,
        )
        return SamplerOutput(token_ids, prepared.states, rows, groups, bitmask.errors, copies)

    def sample_plain(
        self, logits: torch.Tensor, metadata: SamplingMetadata | None, sequence_ids: Sequence[int]
    ) -> "PlainSamplerOutput":
        """Samples a token of each sequence from its row of ``logits`` [R, V], as ``sample`` does where nothing is asked
        for but the token; with ``metadata`` None all are greedy.
        """
        allow_sync = logits.device.type == "cpu" if self._allow_sync is None else self._allow_sync
        sampled = None if logits.is_cpu and not allow_sync else sample_rows(logits, np.arange(len(logits)), metadata)
        if sampled is not None:
            token_ids, finite = sampled.token_ids, sampled.finite
        else:
            finite = finite_rows(logits, allow_sync=allow_sync)
            if metadata is None:
                token_ids = lowest_argmax(logits, allow_sync=allow_sync)
            else:
                token_ids = sample(logits.to(torch.float32, copy=True), metadata, allow_sync=allow_sync)
        token_ids.mul_(finite)
        return PlainSamplerOutput(token_ids, sequence_ids, HostCopy([token_ids, finite]))

    def close(self) -> None:
        """Ends the thread that fills bitmasks."""
        self._filler.close()


@dataclass(frozen=True, slots=True)
class _SamplingPass:
    """One step's ``logits`` [R, V], and the ``token_ids`` [D] int64 that are written from them."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    allow_sync: bool

    def write_tokens(self, group: SamplingGroup, token_ids: torch.Tensor) -> None:
        """Writes the tokens [D] of a group."""
        if group.indices == list(range(len(self.token_ids))):
            self.token_ids.copy_(token_ids)
        else:
            (indices,) = upload_arrays((index_array(group.indices),), self.token_ids.device)
            self.token_ids.index_copy_(0, indices, token_ids)

    def sample_plain(self, greedy: SamplingGroup, random: SamplingGroup) -> torch.Tensor:
        """Samples those that have no logits processors. Returns which rows of the logits are finite, [R] bool."""
        both = greedy.joined(random)
        if sampled := self._sample_rows(self.logits, both, both.rows):
            self.write_tokens(both, sampled.token_ids)
            return sampled.finite
        if greedy.states:
            self.write_tokens(greedy, lowest_argmax(greedy.select(self.logits), allow_sync=self.allow_sync))
        if random.states:
            scores = random.select_copy(self.logits)
            self.write_tokens(random, sample(scores, random.sampling_metadata(), allow_sync=self.allow_sync))
        return finite_rows(self.logits, allow_sync=self.allow_sync)

    def sample_processed(self, group: SamplingGroup, bitmask: GrammarBitmask) -> torch.Tensor:
        """Samples those that have logits processors. Returns for which of them any token is allowed, [D] bool."""
        scores = group.select_copy(self.logits)
        apply_logits_processors(scores, group.states, bitmask)
        if sampled := self._sample_rows(scores, group, range(len(scores))):
            token_ids, highest = sampled.token_ids, sampled.highest
        else:
            highest = scores.amax(-1)
            token_ids = sample(scores, group.sampling_metadata(), allow_sync=self.allow_sync)
        allowed = highest > -torch.inf
        self.write_tokens(group, token_ids.mul_(allowed))
        return allowed

    def _sample_rows(self, scores: torch.Tensor, group: SamplingGroup, rows: Sequence[int]) -> SampledRows | None:
        """The group's draws by a compiled kernel; None where there is none. That of the CPU is a wait for it."""
        if scores.is_cpu and not self.allow_sync:
            return None
        metadata = None if all(state.greedy for state in group.states) else group.sampling_metadata()
        return sample_rows(scores, index_array(rows), metadata)

    def beam_candidates(self, group: SamplingGroup, bitmask: GrammarBitmask) -> list[torch.Tensor]:
        """The best candidates of each beam: log-probabilities and token ids, both [D, C], and for which beams any token
        is allowed, [D] bool. Normalised first and processed then, as in transformers' beam search.
        """
        scores = group.select(self.logits).float().log_softmax(-1)
        apply_logits_processors(scores, group.states, bitmask)
        count = max(state.sample_request.num_candidates for state in group.states)
        allowed = scores.amax(-1) > -torch.inf
        return [*stable_topk(scores, count, allow_sync=self.allow_sync), allowed]

    def logprobs(self, group: SamplingGroup) -> list[torch.Tensor]:
        """The log-probabilities of a group's drawn tokens, as ``compute_logprobs`` returns them."""
        token_ids = select_rows(self.token_ids, group.indices)
        num_top = max(num_top_logprobs(group))
        return compute_logprobs(group.select(self.logits), token_ids, num_top, allow_sync=self.allow_sync)


def compute_prompt_logprobs(
    chunks: Sequence[ScheduledChunk],
    rows: torch.Tensor,
    vocab_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    model_output: ModelOutput,
) -> None:
    """Writes ``model_output.prompt_logprobs`` of ``chunks``, all of which have targets. ``rows`` [N] int64 are the
    batch rows of the tokens that the targets follow, chunk after chunk, and ``logits_of`` computes the logits [R, V] of
    some of them. If logits of a chunk are not finite, its sequence and those to be drawn from it get an error. Waits
    for the device after each span of the rows, so that only one span's logits are in memory.
    """
    targets = [target for chunk in chunks for target in chunk.prompt_logprob_targets]
    num_top = [chunk.num_prompt_logprobs for chunk in chunks for _ in chunk.prompt_logprob_targets]
    size, logprobs = max_rows_at_once(vocab_size), []
    for start in range(0, len(targets), size):
        span = slice(start, start + size)
        logprobs += _logprobs_if_finite(logits_of(rows[span]), targets[span], num_top[span])
    remaining = iter(logprobs)
    for chunk in chunks:
        _write_prompt_logprobs(chunk, list(islice(remaining, len(chunk.prompt_logprob_targets))), model_output)


def _logprobs_if_finite(
    logits: torch.Tensor, targets: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs | None]:
    """The log-probabilities of each row; None where its logits are not finite."""
    finite = finite_rows(logits).tolist()
    logprobs = token_logprobs(logits, targets, num_top)
    return [each if is_finite else None for each, is_finite in zip(logprobs, finite, strict=True)]


def _write_prompt_logprobs(
    chunk: ScheduledChunk, logprobs: Sequence[TokenLogprobs | None], model_output: ModelOutput
) -> None:
    finite = [each for each in logprobs if each is not None]
    if len(finite) == len(logprobs):
        model_output.prompt_logprobs[chunk.sequence_id] = finite
        return
    ids = (chunk.sequence_id, *(request.sequence_id for request in chunk.sample_requests))
    model_output.errors.update((sequence_id, non_finite_error()) for sequence_id in ids)
