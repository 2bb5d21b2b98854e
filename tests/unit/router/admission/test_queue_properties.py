"""Queues of sequences against the plainest code that says the same."""

from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.block_table import BlockTable
from quire_engine.core.request import Request, Sequence, SequenceGroup, SequenceTimings
from quire_engine.core.request_queue import AdmittedQueue, WaitingQueue
from quire_proto.sampling import SamplingParams


def sequence(sequence_id: int, rank: float = 0.0, tokens: int = 3) -> Sequence:
    group = SequenceGroup(Request(str(sequence_id), [1] * tokens, SamplingParams()), None, 99)
    return Sequence(
        sequence_id, group, 0, [1] * tokens, BlockTable(b""), SequenceTimings(0), sample_requests=(), queue_key=rank
    )


class NaiveQueue:
    """Sorts everything at every question."""

    def __init__(self, max_overtakes: int | None) -> None:
        self.max_overtakes = max_overtakes
        self.waiting: list[Sequence] = []
        self.overtaken: dict[int, int] = {}

    def push(self, new: Sequence) -> None:
        self.waiting.append(new)
        self.overtaken[new.id] = 0

    def first(self) -> Sequence:
        for each in sorted(self.waiting, key=lambda each: each.id):
            if self.max_overtakes is not None and self.overtaken[each.id] >= self.max_overtakes:
                return each
        return min(self.waiting, key=lambda each: (each.queue_key, each.id))

    def admit(self, admitted: Sequence) -> None:
        self.waiting.remove(admitted)
        for each in self.waiting:
            self.overtaken[each.id] += each.id < admitted.id


STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "admit", "remove", "rank"]), st.integers(0, 50), st.integers(0, 6)),
    max_size=120,
)


@given(STEPS, st.sampled_from([None, 1, 2, 5]))
def test_the_first_request_is_first_by_rank_unless_overtaken_too_often(
    steps: list[tuple[str, int, int]], bound: int | None
) -> None:
    queue, naive = WaitingQueue(bound), NaiveQueue(bound)
    for number, (action, which, rank) in enumerate(steps):
        chosen = naive.waiting[which % len(naive.waiting)] if naive.waiting else None
        if action == "push":
            new = sequence(number, float(rank), tokens=1 + which)
            queue.push(new)
            naive.push(new)
        elif chosen is None:
            continue
        elif action == "admit":
            admitted = queue.first()
            queue.remove_admitted(admitted)
            naive.admit(admitted)
        elif action == "remove":
            queue.remove(chosen)
            naive.waiting.remove(chosen)
        else:
            queue.reorder(chosen, float(rank))
        assert list(queue) == naive.waiting
        assert queue.uncomputed_tokens == sum(each.num_tokens for each in naive.waiting)
        if naive.waiting:
            assert queue.first() is naive.first()
        if bound is not None:
            assert max(naive.overtaken.values()) <= bound


def test_the_queue_keeps_nothing_of_requests_that_left() -> None:
    queue = WaitingQueue(2)
    stays = sequence(0, -1.0)
    queue.push(stays)
    for number in range(1, 200):
        passing = sequence(number)
        queue.push(passing)
        queue.reorder(passing, float(number))
        queue.remove(passing)
    assert len(queue._by_rank) < 40
    assert len(queue._turns) < 40
    assert queue.first() is stays
    assert queue.next_round_robin() is stays


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=30, unique=True))
def test_admitted_requests_are_in_the_order_of_precedence(keys: list[tuple[int, int]]) -> None:
    queue = AdmittedQueue()
    members = []
    for number, (priority, age) in enumerate(keys):
        each = sequence(number)
        each.group.precedence = (priority, age)
        each.num_seqs = 1 + age
        members.append(each)
        queue.push(each)
    for leaving in members[::2]:
        queue.remove(leaving)
    left = sorted(members[1::2], key=lambda each: each.preemption_key)
    assert list(queue) == left
    assert queue.num_seqs == sum(each.num_seqs for each in left)
    if left:
        assert (queue.first(), queue.last()) == (left[0], left[-1])
