"""A step's input and output: plain data, the only thing that scheduler and executor share.

Nothing here refers to a sequence or a pool, so a step can be logged, replayed and sent to other ranks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from quire_proto.errors import QuireError
from quire_proto.pooling import PoolingParams
from quire_proto.sampling import SamplingParams, TokenLogprobs

from quire_engine.core.block_pool import BlockCopies
from quire_engine.core.lora import LoRARequest

_Value = TypeVar("_Value")


class GrammarError(Exception):
    """A grammar cannot continue with this output: a limit was reached, or the output does not match. The text is one
    sentence that a client may read.
    """


class GrammarMatcher(Protocol):
    """One output's state in a grammar. Created and used by one thread, which is not the thread of the steps."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds tokens of the output. Raises ``GrammarError``."""
        ...

    def fill_bitmask(self, mask: memoryview) -> None:
        """Writes the allowed next tokens into ``mask``: contiguous int32 words, as many as the model's vocabulary
        needs, all 0 before. Bit b of word w allows token 32 w + b (``np.frombuffer(mask, np.int32)`` shares the words).
        Words that are not written allow nothing. May be called again in the same state. Raises ``GrammarError``.
        """
        ...

    def fill_bitmask_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> None:
        """Like ``fill_bitmask``, as if the output had ``draft_token_ids`` too; does not change the state. Leaves
        ``mask`` alone if the grammar forbids one of the drafts: that mask is not read. Raises ``GrammarError``.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar: constant, shared by all outputs that it constrains, thread-safe. Implemented in
    ``structured_output`` by a library; the core only passes it on.
    """

    def new_matcher(self) -> GrammarMatcher:
        """Returns the state before the first token of an output."""
        ...


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How the tokens of one output are sampled, for its whole life.

    The first ``num_prompt_tokens`` of its tokens are the prompt. ``seed`` belongs to the output; ``params.seed`` is not
    read. With ``num_candidates`` above 0 nothing is sampled: the executor returns that many most probable tokens
    instead, for the scheduler's beam search. ``stop_token_ids`` end the output and include the model's end-of-sequence
    tokens; none is sampled before ``params.min_tokens``.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A sequence without a row in the worker: sent with its first chunk, and again when it resumes after a preemption
    or runs alone after a failed step. ``row`` is its row in the worker, which may have been another sequence's.
    ``token_ids`` (int32) are all its known tokens. ``block_ids`` (int32) is its block table in each group of layers,
    which covers at least the tokens of its chunk.

    ``sample_requests`` say how its outputs are sampled: the row's own first, then those forked from it if the prompt
    has several. They are empty if the prompt is pooled, as ``pooling`` says. ``num_prompt_logprobs``: how many of the
    most probable tokens to return for each prompt token; None if no prompt log-probabilities are requested. ``lora`` is
    its adapter; None for the model alone.
    """

    row: int
    token_ids: "array[int]"
    block_ids: tuple["array[int]", ...]
    sample_requests: tuple[SampleRequest, ...] = ()
    num_prompt_logprobs: int | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """An entry of a step's columns as an object: the ``length`` tokens from ``start`` on that the step computes of a
    sequence. The worker has them, and the sequence's block tables, in ``row``. The tokens before ``start`` are in the
    KV cache, or will be after the step before. See ``SchedulerOutput``.
    """

    sequence_id: int
    row: int
    start: int
    length: int
    num_draws: int = 0
    awaits_token: bool = False
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        """The number of draft tokens at its end."""
        return len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after the chunk."""
        return self.start + self.length


_no_numbers = partial(array, "i")


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step, in this order: update the worker's rows, copy, compute the chunks, sample. Constant once it
    is scheduled.

    ``new`` are sequences that get a row. For rows that the worker has, ``new_tokens`` are known tokens that it did not
    sample, and ``new_blocks`` are the changes of the block tables of each group of layers. Both are int32 triples, one
    after another: the row, an index in it, and the token or block there. ``freed_rows`` belong to no sequence any more.

    A chunk is one entry of each of the columns ``sequence_ids``, ``rows``, ``starts``, ``lengths`` and ``num_draws``.
    It computes ``lengths[i]`` tokens of ``rows[i]`` from ``starts[i]`` on. Chunks of a prompt follow each other without
    gaps, but the same chunk, or all from the first on, may be computed again.

    ``num_draws[i]`` is the number of tokens sampled after the chunk; above 0 only if it reaches the last known token of
    its sequence. Several draws have one of two meanings. Without drafts, all are sampled from the same logits, one for
    each output of the row's prompt. With ``drafts[i]``, the last tokens of the chunk are drafts, and one token is
    sampled after each of them and after the token before. The worker appends the first sampled token to the row, unless
    the chunk has drafts or returns candidates. A pooled prompt has one draw, over all that was computed of it.

    The last token of the chunks ``awaiting`` is pending: the step before samples it. Only an executor with a depth
    above 1 gets such chunks.

    ``num_preempted`` counts preempted sequences. ``max_seconds`` is the planned time limit of a step that computes
    prompts while other sequences decode; 0 without one. ``has_fragments``: the step has best-effort prompt chunks so
    small that its duration says little about other steps.
    """

    step: int
    copies: BlockCopies = field(default_factory=BlockCopies)
    new: list[NewRequest] = field(default_factory=list)
    new_tokens: "array[int]" = field(default_factory=_no_numbers)
    new_blocks: tuple["array[int]", ...] = ()
    freed_rows: "array[int]" = field(default_factory=_no_numbers)
    sequence_ids: "array[int]" = field(default_factory=partial(array, "q"))
    rows: "array[int]" = field(default_factory=_no_numbers)
    starts: "array[int]" = field(default_factory=_no_numbers)
    lengths: "array[int]" = field(default_factory=_no_numbers)
    num_draws: "array[int]" = field(default_factory=_no_numbers)
    awaiting: "array[int]" = field(default_factory=_no_numbers)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_preempted: int = 0
    max_seconds: float = 0.0
    has_fragments: bool = False

    def add_chunk(self, chunk: ScheduledChunk) -> None:
        """Adds an entry to the columns."""
        if chunk.awaits_token:
            self.awaiting.append(len(self.rows))
        if chunk.draft_token_ids:
            self.drafts[len(self.rows)] = chunk.draft_token_ids
        self.sequence_ids.append(chunk.sequence_id)
        self.rows.append(chunk.row)
        self.starts.append(chunk.start)
        self.lengths.append(chunk.length)
        self.num_draws.append(chunk.num_draws)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """The entries of the columns as objects. Slow: not for the hot path."""
        columns = self.sequence_ids, self.rows, self.starts, self.lengths, self.num_draws
        awaiting = set(self.awaiting)
        return [
            ScheduledChunk(*entry, index in awaiting, self.drafts.get(index, ()))
            for index, entry in enumerate(zip(*columns, strict=True))
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.lengths)

    @property
    def total_num_draws(self) -> int:
        """Tokens that the step samples."""
        return sum(self.num_draws)

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks that move between the pools before the step computes."""
        return len(self.copies.blocks_to_swap_out) + len(self.copies.blocks_to_swap_in)

    @property
    def is_empty(self) -> bool:
        """Whether an executor has nothing to do."""
        return not (self.rows or self.freed_rows) and self.copies.is_empty


@dataclass(slots=True)
class StepTimings:
    """Seconds that the executor spent in each part of a step."""

    swap: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    def add(self, other: "StepTimings") -> None:
        """Adds another run's seconds, part by part."""
        self.swap += other.swap
        self.forward += other.forward
        self.sample += other.sample


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The most probable next tokens of one beam, best first, and their log-probabilities after all adjustments by the
    sampling parameters.
    """

    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class ModelOutput:
    """The output of a step.

    ``token_ids`` has one token per draw, chunk by chunk; an arbitrary number if the draw has candidates, is pooled or
    has failed.

    By draw number: ``logprobs``, if ``params.wants_logprobs``; ``candidates``; ``pooled``, as little-endian float32;
    and ``draw_errors``. By chunk number: ``prompt_logprobs``, if requested, one entry for each token of the chunk that
    a prompt token follows; and ``errors``, which concern all draws of the chunk.

    ``waited_for_others`` is set if another engine of a group had more tokens in the forward pass and so determined the
    step's duration.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    draw_errors: dict[int, QuireError] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, QuireError] = field(default_factory=dict)
    timings: StepTimings = field(default_factory=StepTimings)
    waited_for_others: bool = False

    @property
    def has_errors(self) -> bool:
        """Whether anything failed."""
        return bool(self.errors or self.draw_errors)

    @property
    def has_only_tokens(self) -> bool:
        """Whether every draw made a token, without log-probabilities or errors."""
        return not (self.logprobs or self.candidates or self.pooled or self.prompt_logprobs or self.has_errors)

    def add(self, other: "ModelOutput", chunk: int) -> None:
        """Appends the output of a step that ran chunk number ``chunk`` alone."""
        draw = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs |= _shifted(other.logprobs, draw)
        self.candidates |= _shifted(other.candidates, draw)
        self.pooled |= _shifted(other.pooled, draw)
        self.draw_errors |= _shifted(other.draw_errors, draw)
        self.prompt_logprobs |= _shifted(other.prompt_logprobs, chunk)
        self.errors |= _shifted(other.errors, chunk)
        self.timings.add(other.timings)
        self.waited_for_others |= other.waited_for_others


def _shifted(values: dict[int, _Value], by: int) -> dict[int, _Value]:
    return {number + by: value for number, value in values.items()}
