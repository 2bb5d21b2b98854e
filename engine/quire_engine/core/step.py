"""What a step is to do and what came of it: plain data, the only thing that scheduler and executor share.

Nothing here refers to a sequence or a pool, so a step can be logged, replayed and sent to other ranks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire_proto.errors import QuireError
from quire_proto.pooling import PoolingParams
from quire_proto.sampling import SamplingParams, TokenLogprobs

from quire_engine.core.block_pool import BlockCopies
from quire_engine.core.lora import LoRARequest


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
    in ``structured_output``, by a library; the core only passes it from requests to sample requests.
    """

    def new_matcher(self) -> GrammarMatcher:
        """The state before the first token of an output."""
        ...


@dataclass(slots=True)
class SampleRequest:
    """How the next token of one sequence is drawn. The same object in every step of the sequence's life, but for the
    first of several outputs of one prompt, whose sequences are only made then.

    ``token_ids`` are all known tokens, ``num_prompt_tokens`` of them the prompt's; the token is drawn for position
    ``len(token_ids)``, which is the chunk's end unless the sequence ended while that was computed. It is the
    scheduler's own list, and it only ever grows: read it while the step runs, never keep a count of what it held under
    anything but ``sequence_id``, never change it. What an executor keeps for a sequence (penalised tokens, a grammar's
    matcher) is a cache of this list, and can be made from it anew at any time. ``seed`` is the sequence's own, so
    ``params.seed`` is not read. With ``num_candidates`` above 0 nothing is drawn: the executor returns so many most
    probable tokens instead, for the scheduler's beam search. ``stop_token_ids`` are those that end the sequence, the
    model's end-of-sequence tokens included: none is drawn before ``params.min_tokens``.

    With ``draft_of`` it draws the token behind draft tokens of that request's sequence, as if they were known: its
    ``token_ids`` end in them, and it and its ``sequence_id``, which is below 0, are of one step only.
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    num_candidates: int = 0
    draft_of: "SampleRequest | None" = None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A sequence that the worker has no state of: sent with its first chunk, and again when it returns from a
    preemption or is run alone after a failed step. ``row`` is where the worker keeps it, which may have been another
    sequence's. ``token_ids`` (int32) are all its known tokens, and ``block_ids`` (int32) its block table in each group
    of layers, which covers at least the tokens of its chunk. ``sample_request`` says how its own next tokens are drawn;
    None where a prompt is pooled.
    """

    row: int
    token_ids: "array[int]"
    block_ids: tuple["array[int]", ...]
    sample_request: SampleRequest | None = None


@dataclass(slots=True)
class ScheduledChunk:
    """The ``length`` tokens of one sequence that a step computes, from its token ``start`` on. The worker has them, and
    the sequence's block tables, in ``row``: the tokens before ``start`` are in KV memory already, or will be by the
    step before.

    If ``awaits_token``, nobody knows the last of them yet: the step before draws it. Only an executor whose depth is
    above 1 is given such chunks.

    ``sample_requests`` is filled when the chunk reaches the sequence's last known token: token ``end`` is then to be
    drawn, once for each of them, all from the same logits. There are several where one prompt has several outputs, and
    before they part. The worker appends what the first of them draws to the row, unless it draws candidates.

    The last tokens of the chunk are ``draft_token_ids``, which are not known but guessed. There are then one more
    sample requests than drafts, one for each of the last ``num_draft_tokens + 1`` tokens, whose logits it draws from:
    the first is the sequence's own, and the others draw behind the drafts. Nothing is appended to the row.

    ``prompt_logprob_targets`` are the tokens whose log-probabilities are asked for:
    ``prompt_logprob_targets[i]`` follows token ``start + i``, and there are none for tokens that follow the prompt;
    ``num_prompt_logprobs`` most probable tokens are returned beside each.

    ``lora`` is the adapter that the tokens are computed with; None for the model alone.

    Where a prompt is pooled, every chunk of it has the ``pooling`` params, and no sample requests; with the one that
    ``is_last``, all that was computed since the chunk with ``start`` 0 is pooled. Chunks of a prompt follow each other
    without gaps, except that the same chunk, or all from the first on, may be computed again.
    """

    sequence_id: int
    row: int
    start: int
    length: int
    sample_requests: tuple[SampleRequest, ...] = ()
    awaits_token: bool = False
    draft_token_ids: Sequence[int] = ()
    prompt_logprob_targets: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    is_last: bool = False

    @property
    def lora_int_id(self) -> int:
        """The number of its adapter; 0 stands for none."""
        return 0 if self.lora is None else self.lora.lora_int_id

    @property
    def num_draft_tokens(self) -> int:
        """The tokens at its end that are guessed."""
        return len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the chunk is; also the position of the token that is
        drawn.
        """
        return self.start + self.length


@dataclass(slots=True)
class SchedulerOutput:
    """What one step does, in this order: the worker's rows are brought up to date, then the copies, then the chunks,
    then the sample requests.

    ``new`` are sequences that get a row. Of rows that the worker has, ``new_tokens`` are known tokens that it did not
    draw, and ``new_blocks`` are what has changed in the block tables of each group of layers: int32 triples of a row,
    an index in it, and the token or block there, one after the other.

    ``finished_seq_ids`` are sequences that have ended: nothing needs to be kept for them any more, and no step in
    flight draws for them or pools them. ``num_preempted`` counts the sequences that were preempted. ``max_seconds`` is
    what a step that computes prompts beside sequences that decode is planned to take at most; 0 without a bound.
    ``has_fragments``: of prompts that are best effort, cut so small that how long the step takes says little of others.
    """

    step: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: BlockCopies = field(default_factory=BlockCopies)
    new: list[NewRequest] = field(default_factory=list)
    new_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    new_blocks: tuple["array[int]", ...] = ()
    finished_seq_ids: list[int] = field(default_factory=list)
    num_preempted: int = 0
    max_seconds: float = 0.0
    has_fragments: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks that move between the pools before the step computes."""
        return len(self.copies.blocks_to_swap_out) + len(self.copies.blocks_to_swap_in)

    @property
    def is_empty(self) -> bool:
        """Whether an executor has nothing to do."""
        return not (self.chunks or self.finished_seq_ids) and self.copies.is_empty


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
    """What a step made, keyed by sequence id.

    For each sample request, one of: a token (with its log-probabilities, where ``params.wants_logprobs``), candidates,
    or an error. For each chunk with targets, one entry of ``prompt_logprobs`` for each target. For each last chunk of a
    prompt that is pooled, its numbers as little-endian float32 (``pooled``), or an error. If it ``waited_for_others``,
    as another engine of a group had more tokens in its forward pass, that decided how long it took.
    """

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, QuireError] = field(default_factory=dict)
    timings: StepTimings = field(default_factory=StepTimings)
    waited_for_others: bool = False

    def add(self, other: "ModelOutput") -> None:
        """Adds what other sequences of the same step made."""
        self.token_ids.update(other.token_ids)
        self.logprobs.update(other.logprobs)
        self.candidates.update(other.candidates)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.pooled.update(other.pooled)
        self.errors.update(other.errors)
        self.timings.add(other.timings)
        self.waited_for_others |= other.waited_for_others
