"""Steps by hand, and the plainest form of what a worker keeps: chunks with all that a worker knows of them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.executor import Executor
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, NewRequest, SampleRequest, ScheduledChunk, SchedulerOutput
from quire_proto.pooling import PoolingParams

if TYPE_CHECKING:
    from quire_engine.worker.input_batch import InputBatch

PENDING = -1
"""Stands for a token that the step before draws."""
VOCAB = 1 << 15


@dataclass
class KnownChunk:
    """A chunk with its tokens, of which the last may be ``PENDING``, and what else its row has: all ``known`` tokens,
    where there are others, a block table for each group of layers, and how its tokens are drawn. It has a draw for each
    of ``sample_requests``, or behind each of its drafts and the token before them, unless ``num_draws`` says otherwise.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    sample_requests: tuple[SampleRequest, ...] = ()
    num_prompt_logprobs: int | None = None
    num_draft_tokens: int = 0
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    is_last: bool = False
    other_block_ids: Sequence[list[int]] = ()
    num_draws: int | None = None
    known: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def tables(self) -> list[list[int]]:
        return [self.block_ids, *self.other_block_ids]

    @property
    def draws(self) -> int:
        if self.num_draws is not None:
            return self.num_draws
        return self.num_draft_tokens + 1 if self.num_draft_tokens else len(self.sample_requests) or int(self.is_last)

    def scheduled(self) -> ScheduledChunk:
        """As a step has it. Its row has the number of its sequence."""
        drafts = self.token_ids[len(self.token_ids) - self.num_draft_tokens :]
        length = len(self.token_ids)
        return ScheduledChunk(
            *(self.sequence_id, self.sequence_id, self.start, length, self.draws),
            awaits_token=PENDING in self.token_ids[-1:],
            draft_token_ids=tuple(drafts),
        )

    def new(self) -> NewRequest:
        """Its row, with any tokens where others are not known."""
        known = list(self.known) or [0] * self.start + [each for each in self.token_ids if each != PENDING]
        tables = tuple(array("i", table) for table in self.tables)
        return NewRequest(
            *(self.sequence_id, array("i", known), tables, self.sample_requests),
            num_prompt_logprobs=self.num_prompt_logprobs,
            lora=self.lora,
            pooling=self.pooling,
        )


def make_step(step: int, chunks: Sequence[KnownChunk] = (), *copies: Any, **more: Any) -> SchedulerOutput:
    """A step of these chunks, all of whose rows are sent with it."""
    made = SchedulerOutput(step, *copies, new=[chunk.new() for chunk in chunks], **more)
    for chunk in chunks:
        made.add_chunk(chunk.scheduled())
    return made


def prepare(
    chunks: Sequence[KnownChunk],
    block_size: int,
    groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
    state_block_size: int = 0,
) -> "InputBatch":
    """The batch of these chunks, all of whose rows are sent. Their last table is of states, if these have a size."""
    from quire_engine.worker.input_batch import prepare_inputs
    from quire_engine.worker.request_states import RequestStates

    states, step = RequestStates(len(groups), VOCAB, state_block_size), make_step(0, chunks)
    states.update(step)
    return prepare_inputs(states, step, block_size, groups)


def drawn_tokens(scheduler_output: SchedulerOutput, model_output: ModelOutput) -> dict[int, list[int]]:
    """The tokens of a step's draws by the sequence of their chunk."""
    tokens = iter(model_output.token_ids)
    return {chunk.sequence_id: [next(tokens) for _ in range(chunk.num_draws)] for chunk in scheduler_output.chunks}


def all_drawn(scheduler_output: SchedulerOutput, token_id: int) -> ModelOutput:
    """What a step makes if all draw the same token."""
    return ModelOutput([token_id] * scheduler_output.total_num_draws)


def by_sequence(scheduler_output: SchedulerOutput, model_output: ModelOutput) -> ModelOutput:
    """What a step made by the sequences of its chunks, and of the first where one has several draws; no token where
    there is another answer.
    """
    made, draw = ModelOutput({}, timings=model_output.timings), 0
    for number, chunk in enumerate(scheduler_output.chunks):
        id = chunk.sequence_id
        parts = ((made.logprobs, model_output.logprobs), (made.candidates, model_output.candidates))
        for part, given in (*parts, (made.pooled, model_output.pooled), (made.errors, model_output.draw_errors)):
            if chunk.num_draws and draw in given:
                part[id] = given[draw]
        if number in model_output.errors:
            made.errors[id] = model_output.errors[number]
        if number in model_output.prompt_logprobs:
            made.prompt_logprobs[id] = model_output.prompt_logprobs[number]
        if chunk.num_draws and not any(id in part for part in (made.errors, made.candidates, made.pooled)):
            made.token_ids[id] = model_output.token_ids[draw]
        draw += chunk.num_draws
    return made


def execute(executor: Executor, scheduler_output: SchedulerOutput) -> ModelOutput:
    """Runs a step. Returns what it made by the sequences of its chunks."""
    return by_sequence(scheduler_output, executor.execute_model(scheduler_output))


class PlainRows:
    """What a worker keeps of each row, as lists: the reference for ``RequestStates``."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.requests: dict[int, NewRequest] = {}

    def update(self, scheduler_output: SchedulerOutput) -> None:
        for row in scheduler_output.freed_rows:  # one that came with a step that failed may never have been taken in
            for kept in (self.tokens, self.tables, self.requests):
                kept.pop(row, None)
        for new in scheduler_output.new:
            self.requests[new.row] = new
            self.tokens[new.row] = new.token_ids.tolist()
            self.tables[new.row] = [table.tolist() for table in new.block_ids]
        for row, index, token_id in _triples(scheduler_output.new_tokens):
            _put(self.tokens[row], index, token_id)
        for number, changes in enumerate(scheduler_output.new_blocks):
            for row, index, block_id in _triples(changes):
                _put(self.tables[row][number], index, block_id)

    def append_drawn(self, row: int, position: int, token_id: int) -> None:
        _put(self.tokens[row], position, token_id)

    def known(self, chunk: ScheduledChunk) -> KnownChunk:
        """The chunk with what its row has now."""
        tokens, (first, *others) = self.tokens[chunk.row], [[*table] for table in self.tables[chunk.row]]
        token_ids = tokens[chunk.start : chunk.end - chunk.awaits_token] + [PENDING] * chunk.awaits_token
        assert len(token_ids) == chunk.length, "the row has not all tokens of the chunk"
        new = self.requests[chunk.row]
        return KnownChunk(
            *(chunk.sequence_id, token_ids, chunk.start, first, new.sample_requests),
            num_prompt_logprobs=new.num_prompt_logprobs,
            num_draft_tokens=chunk.num_draft_tokens,
            lora=new.lora,
            pooling=new.pooling,
            other_block_ids=others,
            num_draws=chunk.num_draws,
            known=[*tokens],
        )


def prompt_targets(chunk: KnownChunk) -> list[int]:
    """The tokens of the prompt that follow those of the chunk, where they are asked for."""
    if chunk.num_prompt_logprobs is None:
        return []
    num_prompt = chunk.sample_requests[0].num_prompt_tokens
    return list(chunk.known)[chunk.start + 1 : min(chunk.end + 1, num_prompt)]


def _triples(numbers: "array[int]") -> list[tuple[int, int, int]]:
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def _put(values: list[int], index: int, value: int) -> None:
    """At ``index``, which is at most the next one: nothing may be left out."""
    assert index <= len(values), "something before it was never sent"
    values[index : index + 1] = [value]
