"""Whatever a worker is sent, and in whatever pieces, its rows hold what lists would, and a step's inputs are those that
are made from lists.
"""

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.core.step import NewRequest, SampleRequest, ScheduledChunk, SchedulerOutput
from quire_engine.worker.input_batch import prepare_inputs
from quire_engine.worker.request_states import RaggedRows, RequestStates
from quire_proto.sampling import SamplingParams

from tests.support import reference_inputs
from tests.support.steps import PlainRows

BLOCK_SIZE = 4
GROUPS = (KVCacheGroup(), KVCacheGroup(7))
ROWS = st.integers(0, 200)
NUMBERS = st.integers(0, 2**31 - 1)


@st.composite
def news(draw: st.DrawFn) -> NewRequest:
    tokens = draw(st.lists(NUMBERS, min_size=1, max_size=40))
    count = -(-len(tokens) // BLOCK_SIZE) + draw(st.integers(0, 2))
    tables = [draw(st.lists(NUMBERS, min_size=count, max_size=count)) for _ in GROUPS]
    return NewRequest(draw(ROWS), array("i", tokens), tuple(array("i", table) for table in tables))


class WorkerRowsMachine(RuleBasedStateMachine):
    """Steps of any kind for rows that some sequences have."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.plain = RequestStates(len(GROUPS), 100), PlainRows()

    def take(self, **fields: Any) -> None:
        step = SchedulerOutput(0, **fields)
        self.states.update(step)
        self.plain.update(step)

    @rule(new=st.lists(news(), max_size=4))
    def add(self, new: list[NewRequest]) -> None:
        self.take(new=new)

    @precondition(lambda self: self.plain.tokens)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        tokens, blocks = array("i"), [array("i") for _ in GROUPS]
        for row in data.draw(st.lists(st.sampled_from(sorted(self.plain.tokens)), unique=True, max_size=5)):
            length = len(self.plain.tokens[row])
            first = data.draw(st.integers(max(0, length - 3), length))
            for index, number in enumerate(data.draw(st.lists(NUMBERS, max_size=6)), first):
                tokens.extend((row, index, number))
            for changes, table in zip(blocks, self.plain.tables[row], strict=True):
                for index in data.draw(st.lists(st.integers(0, len(table) - 1), max_size=2)):
                    changes.extend((row, index, 0))
                for index in range(len(table), len(table) + data.draw(st.integers(0, 9))):
                    changes.extend((row, index, index))
        self.take(new_tokens=tokens, new_blocks=tuple(blocks))

    @precondition(lambda self: self.plain.tokens)
    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.plain.tokens)), unique=True, min_size=1))
        positions = [len(self.plain.tokens[row]) for row in rows]
        drawn = data.draw(st.lists(NUMBERS, min_size=len(rows), max_size=len(rows)))
        self.states.tokens.write(np.array(rows), np.array(positions), np.array(drawn))
        for row, position, token_id in zip(rows, positions, drawn, strict=True):
            self.plain.append_drawn(row, position, token_id)

    @precondition(lambda self: self.plain.tokens)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        step = SchedulerOutput(0)
        for row in data.draw(st.permutations(sorted(self.plain.tokens))):
            slots = BLOCK_SIZE * min(map(len, self.plain.tables[row]))
            end = data.draw(st.integers(1, min(len(self.plain.tokens[row]) + 1, slots)))
            awaits = end > len(self.plain.tokens[row])
            start = end - 1 if awaits else data.draw(st.integers(0, end - 1))
            step.add_chunk(ScheduledChunk(row, row, start, end - start, awaits_token=awaits))
        made = prepare_inputs(self.states, step, BLOCK_SIZE, GROUPS).model_input
        known = [self.plain.known(chunk) for chunk in step.chunks]
        assert made.token_ids.tolist() == reference_inputs.token_ids(known)
        assert made.positions.tolist() == reference_inputs.positions(known)
        for number, (group, batch) in enumerate(zip(GROUPS, made.attention, strict=True)):
            expected = reference_inputs.attention_batch(known, number, group, BLOCK_SIZE)
            assert {name: getattr(batch, name).tolist() for name in expected} == expected

    @invariant()
    def rows_are_as_lists(self) -> None:
        for row, tokens in self.plain.tokens.items():
            assert self.states.tokens.row(row)[: len(tokens)].tolist() == tokens


TestWorkerRows = WorkerRowsMachine.TestCase


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_rows_take_a_few_times_what_they_hold(sizes: list[int]) -> None:
    rows = RaggedRows()
    longest: dict[int, int] = {}
    for number, size in enumerate(sizes):
        rows.put(number % 7, np.zeros(size, np.int32))
        longest[number % 7] = max(longest.get(number % 7, 16), size)
    assert len(rows.data) <= max(4096, 6 * sum(longest.values()))


@pytest.mark.parametrize("size", [0, 1])
def test_a_row_may_hold_next_to_nothing(size: int) -> None:
    rows = RaggedRows()
    rows.put(3, np.zeros(size, np.int32))
    rows.write(np.array([3]), np.array([size]), np.array([7]))
    assert rows.row(3)[size] == 7


def test_a_row_that_several_outputs_were_drawn_from_is_plain_once_they_are_apart() -> None:
    states, request = RequestStates(1, 100), SampleRequest(SamplingParams(temperature=0), 0, 2)
    new = NewRequest(0, array("i", [5, 6]), (array("i", [1]),), (request, request))
    forked, following = SchedulerOutput(1, new=[new]), SchedulerOutput(2)
    forked.add_chunk(ScheduledChunk(0, 0, 0, 2, num_draws=2))
    following.add_chunk(ScheduledChunk(0, 0, 2, 1, num_draws=1))
    states.update(forked)
    assert not prepare_inputs(states, forked, BLOCK_SIZE).is_plain
    states.tokens.write(np.array([0]), np.array([2]), np.array([7]))
    assert prepare_inputs(states, following, BLOCK_SIZE).is_plain
