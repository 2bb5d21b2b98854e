"""Draws the tokens of one step from its logits.

Draws are sorted into groups that are made alike, so that a draw pays for what it asks for and nothing else: a greedy
one is an argmax of the model's own logits, only rows that a logits processor changes are copied, and only rows that ask
for log-probabilities are normalised.

On a GPU the step's forward pass may still run when its tokens are drawn, so nothing is read from the device on the way:
whatever can go wrong becomes a flag that is read with the tokens. On the CPU there is nothing to wait for, and results
are read in between where that saves work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quire_engine.device.transfers import HostCopy, upload_arrays
from quire_engine.sampling.argmax import lowest_argmax
from quire_engine.sampling.drawn import HostCopies, SamplerOutput, num_top_logprobs
from quire_engine.sampling.grammar_mask import NO_GRAMMARS, BitmaskFiller, GrammarBitmask, PendingBitmask
from quire_engine.sampling.groups import DrawGroup, DrawGroups, index_array, select_rows
from quire_engine.sampling.logprobs import compute_logprobs
from quire_engine.sampling.processors import apply_logits_processors
from quire_engine.sampling.ranking import stable_topk
from quire_engine.sampling.sampler import finite_rows, sample
from quire_engine.sampling.state import SamplingStateCache, SequenceSamplingState
from quire_engine.scheduling.plan import SampleRequest


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The draws of a step whose logits are being computed, and the grammar bitmask that is being filled meanwhile; None
    where no draw has a grammar.
    """

    states: list[SequenceSamplingState]
    bitmask: PendingBitmask | None


class Sampler:
    """Makes the draws of one step after the other, and caches what their sequences need for the next. Used by one
    thread. ``allow_sync``: whether a draw may wait for the device where that saves it work; by default only on the CPU.
    It makes no difference to what is drawn.
    """

    def __init__(self, vocab_size: int, *, allow_sync: bool | None = None) -> None:
        self._states = SamplingStateCache(vocab_size)
        self._filler = BitmaskFiller(vocab_size)
        self._allow_sync = allow_sync

    def remove_finished(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is cached for sequences that have finished."""
        self._states.remove(sequence_ids)

    def prepare(self, draws: Sequence[SampleRequest]) -> SamplerInput:
        """Looks up the state of each draw's sequence, and starts to fill the bitmask of those that have a grammar. The
        token lists of these must hold every token before the one to be drawn.
        """
        states = [self._states.get(draw) for draw in draws]
        grammars = [state.grammar_state for state in states if state.grammar_state is not None]
        return SamplerInput(states, self._filler.start(grammars) if grammars else None)

    def sample(self, prepared: SamplerInput, logits: torch.Tensor, rows: Sequence[int]) -> SamplerOutput:
        """Makes each draw from its row of ``logits`` [R, V], any float dtype: ``rows[i]`` is the row of draw i.

        Everything is enqueued on the device of ``logits``, which is not waited for; the bitmask, which the host fills,
        is. From then on ``logits`` may be overwritten by what is enqueued later.
        """
        allow_sync = logits.device.type == "cpu" if self._allow_sync is None else self._allow_sync
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        sampling, groups = _SamplingPass(logits, token_ids, allow_sync), _group_draws(prepared.states, rows)
        sampling.sample_unprocessed(groups)  # while the bitmask is being filled
        bitmask = NO_GRAMMARS if prepared.bitmask is None else prepared.bitmask.wait()
        groups = groups.without(bitmask.errors)
        copies = sampling.sample_rest(groups, bitmask, rows)
        return SamplerOutput(token_ids, prepared.states, rows, groups, bitmask.errors, copies)

    def close(self) -> None:
        """Ends the thread that fills bitmasks."""
        self._filler.close()


def _group_draws(states: Sequence[SequenceSamplingState], rows: Sequence[int]) -> DrawGroups:
    groups = DrawGroups()
    for index, (state, row) in enumerate(zip(states, rows, strict=True)):
        groups.add(state, index, row)
    return groups


@dataclass(frozen=True, slots=True)
class _SamplingPass:
    """One step's ``logits`` [R, V], and the ``token_ids`` [D] int64 that are written from them."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    allow_sync: bool

    def sample_unprocessed(self, groups: DrawGroups) -> None:
        """Makes the draws from the model's own logits."""
        if groups.greedy:
            scores = groups.greedy.select(self.logits)
            self._write_tokens(groups.greedy, lowest_argmax(scores, allow_sync=self.allow_sync))
        if groups.random:
            self._write_tokens(groups.random, self._sample(groups.random, groups.random.select_copy(self.logits)))

    def sample_rest(self, groups: DrawGroups, bitmask: GrammarBitmask, rows: Sequence[int]) -> HostCopies:
        """Makes the other draws, and starts to copy to the host what it will read. Only what there is, is copied."""
        finite = finite_rows(self.logits, allow_sync=self.allow_sync)
        allowed = self._sample_processed(groups.processed, bitmask) if groups.processed else None
        candidates = self._beam_candidates(groups.beams, bitmask) if groups.beams else None
        self.token_ids.mul_(select_rows(finite, rows))
        return HostCopies(
            token_ids=HostCopy([self.token_ids]),
            finite=HostCopy([finite]),
            allowed=None if allowed is None else HostCopy([allowed]),
            candidates=None if candidates is None else HostCopy(candidates),
            logprobs=HostCopy(self._logprobs(groups.with_logprobs)) if groups.with_logprobs else None,
        )

    def _write_tokens(self, group: DrawGroup, token_ids: torch.Tensor) -> None:
        if len(group) == len(self.token_ids):
            self.token_ids.copy_(token_ids)
        else:
            (indices,) = upload_arrays((index_array(group.indices),), self.token_ids.device)
            self.token_ids.index_copy_(0, indices, token_ids)

    def _sample(self, group: DrawGroup, scores: torch.Tensor) -> torch.Tensor:
        return sample(scores, group.sampling_metadata(), allow_sync=self.allow_sync)

    def _sample_processed(self, group: DrawGroup, bitmask: GrammarBitmask) -> torch.Tensor:
        """Makes the draws that have logits processors. Returns for which of them any token is allowed, [D] bool."""
        scores = group.select_copy(self.logits)
        apply_logits_processors(scores, group.states, bitmask)
        allowed = scores.amax(-1) > -torch.inf
        self._write_tokens(group, self._sample(group, scores).mul_(allowed))
        return allowed

    def _beam_candidates(self, group: DrawGroup, bitmask: GrammarBitmask) -> list[torch.Tensor]:
        """The best candidates of each draw: log-probabilities and token ids, both [D, C], and for which draws any token
        is allowed, [D] bool. Normalised first and processed then, as in transformers' beam search.
        """
        scores = group.select(self.logits).float().log_softmax(-1)
        apply_logits_processors(scores, group.states, bitmask)
        count = max(state.draw.num_candidates for state in group.states)
        allowed = scores.amax(-1) > -torch.inf
        return [*stable_topk(scores, count, allow_sync=self.allow_sync), allowed]

    def _logprobs(self, group: DrawGroup) -> list[torch.Tensor]:
        token_ids = select_rows(self.token_ids, group.indices)
        num_top = max(num_top_logprobs(group))
        return compute_logprobs(group.select(self.logits), token_ids, num_top, allow_sync=self.allow_sync)
