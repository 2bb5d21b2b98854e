"""Layers are divided so that the dearest stage is as cheap as can be."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st
from quire_engine.distributed.pipeline import divide


@given(st.data(), st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60))
def test_the_dearest_part_is_as_cheap_as_can_be(data: st.DataObject, costs: list[int], last_cost: int) -> None:
    count = data.draw(st.integers(1, len(costs)))
    parts = divide(costs, count, last_cost)

    def dearest(division: list[range]) -> int:
        extra = [0] * (count - 1) + [last_cost]
        return max(sum(costs[index] for index in part) + more for part, more in zip(division, extra, strict=True))

    assert [index for part in parts for index in part] == list(range(len(costs)))
    assert all(parts)
    others = [
        [range(start, end) for start, end in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations(range(1, len(costs)), count - 1)
    ]
    assert dearest(parts) == min(map(dearest, others))


def test_the_head_leaves_the_last_stage_fewer_layers() -> None:
    assert divide([10] * 8, 2) == [range(4), range(4, 8)]
    assert divide([10] * 8, 2, last_cost=40) == [range(6), range(6, 8)]
    assert divide([10] * 8, 2, last_cost=1000) == [range(7), range(7, 8)]
