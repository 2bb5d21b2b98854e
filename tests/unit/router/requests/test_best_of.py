"""The choice among outputs that were drawn."""

from hypothesis import given
from hypothesis import strategies as st
from quire_proto.sampling import best_of

MEANS = st.lists(st.sampled_from([-1.5, -1.0, -0.25, float("-inf")]), min_size=1, max_size=8)


@given(MEANS, st.integers(1, 8))
def test_the_most_probable_come_first_and_of_equal_ones_the_earlier(means, n):
    chosen = best_of(means, n)

    assert len(chosen) == min(n, len(means))
    assert (
        chosen
        == [index for value in sorted(set(means), reverse=True) for index, mean in enumerate(means) if mean == value][
            :n
        ]
    )
