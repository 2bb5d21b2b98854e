"""What an engine says of its blocks to those who look at the fleet."""

from hypothesis import given
from hypothesis import strategies as st
from quire_engine.server.messages import pool_to_proto


@given(st.binary(max_size=300).map(lambda data: bytes(each % 4 for each in data)), st.integers(1, 64))
def test_cells_are_few_and_each_is_what_most_of_its_blocks_are(states: bytes, most: int) -> None:
    pool = pool_to_proto(states, most)
    size = pool.blocks_per_cell
    parts = [states[start : start + size] for start in range(0, len(states), size)]
    assert len(pool.cells) == len(parts) <= most
    for cell, part in zip(pool.cells, parts, strict=True):
        assert part.count(cell) == max(map(part.count, range(4)))
    assert (pool.total, pool.cached) == (len(states), states.count(1))
    assert pool.used == states.count(2) + states.count(3)
