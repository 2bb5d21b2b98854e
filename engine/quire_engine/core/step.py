"""What a step is to do and what came of it: plain data, the only thing that scheduler and executor share.

Nothing here refers to a sequence or a pool, so a step can be logged, replayed and sent to other ranks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from quire_proto.errors import QuireError
from quire_proto.pooling import PoolingParams
from quire_proto.sampling import SamplingParams, TokenLogprobs

from quire_engine.core.block_pool import BlockCopies
from quire_engine.core.lora import LoRARequest

_Value = TypeVar("_Value")


class GrammarError(Exception):
    """A grammar cannot go on with this output: its limits were reached, or the output does not match it. The text is
    one sentence that a client may read.
    """


class GrammarMatcher(Protocol):
    """One output's state in a grammar. Made and used by one thread, which is not that of the steps."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that the output got. Raises ``GrammarError``."""
        ...

    def fill_bitmask(self, mask: memoryview) -> None:
        """Writes which tokens may come next into ``mask``: contiguous int32 words, as many as the model's vocabulary
        needs and all 0 before, where bit b of word w allows token 32 w + b (``np.frombuffer(mask, np.int32)`` shares
        them). Words that it leaves alone allow nothing. May be called again in the same state. Raises
        ``GrammarError``.
        """
        ...

    def fill_bitmask_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> None:
        """As ``fill_bitmask``, as if the output had also got ``draft_token_ids``; the state stays what it is. Leaves
        ``mask`` alone where the grammar forbids one of them: then nobody looks at it. Raises ``GrammarError``.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar: constant, shared by all outputs that are held to it, safe to use from any thread. Implemented
    in ``structured_output``, by a library; the core only passes it on.
    """

    def new_matcher(self) -> GrammarMatcher:
        """The state before the first token of an output."""
        ...


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How the tokens of one output are drawn, for as long as it runs.

    The first ``num_prompt_tokens`` of its tokens are the prompt's. ``seed`` is the output's own, so ``params.seed`` is
    not read. With ``num_candidates`` above 0 nothing is drawn: the executor returns so many most probable tokens
    instead, for the scheduler's beam search. ``stop_token_ids`` are those that end the output, the model's
    end-of-sequence tokens included: none is drawn before ``params.min_tokens``.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A sequence that the worker has no state of: sent with its first chunk, and again when it returns from a
    preemption or is run alone after a failed step. ``row`` is where the worker keeps it, which may have been another
    sequence's. ``token_ids`` (int32) are all its known tokens, and ``block_ids`` (int32) its block table in each group
    of layers, which covers at least the tokens of its chunk.

    ``sample_requests`` say how its outputs are drawn: the row's own first, and then those that are forked from it where
    one prompt has several. There are none where the prompt is pooled, as ``pooling`` says. ``num_prompt_logprobs``: how
    many of the most probable tokens to return with each token of the prompt; None where no log-probabilities of it are
    asked for. ``lora`` is the adapter that its tokens are computed with; None for the model alone.
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
    """An entry of a step's columns as an object: the ``length`` tokens of a sequence that the step computes, from its
    token ``start`` on. The worker has them, and the sequence's block tables, in ``row``: the tokens before ``start``
    are in KV memory already, or will be by the step before. See ``SchedulerOutput``.
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
        """The tokens at its end that are guessed."""
        return len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the chunk is."""
        return self.start + self.length


def _no_numbers() -> "array[int]":
    return array("i")


@dataclass(slots=True)
class SchedulerOutput:
    """What one step does, in this order: the worker's rows are brought up to date, then the copies, then the chunks,
    then the draws. Nothing changes it once it is scheduled.

    ``new`` are sequences that get a row. Of rows that the worker has, ``new_tokens`` are known tokens that it did not
    draw, and ``new_blocks`` are what has changed in the block tables of each group of layers: int32 triples of a row,
    an index in it, and the token or block there, one after the other. ``freed_rows`` are no sequence's any more.

    A chunk is an entry of each of the columns ``sequence_ids``, ``rows``, ``starts``, ``lengths`` and ``draws``: it
    computes ``lengths[i]`` tokens of ``rows[i]`` from ``starts[i]`` on. Chunks of a prompt follow each other without
    gaps, except that the same chunk, or all from the first on, may be computed again.

    ``draws[i]`` is above 0 where the chunk reaches the last known token of its sequence: so many tokens are then drawn
    behind it. Several are all drawn from the same logits, one for each output of the row's prompt; or the last tokens
    of the chunk are ``drafts[i]``, which are not known but guessed, and one is drawn behind each of them and behind the
    token before. The worker appends what the first draws to the row, but for candidates and where there are drafts. A
    prompt that is pooled has one draw, of all that was computed of it.

    Of the chunks ``awaiting``, nobody knows the last token yet: the step before draws it. Only an executor whose depth
    is above 1 is given such chunks.

    ``num_preempted`` counts the sequences that were preempted. ``max_seconds`` is what a step that computes prompts
    beside sequences that decode is planned to take at most; 0 without a bound. ``has_fragments``: of prompts that are
    best effort, cut so small that how long the step takes says little of others.
    """

    step: int
    copies: BlockCopies = field(default_factory=BlockCopies)
    new: list[NewRequest] = field(default_factory=list)
    new_tokens: "array[int]" = field(default_factory=_no_numbers)
    new_blocks: tuple["array[int]", ...] = ()
    freed_rows: "array[int]" = field(default_factory=_no_numbers)
    sequence_ids: "array[int]" = field(default_factory=lambda: array("q"))
    rows: "array[int]" = field(default_factory=_no_numbers)
    starts: "array[int]" = field(default_factory=_no_numbers)
    lengths: "array[int]" = field(default_factory=_no_numbers)
    draws: "array[int]" = field(default_factory=_no_numbers)
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
        self.draws.append(chunk.num_draws)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """The entries of the columns as objects. Slow: not for the hot path."""
        awaiting, columns = set(self.awaiting), (self.sequence_ids, self.rows, self.starts, self.lengths, self.draws)
        return [
            ScheduledChunk(*entry, index in awaiting, self.drafts.get(index, ()))
            for index, entry in enumerate(zip(*columns, strict=True))
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.lengths)

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn."""
        return sum(self.draws)

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
    """The most probable next tokens of one beam, best first, and their log-probabilities after all that the sampling
    parameters add or take away.
    """

    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class ModelOutput:
    """What a step made.

    ``token_ids`` has a token for each draw, chunk after chunk; any number where the draw has candidates, is pooled or
    has failed. By the number of a draw: ``logprobs``, where ``params.wants_logprobs``, ``candidates``, ``pooled`` (what
    a prompt was pooled to, as little-endian float32), and ``draw_errors``. By the number of a chunk:
    ``prompt_logprobs``, one entry for each of its tokens that a token of the prompt follows, where they are asked for;
    and ``errors`` of all that it draws. If the step ``waited_for_others``, as another engine of a group had more tokens
    in its forward pass, that decided how long it took.
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
