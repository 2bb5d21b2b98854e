"""Drives an executor by hand, without a scheduler: random blocks, random chunks, random moves to the host and back.
States of recurrent layers move with the blocks.
"""

import random
from dataclasses import dataclass, field

from quire_engine.core.block_pool import NULL_BLOCK, BlockCopies, BlockCopy, PoolCopies
from quire_engine.core.executor import Executor
from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import ModelOutput, SampleRequest, SchedulerOutput
from quire_proto.sampling import SamplingParams

from tests.support.steps import KnownChunk, execute, make_step

GREEDY = SamplingParams(temperature=0)


@dataclass
class Sequence:
    """Tokens, and where the keys and values of the first ``computed`` of them are, for each group of layers, and the
    states after them.
    """

    id: int
    prompt: list[int]
    wanted: int
    sampling: SamplingParams = GREEDY
    lora: LoRARequest | None = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    host_blocks: list[list[int | None]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    host_states: list[int | None] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.wanted


class Driver:
    """Runs sequences to their ends in steps whose every choice is random, from one seed."""

    def __init__(self, executor: Executor, seed: int, max_chunk: int, swapping: float = 0.2) -> None:
        self._executor = executor
        self._random = random.Random(seed)
        self._max_chunk = max_chunk
        self._swapping = swapping
        capacity = executor.kv_cache_config
        self._free = self._random.sample(range(1, capacity.device_blocks), capacity.device_blocks - 1)
        self._host_free = self._random.sample(range(capacity.host_blocks), capacity.host_blocks)
        self._states = states = capacity.states
        self._free_states = [] if states is None else [*range(1, states.device_blocks)]
        self._free_host_states = [] if states is None else [*range(states.host_blocks)]
        self._steps = 0

    def run(self, sequences: list[Sequence]) -> list[list[int]]:
        """The outputs, in the order of the sequences."""
        while alive := [one for one in sequences if not one.done]:
            self._apply(sequences, execute(self._executor, self._plan(alive)))
            self._release(sequences)
        return [one.output for one in sequences]

    def _plan(self, alive: list[Sequence]) -> SchedulerOutput:
        copies, chunks = BlockCopies(states=self._states and PoolCopies()), list[KnownChunk]()
        self._steps += 1
        chosen = self._random.sample(alive, self._random.randint(1, len(alive)))
        if self._random.random() < self._swapping:
            copies.blocks_to_swap_out = [
                copy for one in alive if one not in chosen for copy in self._swap_out(one, copies.states)
            ]
        for one in chosen:
            if one.host_blocks and not copies.blocks_to_swap_out:
                copies.blocks_to_swap_in += self._swap_in(one, copies.states)
            if not one.host_blocks:
                chunks += self._chunk(one)
        return make_step(self._steps, chunks, copies)

    def _chunk(self, one: Sequence) -> list[KnownChunk]:
        size, groups = self._executor.kv_cache_config.block_size, self._executor.kv_cache_config.groups
        one.blocks = one.blocks or [[] for _ in groups]
        for group, table in zip(groups, one.blocks, strict=True):
            left = range(group.first_block(one.computed, size))
            self._give_back(self._free, [table[index] for index in left if table[index] != NULL_BLOCK])
            table[: len(left)] = [NULL_BLOCK] * len(left)
        end = min(len(one.tokens), one.computed + self._random.randint(1, self._max_chunk))
        missing = max(0, -(-end // size) - len(one.blocks[0]))
        if missing * len(groups) > len(self._free) or not self._has_states(one, end):
            return []
        for table in one.blocks:
            table += [self._free.pop() for _ in range(missing)]
        request = SampleRequest(one.sampling, one.sampling.seed, len(one.tokens) - len(one.output))
        tokens, (first, *others) = one.tokens[one.computed : end], one.blocks
        chunk = KnownChunk(
            *(one.id, tokens, one.computed, first, (request,)),
            lora=one.lora,
            other_block_ids=others if self._states is None else [*others, [*one.states]],
            num_draws=int(end == len(one.tokens)),
            known=[*one.tokens],
        )
        one.computed = end
        return [chunk]

    def _has_states(self, one: Sequence, end: int) -> bool:
        """Whether the sequence has a state for the tokens before ``end``, and for each checkpoint until then."""
        if self._states is None:
            return True
        size = self._states.block_size
        needed, left = -(-end // size) - len(one.states), range(max(0, one.computed - 1) // size)
        if needed > len(self._free_states):
            return False
        self._give_back(self._free_states, [one.states[index] for index in left if one.states[index] != NULL_BLOCK])
        one.states[: len(left)] = [NULL_BLOCK] * len(left)
        one.states += [self._free_states.pop() for _ in range(needed)]
        return True

    def _swap_out(self, one: Sequence, states: PoolCopies | None) -> list[BlockCopy]:
        held = [block for table in one.blocks for block in table if block != NULL_BLOCK]
        held_states = [state for state in one.states if state != NULL_BLOCK]
        if not held or len(held) > len(self._host_free) or len(held_states) > len(self._free_host_states):
            return []
        if states is not None:
            moved = {state: self._free_host_states.pop() for state in held_states}
            states.blocks_to_swap_out += [BlockCopy(*each) for each in moved.items()]
            one.states, one.host_states = [], [moved.get(state) for state in one.states]
            self._give_back(self._free_states, held_states)
        copies = [BlockCopy(block, self._host_free.pop()) for block in held]
        targets = {copy.source: copy.target for copy in copies}
        one.host_blocks = [[targets.get(block) for block in table] for table in one.blocks]
        self._give_back(self._free, held)
        one.blocks = []
        return copies

    def _swap_in(self, one: Sequence, states: PoolCopies | None) -> list[BlockCopy]:
        held = [block for table in one.host_blocks for block in table if block is not None]
        held_states = [state for state in one.host_states if state is not None]
        if len(held) > len(self._free) or len(held_states) > len(self._free_states):
            return []
        if states is not None:
            moved: dict[int | None, int] = {state: self._free_states.pop() for state in held_states}
            states.blocks_to_swap_in += [BlockCopy(state, moved[state]) for state in held_states]
            one.states, one.host_states = [moved.get(state, NULL_BLOCK) for state in one.host_states], []
            self._give_back(self._free_host_states, held_states)
        copies = [BlockCopy(block, self._free.pop()) for block in held]
        targets = {None: NULL_BLOCK, **{copy.source: copy.target for copy in copies}}
        one.blocks = [[targets[block] for block in table] for table in one.host_blocks]
        self._give_back(self._host_free, held)
        one.host_blocks = []
        return copies

    def _give_back(self, free: list[int], blocks: list[int]) -> None:
        """Freed blocks go anywhere into the order, so that they are soon written by others."""
        for block in blocks:
            free.append(block)
            place = self._random.randrange(len(free))
            free[place], free[-1] = free[-1], free[place]

    def _apply(self, sequences: list[Sequence], model_output: ModelOutput) -> None:
        assert not model_output.errors
        for one in sequences:
            if one.id in model_output.token_ids:
                one.output.append(model_output.token_ids[one.id])

    def _release(self, sequences: list[Sequence]) -> None:
        for one in sequences:
            if one.done and one.blocks:
                self._give_back(self._free, [block for table in one.blocks for block in table if block != NULL_BLOCK])
                self._give_back(self._free_states, [state for state in one.states if state != NULL_BLOCK])
                one.blocks, one.states = [], []
