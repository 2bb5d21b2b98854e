"""The fleet simulator's parts: news that come late, shares that are told now and then, and workloads."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_router.core.retry import BURST, PublishRate
from quire_router.engines.load import LoadLedger
from quire_router.engines.load_messages import LoadMessage, SpeculativeBlocks
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex
from quire_router.simulation.experiments import add_flood, assign_tenants
from quire_router.simulation.simulated_router import DelayedFeed, FeedReader, Publisher
from quire_router.simulation.workload import Job, SharedPrefix, from_trace, generate, stretched_to

from tests.support.hashes import hash_blocks
from tests.support.traces import write_mooncake

times = st.lists(st.integers(0, 100), max_size=30).map(sorted)


@given(times, times, st.one_of(st.none(), st.integers(0, 50)))
def test_messages_arrive_once_each_in_order_and_not_early(told, asked, delay) -> None:
    news: DelayedFeed[int] = DelayedFeed()
    reader = FeedReader(news, delay)
    heard: list[tuple[int, int]] = []
    for number, time in enumerate(told):
        news.publish(time, number)
    for now in asked:
        due = list(reader.due(now))
        assert all(time <= now for time, _ in due)
        heard += due
    known = [] if delay is None or not asked else [t for t in told if t + delay <= asked[-1]]
    assert heard == [(time + (delay or 0), number) for number, time in enumerate(known)]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20).map(sorted), st.integers(0, 40))
def test_a_share_is_sent_when_it_changes_but_on_average_not_more_often_than_the_interval(changes, interval) -> None:
    shares: DelayedFeed[LoadMessage] = DelayedFeed()
    ledger, expectations = parts()
    ledger.add("0").describe(engine_pb2.DescribeResponse())
    publisher = Publisher("a", ledger, expectations, shares, interval)
    for now in changes:
        publisher.flush(now)
        ledger.begin("0", pending_tokens=1)
        publisher.mark_changed(now)
    publisher.flush(changes[-1] + 2 * interval)
    moments = [time for time, _ in shares.items]
    assert all(later - earlier >= interval for earlier, later in zip(moments, moments[BURST:], strict=False))
    assert moments[:BURST] == changes[:BURST]
    for time, message in shares.items:
        assert message.load.engines["0"][0] >= sum(change < time for change in changes)
        assert message.load.engines["0"][0] <= sum(change <= time for change in changes)
    assert shares.items[-1][1].load.engines["0"][0] == len(changes)


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 100, 1000])), min_size=1, max_size=60))
def test_shares_are_sent_at_once_after_a_pause_and_rarely_where_they_are_many_or_long(waits) -> None:
    """Each is paid for with an interval for itself and one for each hundred engines; ten intervals can be owed."""
    cadence, now, paid = PublishRate(10), 0.0, 0.0
    for wait, engines in waits:
        now = max(now + wait, cadence.next_at(now + wait))
        assert now == pytest.approx(max(now, paid - 90))
        paid = max(paid, now) + 10 * (1 + engines / 100)
        cadence.on_published(now, engines)
    assert cadence.next_at(now) == pytest.approx(max(now, paid - 90))
    assert cadence.next_at(paid) == paid


@given(st.integers(0, 300))
def test_the_shares_that_a_router_receives_do_not_grow_with_the_number_of_peers(peers: int) -> None:
    """All tell as often as they may for 1,000 intervals, in which four others tell 4,000 shares."""
    cadence, now, told = PublishRate(1), 0.0, 0
    while (now := cadence.next_at(now)) < 1000:
        cadence.on_published(now, 0, peers)
        told += 1
    assert peers * (told - BURST) <= 4_000 + peers
    assert told >= 1000 / max(1, peers / 4)


def test_a_share_without_changes_is_never_sent() -> None:
    shares: DelayedFeed[LoadMessage] = DelayedFeed()
    publisher = Publisher("a", *parts(), shares, None)
    publisher.mark_changed(5)
    publisher.flush(10**12)
    assert shares.items == []


def parts() -> tuple[LoadLedger, SpeculativeBlocks]:
    table = EngineTable()
    return LoadLedger(table), SpeculativeBlocks(table, PrefixIndex())


def test_prompts_share_the_blocks_that_share_hashes_in_the_trace(tmp_path) -> None:
    rows: list[Any] = [(0, 1300, 5, [4, 5, 6]), (0, 1100, 5, [4, 5, 7]), (3000, 600, 5, [9, 5])]
    jobs = from_trace(write_mooncake(tmp_path / "trace.jsonl", rows), start=0, limit=None, seed=0)
    assert sorted(job.num_prompt for job in jobs) == [600, 1100, 1300]
    names = {job.num_prompt: hash_blocks(job.prompt(), 256, b"") for job in jobs}
    assert names[1300][:4] == names[1100][:4]
    assert names[600][0] != names[1300][0]
    assert all(len(job.prompt()) == job.num_prompt for job in jobs)


def test_generated_groups_share_their_system_prompt_and_nothing_else() -> None:
    shape = SharedPrefix(5, 7, 100, 20, 3)
    jobs = generate(shape, seed=1)
    prompts = [tuple(job.prompt()) for job in jobs]
    assert set(Counter(prompt[:100] for prompt in prompts).values()) == {7}
    assert len({prompt[:100] for prompt in prompts}) == 5
    assert len({prompt[100:] for prompt in prompts}) == 35
    assert {len(prompt) for prompt in prompts} == {120}
    assert jobs != generate(shape, seed=2)
    assert jobs == generate(shape, seed=1)


def test_generated_arrivals_are_poisson_of_one_a_second() -> None:
    jobs = generate(SharedPrefix(1, 4000, 0, 1, 1), seed=3)
    gaps = [after.time - before.time for before, after in pairwise(jobs)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.1)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(0.368, rel=0.1)


def test_times_are_stretched_evenly() -> None:
    jobs = [Job(time, ((0, 1),), 1) for time in (2.0, 3.0, 6.0)]
    assert [job.time for job in stretched_to(jobs, 8.0)] == [0.0, 2.0, 8.0]


@given(st.integers(2, 6), st.floats(1, 20))
def test_a_flood_adds_what_the_first_tenant_sends_and_shares_nothing_with_others(tenants: int, times: float) -> None:
    calm = assign_tenants(generate(SharedPrefix(3, 20, 10, 5, 2), 0), tenants, 0)
    flooded = add_flood(calm, tenants, times, 0)
    extra = len(flooded) - len(calm)
    assert extra == round((times - 1) * len(calm) / tenants)
    assert Counter(job.tenant for job in flooded)["tenant-0"] == Counter(j.tenant for j in calm)["tenant-0"] + extra
    new = [job for job in flooded if job not in set(calm)]
    old_names = {name for job in calm for name, _ in job.segments}
    assert not {name for job in new for name, _ in job.segments} & old_names
    assert [job.time for job in flooded] == sorted(job.time for job in flooded)
