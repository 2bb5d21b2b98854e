"""What engines say of their caches reaches the index, in its order, and nothing that is no longer true stays there."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import engine_pb2 as pb
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines import cache_events
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.pool import EnginePool
from quire_router.engines.session import SequenceGap, Session
from quire_router.engines.settings import ConnectionSettings
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

from tests.support.batches import take_all
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

DEVICE, HOST = pb.KV_TIER_DEVICE, pb.KV_TIER_HOST


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "SLICE", 3)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvStored:
    return pb.KvStored(block_hashes=map(name, numbers), tier=tier)


def came(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvEvent:
    return pb.KvEvent(stored=stored(*numbers, tier=tier))


def went(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvEvent:
    return pb.KvEvent(removed=pb.KvRemoved(block_hashes=map(name, numbers), tier=tier))


def snapshot(device: list[int], host: list[int]) -> pb.Snapshot:
    return pb.Snapshot(cached=[stored(*device), stored(*host, tier=HOST)])


class Stage:
    """A listener, its index, and engines ``a`` and ``b``."""

    def __init__(self) -> None:
        self.table, self.index = EngineTable(), PrefixIndex()
        self.events = CacheEvents(self.index, self.table)
        for engine_id in "ab":
            self.table.add(engine_id)

    def has(self, engine_id: str, numbers: Sequence[int]) -> tuple[set[int], set[int]]:
        """Which of the blocks the engine has on its device, and which only on its host."""
        row = self.table.row_of(engine_id)
        found = {number: self.index.match([name(number)], 0.0, row + 1) for number in numbers}
        return (
            {number for number, matches in found.items() if matches.device[row]},
            {number for number, matches in found.items() if matches.host[row]},
        )

    async def settle(self) -> None:
        await until(lambda: not self.events._waiting)


numbers = st.lists(st.integers(0, 9), max_size=8)
any_tier = st.sampled_from([DEVICE, HOST])
changes = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.one_of(
            st.builds(lambda held, tier: came(*held, tier=tier), numbers, any_tier),
            st.builds(lambda held, tier: went(*held, tier=tier), numbers, any_tier),
            st.builds(snapshot, numbers, numbers),
            st.just(None),
        ),
    ),
    max_size=40,
)


@given(changes, st.sampled_from([2, 65_536]))
@settings(max_examples=40, deadline=None)
def test_the_index_applies_the_engines_events_in_order(script: list[tuple[str, object]], most: int) -> None:
    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_events, "MAX_WAITING", most)
        stage = Stage()
        held = {(engine_id, tier): set[int]() for engine_id in "ab" for tier in (DEVICE, HOST)}
        for engine_id, change in script:
            if change is None:
                await asyncio.sleep(0)
                continue
            stage.events(engine_id, change)
            assert all(len(waiting) <= max(most, 6) for waiting in stage.events._waiting.values())
            play(held, engine_id, change)
        await stage.settle()
        for engine_id in "ab":
            device, host = held[engine_id, DEVICE], held[engine_id, HOST]
            assert stage.has(engine_id, range(10)) == (device, host - device)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cache_events, "SLICE", 3)
        asyncio.run(run(monkeypatch))


def play(held: dict[tuple[str, int], set[int]], engine_id: str, change: object) -> None:
    if isinstance(change, pb.Snapshot):
        for tier, blocks in zip((DEVICE, HOST), change.cached, strict=True):
            held[engine_id, tier] = {int.from_bytes(each, "big") for each in blocks.block_hashes}
    elif isinstance(change, pb.KvEvent) and change.HasField("stored"):
        held[engine_id, change.stored.tier] |= {int.from_bytes(each, "big") for each in change.stored.block_hashes}
    elif isinstance(change, pb.KvEvent):
        held[engine_id, change.removed.tier] -= {int.from_bytes(each, "big") for each in change.removed.block_hashes}


async def test_the_index_of_an_engine_is_bounded_by_its_blocks() -> None:
    stage = Stage()
    load = pb.Load(blocks_total=4, host_blocks_total=2)
    stage.events("a", pb.Snapshot(load=load, cached=[stored(*range(9))]))
    await stage.settle()
    assert stage.has("a", range(9)) == (set(range(6)), set())
    assert stage.index.counts.dropped == 3


async def test_events_of_an_engine_that_left_do_not_count_for_the_next_one_in_its_row() -> None:
    stage = Stage()
    stage.events("a", pb.Snapshot(cached=[stored(*range(20))]))
    stage.events("a", pb.Snapshot())
    stage.table.remove("a")
    assert stage.table.add("c") == 0
    stage.events("a", came(1, 2, 3))
    await asyncio.sleep(0)
    assert stage.has("c", range(20)) == (set(), set())


async def test_pending_parts_of_an_abandoned_snapshot_are_dropped() -> None:
    stage = Stage()
    stage.events("a", pb.Snapshot(cached=[stored(*range(20))]))
    stage.events("a", pb.Snapshot(cached=[stored(30)]))
    await stage.settle()
    assert stage.has("a", range(31)) == ({30}, set())


async def test_an_unknown_tier_is_ignored_and_damaged_hashes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_events, "_METRICS_SECONDS", 0.0)
    before = cache_events.metrics.INDEX_DROPPED.labels("damaged")._value.get()
    stage = Stage()
    stage.events("a", came(1, tier=pb.KV_TIER_UNSPECIFIED))
    stage.events("a", pb.KvEvent())
    stage.events("a", pb.KvEvent(stored=pb.KvStored(block_hashes=[b"short", name(2)], tier=DEVICE)))
    assert stage.has("a", range(3)) == ({2}, set())
    await until(lambda: cache_events.metrics.INDEX_DROPPED.labels("damaged")._value.get() == before + 1)
    assert cache_events.metrics.INDEX_BLOCKS._value.get() == 1


def test_a_session_resumed_after_it_was_abandoned_starts_with_a_snapshot() -> None:
    heard: list[pb.Snapshot | pb.KvEvent] = []
    session = Session(ConnectionSettings(), heard.append)
    session.begin(pb.Snapshot(generation=1, cached=[stored(1)]))
    take_all(session, pb.StepBatch(sequence=1))
    session.fail_all("it was away for too long")
    with pytest.raises(SequenceGap):
        session.begin(pb.Snapshot(generation=1, resumed=True, sequence=1))
    assert session.open_request().open.last_sequence == 0
    assert len(heard) == 1


async def test_the_index_follows_snapshots_events_new_generations_and_lost_engines() -> None:
    engine, index = ScriptedEngine(), PrefixIndex()
    engine.cached = [stored(1, 2, 3, 4, 5), stored(6, tier=HOST)]
    address = await engine.start()
    heard: list[CacheEvents] = []
    fleet = EnginePool(
        StaticDiscovery([address]),
        ["m"],
        ConnectionSettings(grace=0.2, refused_grace=0.2),
        on_kv_event=lambda engine_id, change, /: heard[0](engine_id, change),
    )
    heard.append(CacheEvents(index, fleet.table))
    prompt = [name(number) for number in range(1, 8)]

    def matched() -> tuple[int, int]:
        found = index.match(prompt, 0.0, 1)
        return int(found.device[0]), int(found.host[0])

    await fleet.start()
    try:
        await until(lambda: matched() == (5, 1))
        engine.send(kv_events=[came(6, 7), went(6, tier=HOST)])
        await until(lambda: matched() == (7, 0))
        engine.cached = [stored(1)]
        engine.restart_as(2)
        engine.break_stream()
        await until(lambda: matched() == (1, 0))
        engine.send(kv_events=[came(2)])
        await until(lambda: matched() == (2, 0))
        await engine.stop()
        await until(lambda: matched() == (0, 0))
        # It knows the session still, but what it would go on with is of no use: the router has forgotten the rest.
        engine.cached = [stored(1, 2, 3)]
        await engine.start()
        await until(lambda: matched() == (3, 0))
    finally:
        await fleet.close()
        await engine.stop()
