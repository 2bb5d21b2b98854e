"""One request and its sequences, the registry of all live ones, and the checks that refuse requests."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from quire_proto.context_length import check_length, check_pooled_length
from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.hashing import extra_key
from quire_proto.pooling import PoolingParams, Task, check_dimensions
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import SamplingParams, choice_seed

from quire_engine.core.absence import Absence
from quire_engine.core.beam_search import BeamSearch
from quire_engine.core.block_table import BlockTable
from quire_engine.core.draft_proposers import NgramProposer, SuffixProposer
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import BeamCandidates, Grammar, SampleRequest

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """The output of one choice that an earlier attempt delivered. A ``finished`` choice is not run again."""

    index: int
    token_ids: abc.Sequence[int]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a router submitted it, after checks.

    ``output_token_ids`` were delivered by an earlier attempt of the first choice. They count towards ``max_tokens``,
    and the next token is sampled for the position after them. ``resumed_outputs`` says the same for each choice, and
    takes precedence. With the priority policy, smaller numbers go first; under every policy, ``BEST_EFFORT`` comes
    after all others. ``grammar`` is ``sampling.structured``, compiled.
    ``traceparent`` and ``tracestate`` are only carried for the service's traces. ``lora`` is the adapter to use. With
    ``pooling`` the prompt is pooled and nothing is sampled: ``sampling`` and delivered outputs are ignored.
    """

    request_id: str
    prompt_token_ids: abc.Sequence[int]
    sampling: SamplingParams
    output_token_ids: abc.Sequence[int] = ()
    cache_salt: bytes = b""
    traceparent: str = ""
    tracestate: str = ""
    resumed_outputs: abc.Sequence[ResumedOutput] = ()
    priority: int = 0
    grammar: Grammar | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None

    @property
    def task(self) -> Task:
        """The task that the request asks for."""
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @property
    def all_resumed_outputs(self) -> abc.Sequence[ResumedOutput]:
        """The outputs of earlier attempts, in one form."""
        if self.resumed_outputs or not self.output_token_ids:
            return self.resumed_outputs
        return (ResumedOutput(0, self.output_token_ids),)


class SequenceStatus(Enum):
    """Where a sequence is: in exactly one of the scheduler's queues, or in none once it has finished."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """An event of a sequence: its name, its time (nanoseconds since 1970), the blocks moved, the reason of the
    decision, and, if the sequence came back with it, the seconds that it was away.
    """

    name: str
    time: int
    blocks: int = 0
    reason: str = ""
    away_seconds: float = 0.0


@dataclass(slots=True)
class SequenceTimings:
    """When a sequence went through its stages, in nanoseconds since 1970; 0 for stages that it has not reached.
    ``first_step`` and ``last_step`` are step numbers. It was preempted ``num_preemptions`` times. ``away_seconds`` is
    the total time until it had caught up each time.
    """

    arrived: int
    admitted: int = 0
    first_token: int = 0
    finished: int = 0
    first_step: int = 0
    last_step: int = 0
    num_preemptions: int = 0
    away_seconds: float = 0.0
    events: list[SequenceEvent] = field(default_factory=list)

    def copy(self) -> "SequenceTimings":
        """Returns the same history, for a forked sequence."""
        return replace(self, events=[*self.events])


class SequenceGroup:
    """The sequences of one request.

    ``unfinished``: indexes of the choices without a finish reason. ``sequences``: live sequences by id. Before the
    first sampled token one sequence (the *root*) represents all choices. ``limit``: the number of tokens at which each
    sequence ends. ``precedence`` is set by the first admission: the priority, then the order of admission.
    ``num_cached_tokens``: prompt tokens found in the prefix cache then. ``next_prompt_logprob``: position of the first
    prompt token whose log-probability has not been sent yet. ``beam_search``: state of a beam search; its sequences
    advance together, so they are preempted together. ``candidates``: what its next step chooses from, for the beams
    computed so far. ``runs_ahead``: whether a step may be scheduled for a pending token.
    """

    __slots__ = (
        "beam_search",
        "best_effort",
        "candidates",
        "limit",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_prompt_tokens",
        "precedence",
        "request",
        "runs_ahead",
        "sequences",
        "unfinished",
    )

    def __init__(self, request: Request, beams: BeamSearch | None, limit: int, *, runs_ahead: bool = True) -> None:
        self.request = request
        self.best_effort = request.priority >= BEST_EFFORT
        self.runs_ahead = runs_ahead
        self.beam_search = beams
        self.limit = limit
        self.sequences: dict[int, Sequence] = {}
        self.candidates: dict[int, BeamCandidates] = {}
        self.unfinished: dict[int, None] = {}
        self.precedence: tuple[int, int] | None = None
        self.num_cached_tokens: int | None = None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.next_prompt_logprob = 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities still have to be computed. Then the whole prompt is computed, even if part
        of it is cached.
        """
        return self.request.sampling.prompt_logprobs is not None and self.next_prompt_logprob < self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one output, or of several outputs before their fork.

    ``token_ids``: all known tokens, prompt and output. ``num_computed_tokens`` of them are in the KV cache, and
    ``num_scheduled_tokens`` will be after the steps in flight. The scheduler decides everything from these three:
    prefill and decode are not separate phases. ``plain_until``: while the sequence decodes tokens before this one, a
    step changes only its tokens. It needs no block, the worker's row is current, and only a stop token ends it. 0 if
    unknown.

    ``index``: the choice that it belongs to. ``sample_requests``: how its next token is sampled, one for each output
    that is forked from it then; empty for a pooled prompt. ``num_seqs``: how many it counts as against
    ``max_num_seqs``. ``last_step``: the last step with a chunk of it. ``absence``: its preemption, until it has caught
    up. ``proposer`` proposes its drafts, with speculation. ``queue_key`` orders waiting sequences.
    ``served_at_arrival``: tokens that the engine had computed before it arrived.

    ``row``: the worker's row while it runs; None while the worker has none of it. The row lacks the last
    ``num_unsent_tokens`` of its tokens; it has the others, which were sent to the worker or sampled there.
    """

    id: int
    group: SequenceGroup
    index: int
    token_ids: list[int]
    block_table: BlockTable
    timings: SequenceTimings
    sample_requests: tuple[SampleRequest, ...]
    num_seqs: int = 1
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    plain_until: int = 0
    row: int | None = None
    num_unsent_tokens: int = 0
    last_step: int = 0
    absence: Absence | None = None
    proposer: NgramProposer | SuffixProposer | None = None
    queue_key: float = 0.0
    served_at_arrival: int = 0

    @property
    def request(self) -> Request:
        """The request that the sequence belongs to."""
        return self.group.request

    @property
    def best_effort(self) -> bool:
        """Whether the request gets only what others leave."""
        return self.group.best_effort

    @property
    def preemption_key(self) -> tuple[int, ...]:
        """Orders admitted sequences: the largest is preempted first."""
        assert self.group.precedence is not None, "it was admitted"
        return (*self.group.precedence, self.id)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the KV cache: at least 1, except in a beam that waits for the other beams."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens to schedule next: the known tokens that are in no step yet, or else the pending token. The pending
        token is not scheduled if the sequence certainly ends or forks with it, if the sequence is a beam, or in a
        pipeline.
        """
        return len(self.token_ids) - self.num_scheduled_tokens or int(self._runs_ahead)

    @property
    def _runs_ahead(self) -> bool:
        goes_on = len(self.token_ids) + 1 < self.group.limit
        return goes_on and len(self.sample_requests) == 1 and self.group.runs_ahead

    @property
    def num_output(self) -> int:
        """Output tokens, including earlier attempts."""
        return len(self.token_ids) - self.group.num_prompt_tokens


class SequenceRegistry:
    """All live requests and their sequences: creates, forks and frees them. ``groups`` by request id, ``sequences`` by
    sequence id. Sequence ids increase in the order of arrival.
    """

    def __init__(self, config: "SchedulerConfig", kv_cache_manager: KVCacheManager, clock: Callable[[], int]) -> None:
        self._config = config
        self._kv_cache_manager = kv_cache_manager
        self._clock = clock
        self._next_id = 0
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}

    def create(self, request: Request) -> list[Sequence]:
        """Creates the first sequences of a request: one for all its choices, or one for each choice that an earlier
        attempt left unfinished.
        """
        if request.pooling is not None:
            return [self._new_pooled(request)]
        stops = self._stop_token_ids(request)
        beams = BeamSearch(request.sampling, stops) if request.sampling.beam_width else None
        group = self._new_group(request, beams, runs_ahead=beams is None and self._config.num_stages == 1)
        history = {delivered.index: delivered for delivered in request.all_resumed_outputs}
        choices = range(request.sampling.num_returned)
        group.unfinished = {i: None for i in choices if i not in history or not history[i].finished}
        if not history:
            return [self._new_root(group, len(choices))]
        return [self._new_sequence(group, i, [*history[i].token_ids] if i in history else []) for i in group.unfinished]

    def fork(self, parent: Sequence, sequence_id: int | None = None, index: int = 0) -> Sequence:
        """Forks a sequence from ``parent`` with all its tokens and blocks. The caller queues it."""
        child = Sequence(
            self._next_sequence_ids() if sequence_id is None else sequence_id,
            parent.group,
            index,
            [*parent.token_ids],
            self._kv_cache_manager.fork(parent.block_table),
            parent.timings.copy(),
            (self._new_sample_request(parent.group, index),),
            num_computed_tokens=parent.num_computed_tokens,
            num_scheduled_tokens=parent.num_scheduled_tokens,
        )
        self._register(child)
        return child

    def split(self, root: Sequence) -> list[Sequence]:
        """Turns ``root`` into the sequence of its own choice, and forks the other unfinished choices from it. Returns
        the forks.
        """
        root.sample_requests, root.num_seqs = root.sample_requests[:1], 1
        others = [index for index in root.group.unfinished if index != root.index]
        return [self.fork(root, root.id + index, index) for index in others]

    def free(self, sequence: Sequence) -> None:
        """Forgets a sequence, and with the last one its request."""
        del self.sequences[sequence.id]
        group = sequence.group
        del group.sequences[sequence.id]
        if not group.sequences:
            del self.groups[group.request.request_id]

    def _new_pooled(self, request: Request) -> Sequence:
        """Creates the one sequence of a pooled prompt. It ends with its last chunk."""
        group = self._new_group(request, None, runs_ahead=False)
        group.unfinished = {0: None}
        sequence = self._new_sequence(group, 0, [])
        sequence.sample_requests = ()
        return sequence

    def _new_root(self, group: SequenceGroup, width: int) -> Sequence:
        """Creates one sequence for all choices. Reserves the ids after its own for the other choices."""
        root = self._new_sequence(group, 0, [])
        if group.beam_search is not None:
            root.num_seqs = group.beam_search.width
        elif width > 1:
            root.num_seqs = width
            root.sample_requests = tuple(self._new_sample_request(group, index) for index in range(width))
            self._next_sequence_ids(width - 1)
        return root

    def _new_group(self, request: Request, beams: BeamSearch | None, *, runs_ahead: bool) -> SequenceGroup:
        max_output = 0 if request.pooling is not None else request.sampling.max_tokens
        limit = min(len(request.prompt_token_ids) + max_output, self._config.max_model_len)
        group = self.groups[request.request_id] = SequenceGroup(request, beams, limit, runs_ahead=runs_ahead)
        return group

    def _new_sequence(self, group: SequenceGroup, index: int, output: list[int]) -> Sequence:
        request = group.request
        lora_digest = b"" if request.lora is None else request.lora.digest
        tokens = [*request.prompt_token_ids, *output]
        key = extra_key(self._config.model_revision, request.cache_salt, lora_digest)
        table = self._kv_cache_manager.new_table(key)
        table.num_prompt_tokens, table.max_tokens = group.num_prompt_tokens, group.limit
        timings = SequenceTimings(arrived=self._clock())
        sample_request = self._new_sample_request(group, index)
        sequence = Sequence(self._next_sequence_ids(), group, index, tokens, table, timings, (sample_request,))
        self._register(sequence)
        return sequence

    def _register(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        sequence.group.sequences[sequence.id] = sequence

    def _new_sample_request(self, group: SequenceGroup, index: int) -> SampleRequest:
        request = group.request
        return SampleRequest(
            params=request.sampling,
            seed=choice_seed(request.sampling.seed, index),
            num_prompt_tokens=group.num_prompt_tokens,
            stop_token_ids=self._stop_token_ids(request),
            grammar=request.grammar,
            num_candidates=group.beam_search.num_candidates if group.beam_search is not None else 0,
        )

    def _stop_token_ids(self, request: Request) -> frozenset[int]:
        sampling = request.sampling
        ends = frozenset() if sampling.ignore_eos else self._config.eos_token_ids
        return ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends

    def _next_sequence_ids(self, count: int = 1) -> int:
        """Reserves ``count`` ids and returns the first."""
        self._next_id += count
        return self._next_id - count


MAX_SALT_BYTES = 32
_UNSUPPORTED = {
    Task.GENERATE: "This model makes no text: it was loaded to pool prompts.",
    Task.EMBED: "This model makes no embeddings: start its engine with --convert embed for that.",
    Task.CLASSIFY: "This model classifies no texts.",
}
"""Error messages for requests whose task the engine does not support."""


def check_request(request: Request, config: "SchedulerConfig", kv_cache_manager: KVCacheManager) -> None:
    """Raises ``QuireError`` INVALID, with the limit in its text, if a request can never run. The router checks the same
    rules first; an engine checks them again, because it cannot know its client.
    """
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"A cache salt has at most {MAX_SALT_BYTES} bytes.")
    if request.task not in config.supported_tasks:
        raise invalid("model", _UNSUPPORTED[request.task])
    sampling = request.sampling
    limit = min(config.max_model_len, kv_cache_manager.capacity.usable_tokens)
    if request.pooling is not None:
        _check_pooling(request, request.pooling, config, limit)
        return
    check_length(len(request.prompt_token_ids), sampling.max_tokens, limit)
    _check_tokens(request, config.vocab_size)
    _check_history(request)
    _check_width(request, config, kv_cache_manager)
    if sampling.structured is not None and request.grammar is None:
        raise QuireError(ErrorCode.INVALID, "This engine knows no grammars.", param=sampling.structured.param)


def _check_pooling(request: Request, pooling: PoolingParams, config: "SchedulerConfig", limit: int) -> None:
    prompt, pooler = request.prompt_token_ids, config.pooler_config
    assert pooler is not None, "an engine that pools says how"
    check_pooled_length(
        len(prompt), limit if config.enable_chunked_prefill else min(limit, config.max_num_batched_tokens)
    )
    _check_ids("prompt", prompt, config.vocab_size)
    check_dimensions(pooling.dimensions, pooler.pooled_size, pooler.matryoshka_dimensions)
    if pooling.second_text_start >= len(prompt):
        raise invalid("second_text_start", "The second text must begin within the prompt.")


def _check_tokens(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    for delivered in request.all_resumed_outputs:
        _check_ids("prompt", delivered.token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    for word in sampling.bad_words:
        _check_ids("bad_words", word, vocab_size)


def _check_ids(param: str, token_ids: abc.Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise invalid(param, f"Token ids must be between 0 and {vocab_size - 1}.")


def _check_history(request: Request) -> None:
    indexes = [delivered.index for delivered in request.all_resumed_outputs]
    if len(set(indexes)) < len(indexes) or not all(0 <= index < request.sampling.num_sequences for index in indexes):
        raise invalid("delivered", "Each choice can be delivered once, and there are as many as are drawn.")
    if request.sampling.beam_width and indexes:
        raise invalid("delivered", "Nothing of a beam search is delivered before its end.")
    finished = sum(delivered.finished for delivered in request.all_resumed_outputs)
    if finished == request.sampling.num_sequences:
        raise invalid("delivered", "All choices have been delivered.")
    for delivered in request.all_resumed_outputs:
        if not delivered.finished and len(delivered.token_ids) >= request.sampling.max_tokens:
            raise invalid("max_tokens", "The delivered output has reached max_tokens already.")


def _check_width(request: Request, config: "SchedulerConfig", kv_cache_manager: KVCacheManager) -> None:
    """Checks that all outputs of a request can run at once, and that its beams fit into memory together, because they
    advance together.
    """
    sampling = request.sampling
    if sampling.num_sequences > config.max_num_seqs:
        many = f"{sampling.num_sequences} outputs cannot run at once here; the limit is {config.max_num_seqs}."
        raise invalid(_width_param(sampling), many)
    if sampling.beam_width > config.vocab_size:
        raise invalid("beam_width", f"beam_width must be at most {config.vocab_size}, the tokens that there are.")
    if sampling.beam_width:
        own = (
            kv_cache_manager.num_blocks_for(sampling.max_tokens) + 2
        )  # the block that the prompt ends in, and the copy of it
        blocks = len(request.prompt_token_ids) // kv_cache_manager.block_size + sampling.beam_width * own
        if blocks * kv_cache_manager.num_groups > kv_cache_manager.device_pool.num_blocks:
            raise invalid("beam_width", "The engine's KV memory cannot hold that many beams of this length.")


def _width_param(sampling: SamplingParams) -> str:
    if sampling.beam_width:
        return "beam_width"
    return "best_of" if sampling.best_of else "n"
