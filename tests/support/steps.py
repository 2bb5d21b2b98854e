"""Steps by hand, and the plainest form of what a worker keeps: chunks with all that a worker reads of them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import NewRequest, SampleRequest, ScheduledChunk, SchedulerOutput
from quire_proto.pooling import PoolingParams

if TYPE_CHECKING:
    from quire_engine.worker.input_batch import InputBatch

PENDING = -1
"""Stands for a token that the step before draws."""


@dataclass
class KnownChunk:
    """A chunk with its tokens, of which the last may be ``PENDING``, and its sequence's block table for each group of
    layers.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    sample_requests: tuple[SampleRequest, ...] = ()
    prompt_logprob_targets: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_draft_tokens: int = 0
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    is_last: bool = False
    other_block_ids: Sequence[list[int]] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def tables(self) -> list[list[int]]:
        return [self.block_ids, *self.other_block_ids]

    def scheduled(self) -> ScheduledChunk:
        """As a step has it. Its row has the number of its sequence."""
        return ScheduledChunk(
            *(self.sequence_id, self.sequence_id, self.start, len(self.token_ids)),
            sample_requests=self.sample_requests,
            awaits_token=PENDING in self.token_ids[-1:],
            draft_token_ids=self.token_ids[len(self.token_ids) - self.num_draft_tokens :],
            prompt_logprob_targets=self.prompt_logprob_targets,
            num_prompt_logprobs=self.num_prompt_logprobs,
            lora=self.lora,
            pooling=self.pooling,
            is_last=self.is_last,
        )

    def new(self) -> NewRequest:
        """Its row, with any tokens before the chunk."""
        known = [0] * self.start + [token_id for token_id in self.token_ids if token_id != PENDING]
        tables = tuple(array("i", table) for table in self.tables)
        return NewRequest(self.sequence_id, array("i", known), tables, next(iter(self.sample_requests), None))


def make_step(step: int, chunks: Sequence[KnownChunk] = (), *copies: Any, **more: Any) -> SchedulerOutput:
    """A step of these chunks, all of whose rows are sent with it."""
    new = [chunk.new() for chunk in chunks]
    return SchedulerOutput(step, [chunk.scheduled() for chunk in chunks], *copies, new=new, **more)


def prepare(
    chunks: Sequence[KnownChunk], block_size: int, groups: Sequence[KVCacheGroup] = (KVCacheGroup(),)
) -> "InputBatch":
    """The batch of these chunks, all of whose rows are sent."""
    from quire_engine.worker.input_batch import prepare_inputs
    from quire_engine.worker.request_states import RequestStates

    states, step = RequestStates(len(groups)), make_step(0, chunks)
    states.update(step)
    return prepare_inputs(states, step.chunks, block_size, groups)


class PlainRows:
    """What a worker keeps of each row, as lists: the reference for ``RequestStates``."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}

    def update(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.new:
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
        return KnownChunk(
            *(chunk.sequence_id, token_ids, chunk.start, first, chunk.sample_requests),
            prompt_logprob_targets=[*chunk.prompt_logprob_targets],
            num_prompt_logprobs=chunk.num_prompt_logprobs,
            num_draft_tokens=chunk.num_draft_tokens,
            lora=chunk.lora,
            pooling=chunk.pooling,
            is_last=chunk.is_last,
            other_block_ids=others,
        )


def _triples(numbers: "array[int]") -> list[tuple[int, int, int]]:
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def _put(values: list[int], index: int, value: int) -> None:
    """At ``index``, which is at most the next one: nothing may be left out."""
    assert index <= len(values), "something before it was never sent"
    values[index : index + 1] = [value]
