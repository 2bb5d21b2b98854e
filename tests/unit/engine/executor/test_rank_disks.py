"""A transfer of several ranks ends with the last of them, and is as bad as the worst."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferOutcome, TransferResult
from quire_engine.executor.rank_disks import TransferResults

OUTCOMES = st.lists(st.sampled_from(TransferOutcome), min_size=3, max_size=3)


@given(st.lists(OUTCOMES, max_size=6), st.randoms())
def test_a_transfer_ends_once_with_its_last_part_and_the_worst_outcome(
    transfers: list[list[TransferOutcome]], random: st.randoms
) -> None:
    """Ranks end their transfers in any order."""
    results, left = TransferResults(3), dict.fromkeys(range(len(transfers)), 3)
    parts = [
        TransferResult(transfer_id, outcome, float(rank), f"rank {rank}" if outcome else "")
        for transfer_id, outcomes in enumerate(transfers)
        for rank, outcome in enumerate(outcomes)
    ]
    random.shuffle(parts)
    for part in parts:
        results.add(part)
        left[part.transfer_id] -= 1
        ended = results.take(0.0)
        if left[part.transfer_id]:
            assert not ended
            continue
        (result,) = ended
        outcomes = transfers[part.transfer_id]
        assert (result.transfer_id, result.outcome, result.seconds) == (part.transfer_id, max(outcomes), 2.0)
        assert bool(result.reason) == (result.outcome is not TransferOutcome.DONE)


def test_a_disk_has_what_all_ranks_have_in_the_same_slot() -> None:
    one = DiskContents(9, [(4, b"d"), (0, b"a"), (1, b"b"), (2, b"c")], 0.5, 100)
    two = DiskContents(9, [(0, b"a"), (1, b"x"), (2, b"c"), (3, b"b"), (4, b"d")], 0.25, 50)
    three = DiskContents(9, [(2, b"c"), (4, b"d")], 0.75, 50)
    assert DiskContents.in_common([one, two, three]) == DiskContents(9, [(4, b"d"), (2, b"c")], 0.75, 200)
    assert DiskContents.in_common([one]) == one


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_nothing_is_taken_twice(timeout: float) -> None:
    results = TransferResults()
    results.add(TransferResult(7))
    assert [result.transfer_id for result in results.take(timeout)] == [7]
    assert not results.take(timeout)
