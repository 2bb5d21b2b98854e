"""The order of admission, the choice of a victim and the way it is preempted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.core.absence import PreemptionMode, PreemptionReason
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request, SequenceStatus
from quire_engine.core.request_queue import (
    AGING,
    QueuedRequest,
    fcfs,
    priority,
    sjf,
)
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import SchedulerOutput
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import SamplingParams

from tests.support.steps import all_drawn

JOBS = st.builds(QueuedRequest, st.integers(1, 10_000), st.integers(0, 10**9), st.integers(-5, 5))


@given(JOBS, JOBS)
def test_policies_rank_as_their_names_say(one: QueuedRequest, other: QueuedRequest) -> None:
    assert fcfs(one) == fcfs(other)
    assert (priority(one) < priority(other)) == (one.priority < other.priority)
    shorter = one.uncached_tokens <= other.uncached_tokens and one.served_at_arrival <= other.served_at_arrival
    assert not shorter or sjf(one) <= sjf(other)


@given(JOBS)
def test_a_job_is_overtaken_by_nothing_that_comes_after_it_has_aged(job: QueuedRequest) -> None:
    late = job.served_at_arrival + int(job.uncached_tokens / AGING) + 1
    assert sjf(job) < sjf(QueuedRequest(1, late, 0))


class Bench:
    """A scheduler that is stepped by hand; every token drawn is 9."""

    def __init__(self, device: int = 1000, host: int = 0, rates: Rates | None = None, **limits: object) -> None:
        self.memory = KVCacheManager(KVCacheConfig(4, device, host))
        given = {} if rates is None else {"rates": rates}
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=4000, **limits), self.memory, **given)
        self.order: list[str] = []

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 1, **fields: object) -> None:
        tokens = [len(self.order) + 1] * prompt if isinstance(prompt, int) else prompt
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(request_id, tokens, params, **fields))

    def step(self) -> SchedulerOutput:
        scheduler_output = self.scheduler.schedule()
        self.order += [name for name in self.scheduler.request_ids() if name not in self.order]
        self.scheduler.update_from_output(scheduler_output, all_drawn(scheduler_output, 9))
        return scheduler_output

    def drain(self) -> list[str]:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return self.order
            self.step()
        raise AssertionError("it never ended")


def test_first_come_first_served() -> None:
    bench = Bench(max_num_seqs=1)
    for index, length in enumerate((50, 5, 20, 1)):
        bench.add(str(index), length)
    assert bench.drain() == ["0", "1", "2", "3"]


def test_short_jobs_go_first_and_equal_ones_in_the_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="sjf")
    for index, length in enumerate((50, 5, 20, 5)):
        bench.add(str(index), length)
    assert bench.drain() == ["1", "3", "2", "0"]


def test_no_job_is_overtaken_more_often_than_the_bound() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="sjf", max_overtakes=3)
    bench.add("long", 900)
    for index in range(10):
        bench.add(f"short {index}", 2)
    assert bench.drain().index("long") == 3


def test_a_long_job_that_has_waited_goes_before_a_short_one_that_comes_late() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="sjf", max_overtakes=10_000)
    bench.add("running", 10)
    bench.step()
    bench.add("long", 100)
    bench.add("other", 90)
    for index in range(150):
        bench.add(f"other {index}", 60)
        bench.step()
    assert bench.scheduler.stats.computed_tokens > 100 / AGING
    bench.add("late", 1)
    order = bench.drain()
    assert order.index("long") < order.index("late")


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_resumed_requests_are_scheduled_before_new_ones(policy: str) -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy=policy)
    bench.add("running", 8, max_tokens=2)
    bench.step()
    bench.add("new", 1, priority=-5)
    bench.add("begun", 60, max_tokens=9, output_token_ids=[9, 9])
    bench.add("begun too", 8, max_tokens=9, output_token_ids=[9, 9])
    bench.add("batch", 8, max_tokens=9, output_token_ids=[9, 9], priority=BEST_EFFORT)
    assert bench.drain() == ["running", "begun", "begun too", "new", "batch"]


def test_what_is_cached_makes_a_job_short() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="sjf")
    known = list(range(100, 164))
    bench.add("first", known)
    bench.drain()
    bench.add("middle", 30)
    bench.add("cached", [*known, 7])
    assert bench.drain() == ["first", "cached", "middle"]


def test_what_is_cached_while_a_job_waits_makes_it_short_too() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="sjf")
    known = list(range(100, 164))
    bench.add("first", known)
    bench.step()
    bench.add("middle", 30, max_tokens=1)
    bench.add("cached", [*known, 7])
    assert bench.drain() == ["first", "cached", "middle"]


def test_smaller_numbers_go_first_and_equal_ones_in_the_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    for index, number in enumerate((3, 1, 2, 1)):
        bench.add(str(index), 5, priority=number)
    assert bench.drain() == ["1", "3", "2", "0"]


def test_the_largest_priority_number_is_preempted() -> None:
    bench = Bench(device=12, scheduling_policy="priority")
    bench.add("unimportant", 12, max_tokens=30, priority=9)
    bench.step()
    bench.add("important", 12, max_tokens=30, priority=0)
    while not bench.scheduler.preempted and bench.scheduler.has_work:
        bench.step()
    assert [sequence.request.request_id for sequence in bench.scheduler.preempted] == ["unimportant"]
    assert [sequence.request.request_id for sequence in bench.scheduler.running] == ["important"]


def test_priorities_mean_nothing_to_other_policies() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("0", 5, priority=5)
    bench.add("1", 5, priority=-5)
    assert bench.drain() == ["0", "1"]


@pytest.mark.parametrize(
    ("host", "rates", "max_swapped", "reason", "status"),
    [
        (40, Rates(1, 1e9), 9, PreemptionReason.CHEAPER, SequenceStatus.SWAPPED),
        (40, Rates(1e9, 1), 9, PreemptionReason.CHEAPER, SequenceStatus.PREEMPTED),
        (0, Rates(1, 1e9), 9, PreemptionReason.HOST_FULL, SequenceStatus.PREEMPTED),
        (40, Rates(1, 1e9), 0, PreemptionReason.TOO_MANY_SWAPPED, SequenceStatus.PREEMPTED),
    ],
)
def test_a_victim_is_preempted_the_cheapest_way_and_the_reason_is_recorded(
    host: int, rates: Rates, max_swapped: int, reason: PreemptionReason, status: SequenceStatus
) -> None:
    bench = Bench(device=10, host=host, rates=rates, max_swapped=max_swapped)
    bench.add("one", 15, max_tokens=20)
    bench.add("two", 13, max_tokens=20)
    while not (bench.scheduler.swapped or bench.scheduler.preempted):
        bench.step()
    victim = next(iter(bench.scheduler.swapped or bench.scheduler.preempted))
    assert (victim.request.request_id, victim.status) == ("two", status)
    assert [moment.reason for moment in victim.timings.events] == [reason]
    way = PreemptionMode.SWAP if status is SequenceStatus.SWAPPED else PreemptionMode.RECOMPUTE
    assert bench.scheduler.stats.preemptions == {(way, reason): 1}
