"""Samples the tokens of one step from its logits.

Draws are grouped by how they are sampled, so that each pays only for what it asks for. A greedy draw is an argmax of
the model's own logits, only rows that a logits processor changes are copied, and only rows that ask for
log-probabilities are normalized.

On a GPU the step's forward pass may still run during sampling, so nothing is read from the device: each possible
failure becomes a flag that is read together with the tokens. On the CPU there is nothing to wait for, and results are
read early where that saves work.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_engine.core.step import BeamCandidates, ModelOutput, SampleRequest
from quire_engine.device.accelerator import HostCopy, upload_arrays
from quire_engine.sampling.grammar_bitmask import (
    NO_GRAMMARS,
    AnyBitmaskFiller,
    AnyPendingBitmask,
    BitmaskFiller,
    GrammarBitmask,
    grammar_param,
)
from quire_engine.sampling.logits_processors import Draw, apply_logits_processors
from quire_engine.sampling.metadata import SamplingMetadata, TokenArray
from quire_engine.sampling.sample_kernel import SampledRows, sample_rows
from quire_engine.sampling.sample_ops import (
    compute_logprobs,
    finite_rows,
    lowest_argmax,
    sample,
    stable_topk,
    to_token_logprobs,
)


@dataclass(frozen=True, slots=True)
class SamplingGroup:
    """Draws that are sampled alike. Each has an index among the draws that are sampled at once, and a row of the
    logits.
    """

    draws: list[Draw] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def joined(self, other: "SamplingGroup") -> "SamplingGroup":
        """Returns the draws of both groups."""
        return SamplingGroup(self.draws + other.draws, self.indices + other.indices, self.rows + other.rows)

    def without(self, numbers: Container[int]) -> "SamplingGroup":
        """Returns all draws except the draws with these numbers."""
        kept = [i for i, draw in enumerate(self.draws) if draw.number not in numbers]
        return SamplingGroup(
            [self.draws[i] for i in kept],
            [self.indices[i] for i in kept],
            [self.rows[i] for i in kept],
        )

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits of each draw, [D, V]: ``logits`` itself, without a copy, if the draws use all rows in
        order.
        """
        return select_rows(logits, self.rows)

    def select_copy(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the logits of each draw, float32 [D, V]."""
        taken = self.select(logits)
        return taken.to(torch.float32, copy=taken is logits)

    def sampling_metadata(self) -> SamplingMetadata:
        """Returns the sampling parameters of the draws."""
        requests = [draw.state.sample_request for draw in self.draws]
        seeds, positions = [request.seed for request in requests], [len(draw.known) for draw in self.draws]
        return SamplingMetadata.from_params([request.params for request in requests], seeds, positions)


@dataclass(frozen=True, slots=True)
class SamplingGroups:
    """The draws of a step, grouped by how they are sampled. Draws in ``with_logprobs`` are in another group too."""

    greedy: SamplingGroup = field(default_factory=SamplingGroup)
    random: SamplingGroup = field(default_factory=SamplingGroup)
    processed: SamplingGroup = field(default_factory=SamplingGroup)
    beams: SamplingGroup = field(default_factory=SamplingGroup)
    with_logprobs: SamplingGroup = field(default_factory=SamplingGroup)

    @classmethod
    def from_draws(cls, draws: Sequence[Draw], rows: Sequence[int]) -> "SamplingGroups":
        """Groups ``draws``. Draw i samples from row ``rows[i]``."""
        groups = cls()
        for index, (draw, row) in enumerate(zip(draws, rows, strict=True)):
            state = draw.state
            if state.is_beam:
                group = groups.beams
            elif state.has_processors or (state.bans is not None and state.bans.token_ids(draw.known)):
                group = groups.processed
            else:
                group = groups.greedy if state.greedy else groups.random
            for each in (group, groups.with_logprobs) if state.wants_logprobs and not state.is_beam else (group,):
                each.draws.append(draw)
                each.indices.append(index)
                each.rows.append(row)
        return groups

    def without(self, failed: Container[int]) -> "SamplingGroups":
        """Returns the groups without the draws ``failed``, whose grammars have failed."""
        return replace(self, processed=self.processed.without(failed), beams=self.beams.without(failed))


def select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns ``rows`` of ``values`` [R, ...]: ``values`` itself, without a copy, if they are all its rows in order."""
    if list(rows) == list(range(len(values))):
        return values
    return values.index_select(0, upload_arrays((index_array(rows),), values.device)[0])


def index_array(indices: Sequence[int]) -> TokenArray:
    """Returns indices as int64, to be uploaded."""
    return np.array(indices, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The results that are copied to the host; None for results that no draw asks for.

    * ``sampled``: the token ids, [D] int64, and which rows of the logits are finite, [R] bool.
    * ``allowed``: for which draws of the group ``processed`` any token is allowed, [D] bool.
    * ``candidates``: for the group ``beams``, log-probabilities and token ids, both [D, C], and for which draws any
      token is allowed, [D] bool.
    * ``logprobs``: for the group ``with_logprobs``, the result of ``compute_logprobs``.
    """

    sampled: HostCopy
    allowed: HostCopy | None
    candidates: HostCopy | None
    logprobs: HostCopy | None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step. ``token_ids`` [D] int64 are on the device of the logits, in draw order, so that the
    next step can read them. A draw that fails or belongs to a beam has token 0.
    """

    token_ids: torch.Tensor
    _draws: Sequence[Draw]
    _rows: Sequence[int]
    _groups: SamplingGroups
    _grammar_errors: Mapping[int, QuireError]
    _copies: HostCopies

    def fetch_into(self, model_output: ModelOutput) -> None:
        """Waits for the tokens, and writes the result of each draw into ``model_output``: the token, with
        log-probabilities if asked for, or candidates, or an error. ``model_output.token_ids`` has an entry for each
        draw.
        """
        copies = self._copies
        token_ids, finite = copies.sampled.wait()
        row_is_finite = finite.tolist()
        may_forbid = copies.allowed is not None or copies.candidates is not None
        if may_forbid or self._grammar_errors or not all(row_is_finite):
            self._fetch_errors(row_is_finite, model_output.draw_errors)
        for draw, token_id in zip(self._draws, token_ids.tolist(), strict=True):
            model_output.token_ids[draw.number] = token_id
        if copies.logprobs is not None:
            self._fetch_logprobs(copies.logprobs, model_output)
        if copies.candidates is not None:
            self._fetch_candidates(copies.candidates, model_output)

    def _fetch_errors(self, row_is_finite: Sequence[bool], errors: dict[int, QuireError]) -> None:
        """Writes the first error of each draw."""
        for draw, row in zip(self._draws, self._rows, strict=True):
            if not row_is_finite[row]:
                errors[draw.number] = non_finite_error()
            elif draw.number in self._grammar_errors:
                errors[draw.number] = self._grammar_errors[draw.number]
        groups = (self._groups.processed, self._copies.allowed), (self._groups.beams, self._copies.candidates)
        for group, copy in groups:
            if copy is not None:
                for draw, is_allowed in zip(group.draws, copy.wait()[-1].tolist(), strict=True):
                    if not is_allowed:
                        errors.setdefault(draw.number, _no_token_allowed_error(draw.state.sample_request))

    def _fetch_logprobs(self, copy: HostCopy, model_output: ModelOutput) -> None:
        group = self._groups.with_logprobs
        logprobs_of = to_token_logprobs(copy.wait(), num_top_logprobs(group))
        for draw, logprobs in zip(group.draws, logprobs_of, strict=True):
            if draw.number not in model_output.draw_errors:
                model_output.logprobs[draw.number] = logprobs

    def _fetch_candidates(self, copy: HostCopy, model_output: ModelOutput) -> None:
        values, ids = (tensor.tolist() for tensor in copy.wait()[:2])
        for draw, token_ids, logprobs in zip(self._groups.beams.draws, ids, values, strict=True):
            if draw.number not in model_output.draw_errors:
                most = draw.state.sample_request.num_candidates
                count = min(most, sum(logprob > -torch.inf for logprob in logprobs))
                model_output.candidates[draw.number] = BeamCandidates(token_ids[:count], logprobs[:count])


@dataclass(frozen=True, slots=True)
class PlainSamplerOutput:
    """The sampled tokens of a step whose draws are all plain. Like ``SamplerOutput``."""

    token_ids: torch.Tensor
    _finite: torch.Tensor
    _copy: HostCopy | None

    def fetch_into(self, model_output: ModelOutput) -> None:
        """See ``SamplerOutput.fetch_into``."""
        token_ids, finite = (self.token_ids, self._finite) if self._copy is None else self._copy.wait()
        model_output.token_ids = token_ids.tolist()
        failed = [] if finite.all() else (~finite).nonzero().flatten().tolist()
        for number in failed:
            model_output.draw_errors[number] = non_finite_error()


def num_top_logprobs(group: SamplingGroup) -> list[int]:
    """Returns how many of the most probable tokens each draw wants along with its own."""
    return [draw.state.sample_request.params.logprobs or 0 for draw in group.draws]


def non_finite_error() -> QuireError:
    """Returns the error for a sequence whose logits are not finite."""
    return QuireError(ErrorCode.INTERNAL, "The model computed numbers that are not finite for this request.")


def _no_token_allowed_error(request: SampleRequest) -> QuireError:
    param = grammar_param(request) if request.grammar else "bad_words" if request.params.bad_words else "min_tokens"
    return invalid(param, f"The output cannot go on: {param} and what it is combined with allow no token any more.")


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The draws of a step whose logits are being computed, and the grammar bitmask that is filled meanwhile, or None
    without grammars.
    """

    draws: list[Draw]
    bitmask: AnyPendingBitmask | None


class Sampler:
    """Samples the tokens of one step at a time. Use it from one thread.

    ``allow_sync`` says whether sampling may wait for the device where that saves work; the default is only on the CPU.
    It does not change what is drawn. ``filler`` fills grammar bitmasks; the default is a ``BitmaskFiller``.
    """

    def __init__(
        self, vocab_size: int, filler: AnyBitmaskFiller | None = None, *, allow_sync: bool | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._filler = filler or BitmaskFiller(vocab_size)
        self._allow_sync = allow_sync

    def prepare(self, draws: Sequence[Draw]) -> SamplerInput:
        """Starts to fill the bitmask of the draws with a grammar. Their ``known`` must hold every token before the one
        to sample. The draws after an output's drafts must follow the output's own draw.
        """
        draws = [_at_draft(draw) if draw.num_drafts else draw for draw in draws]
        grammars = [
            (draw.number, draw.state.grammar_state, draw.known)
            for draw in draws
            if draw.state.grammar_state is not None
        ]
        return SamplerInput(draws, self._filler.start(grammars) if grammars else None)

    def sample(self, prepared: SamplerInput, logits: torch.Tensor, rows: Sequence[int]) -> SamplerOutput:
        """Samples from ``logits`` [R, V], any float dtype. Draw i of ``prepared`` samples from row ``rows[i]``.

        Enqueues all work on the device of ``logits`` and does not wait for it, but waits for the bitmask, which the
        host fills. Work that is enqueued later may overwrite ``logits``.
        """
        allow_sync = logits.device.type == "cpu" if self._allow_sync is None else self._allow_sync
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        sampling_pass = _SamplingPass(logits, token_ids, allow_sync)
        groups, bitmask = SamplingGroups.from_draws(prepared.draws, rows), NO_GRAMMARS
        finite = sampling_pass.sample_plain(groups.greedy, groups.random)
        if prepared.bitmask is not None:  # it was filled meanwhile
            bitmask = prepared.bitmask.wait()
            if bitmask.errors:
                groups = groups.without(bitmask.errors)
        allowed = sampling_pass.sample_processed(groups.processed, bitmask) if groups.processed.draws else None
        candidates = sampling_pass.beam_candidates(groups.beams, bitmask) if groups.beams.draws else None
        token_ids.mul_(select_rows(finite, rows))
        copies = HostCopies(
            sampled=HostCopy([token_ids, finite]),
            allowed=None if allowed is None else HostCopy([allowed]),
            candidates=None if candidates is None else HostCopy(candidates),
            logprobs=HostCopy(sampling_pass.logprobs(groups.with_logprobs)) if groups.with_logprobs.draws else None,
        )
        return SamplerOutput(token_ids, prepared.draws, rows, groups, bitmask.errors, copies)

    def sample_plain(self, logits: torch.Tensor, metadata: SamplingMetadata | None) -> "PlainSamplerOutput":
        """Samples a token from each row of ``logits`` [R, V], like ``sample`` for draws that want only the token. With
        ``metadata`` None all draws are greedy.
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
        return PlainSamplerOutput(token_ids, finite, HostCopy([token_ids, finite]) if logits.is_cuda else None)

    def close(self) -> None:
        """Ends the thread that fills bitmasks."""
        self._filler.close()


def _at_draft(draw: Draw) -> Draw:
    """Returns the draw with its own copy of the state."""
    return replace(draw, state=draw.state.of_drafts(draw.num_drafts))


@dataclass(frozen=True, slots=True)
class _SamplingPass:
    """One step's ``logits`` [R, V], and the ``token_ids`` [D] int64 sampled from them."""

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
        """Samples the draws without logits processors. Returns which rows of the logits are finite, [R] bool."""
        both = greedy.joined(random)
        if sampled := self._sample_rows(self.logits, both, both.rows):
            self.write_tokens(both, sampled.token_ids)
            return sampled.finite
        if greedy.draws:
            self.write_tokens(greedy, lowest_argmax(greedy.select(self.logits), allow_sync=self.allow_sync))
        if random.draws:
            scores = random.select_copy(self.logits)
            self.write_tokens(random, sample(scores, random.sampling_metadata(), allow_sync=self.allow_sync))
        return finite_rows(self.logits, allow_sync=self.allow_sync)

    def sample_processed(self, group: SamplingGroup, bitmask: GrammarBitmask) -> torch.Tensor:
        """Samples the draws with logits processors. Returns for which of them any token is allowed, [D] bool."""
        scores = group.select_copy(self.logits)
        apply_logits_processors(scores, group.draws, bitmask)
        if sampled := self._sample_rows(scores, group, range(len(scores))):
            token_ids, highest = sampled.token_ids, sampled.highest
        else:
            highest = scores.amax(-1)
            token_ids = sample(scores, group.sampling_metadata(), allow_sync=self.allow_sync)
        allowed = highest > -torch.inf
        self.write_tokens(group, token_ids.mul_(allowed))
        return allowed

    def _sample_rows(self, scores: torch.Tensor, group: SamplingGroup, rows: Sequence[int]) -> SampledRows | None:
        """Samples the group with a compiled kernel, or returns None if there is none. The CPU kernel is used only if
        sampling may wait.
        """
        if scores.is_cpu and not self.allow_sync:
            return None
        metadata = None if all(draw.state.greedy for draw in group.draws) else group.sampling_metadata()
        return sample_rows(scores, index_array(rows), metadata)

    def beam_candidates(self, group: SamplingGroup, bitmask: GrammarBitmask) -> list[torch.Tensor]:
        """Returns the best candidates of each beam: log-probabilities and token ids, both [D, C], and for which beams
        any token is allowed, [D] bool. Normalizes before the logits processors, as in transformers' beam search.
        """
        scores = group.select(self.logits).float().log_softmax(-1)
        apply_logits_processors(scores, group.draws, bitmask)
        count = max(draw.state.sample_request.num_candidates for draw in group.draws)
        allowed = scores.amax(-1) > -torch.inf
        return [*stable_topk(scores, count, allow_sync=self.allow_sync), allowed]

    def logprobs(self, group: SamplingGroup) -> list[torch.Tensor]:
        """Returns the log-probabilities of a group's sampled tokens, as from ``compute_logprobs``."""
        token_ids = select_rows(self.token_ids, group.indices)
        num_top = max(num_top_logprobs(group))
        return compute_logprobs(group.select(self.logits), token_ids, num_top, allow_sync=self.allow_sync)
