"""Workers of one router: each engine is heard by one of them, and all of them know of all engines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import engine_pb2 as pb
from quire.v1 import load_pb2
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines import cache_events, update_sharing
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.engines.update_sharing import UpdateSharing, WorkerPlace
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex, Tier

from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

ENGINES = ("a:1", "b:1", "c:1", "d:1", "e:1")
DEVICE, HOST = pb.KV_TIER_DEVICE, pb.KV_TIER_HOST


class Worker:
    """What a worker knows of the engines, and its part of the sharing."""

    def __init__(self, folder: Path, number: int, workers: int) -> None:
        self.table, self.index = EngineTable(), PrefixIndex()
        self.events = CacheEvents(self.index, self.table)
        self.loads: dict[str, pb.Load] = {}
        for engine_id in ENGINES:
            self.table.add(engine_id)
        self.sharing = UpdateSharing(WorkerPlace(folder, number, workers))
        self.sharing.apply = self.apply
        self.sharing.blocks = self.events.blocks
        self.sharing.engine_ids = lambda: ENGINES
        self.sharing.forget = self.forget

    def apply(self, update: load_pb2.EngineUpdate) -> None:
        assert not self.sharing.hears(update.engine_id)
        self.loads[update.engine_id] = update.load
        if update.HasField("snapshot"):
            self.events(update.engine_id, update.snapshot)
        for event in update.kv_events:
            self.events(update.engine_id, event)

    def forget(self, engine_id: str) -> None:
        self.loads.pop(engine_id)
        self.events(engine_id, pb.Snapshot())

    def hear(self, engine_id: str, load: int, *changes: pb.Snapshot | pb.KvEvent) -> None:
        """The engine says so to this worker."""
        self.loads[engine_id] = pb.Load(running=load)
        self.sharing.on_load(engine_id, self.loads[engine_id])
        for change in changes:
            self.events(engine_id, change)
            self.sharing.on_kv_event(engine_id, change)

    def known(self) -> dict[str, tuple[int, set[tuple[Tier, bytes]] | None]]:
        """The load and the blocks of each engine; the blocks are None while they are taken in."""
        found = {}
        for engine_id in ENGINES:
            blocks = self.events.blocks(engine_id)
            load = self.loads.get(engine_id, pb.Load())
            found[engine_id] = load.running, None if blocks is None else set(blocks)
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_sharing, "PASS_ON_SECONDS", 0.001)
    monkeypatch.setattr(update_sharing, "_SLICE", 2)
    monkeypatch.setattr(cache_events, "SLICE", 3)


@asynccontextmanager
async def workers(folder: Path, count: int) -> AsyncIterator[list[Worker]]:
    made = [Worker(folder, number, count) for number in range(1, count + 1)]
    async with AsyncExitStack() as stack:
        for worker in made:
            worker.sharing.start()
            stack.push_async_callback(worker.sharing.close)
        await until(lambda: all(len(worker.sharing._listeners) == count - 1 for worker in made))
        yield made


def listener(among: Iterable[Worker], engine_id: str) -> Worker:
    (found,) = (worker for worker in among if worker.sharing.hears(engine_id))
    return found


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvStored:
    return pb.KvStored(block_hashes=map(name, numbers), tier=tier)


def came(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvEvent:
    return pb.KvEvent(stored=stored(*numbers, tier=tier))


def went(*numbers: int, tier: pb.KvTier.ValueType = DEVICE) -> pb.KvEvent:
    return pb.KvEvent(removed=pb.KvRemoved(block_hashes=map(name, numbers), tier=tier))


def agree(among: Sequence[Worker]) -> Callable[[], bool]:
    """Whether all know the same, and none is still taking blocks in."""

    def they_do() -> bool:
        first, *others = (worker.known() for worker in among)
        return all(blocks is not None for _, blocks in first.values()) and all(other == first for other in others)

    return they_do


async def test_what_one_worker_hears_all_know(tmp_path: Path) -> None:
    async with workers(tmp_path, 3) as all_workers:
        for number, engine_id in enumerate(ENGINES, 1):
            snapshot = pb.Snapshot(cached=[stored(*range(20)), stored(7, 30, tier=HOST)])
            listener(all_workers, engine_id).hear(engine_id, number, snapshot, went(3, 4), came(100 + number))
        await until(lambda: all_workers[0].known()[ENGINES[-1]][0] == len(ENGINES))
        await until(agree(all_workers))
        blocks = all_workers[1].known()[ENGINES[0]][1]
    device = {name(number) for number in (*range(3), *range(5, 20), 101)}
    assert blocks == {(Tier.DEVICE, each) for each in device} | {(Tier.HOST, name(7)), (Tier.HOST, name(30))}


async def test_a_worker_that_starts_later_gets_all_that_is_known(tmp_path: Path) -> None:
    async with workers(tmp_path, 2) as (one, two):
        for engine_id in ENGINES:
            listener((one, two), engine_id).hear(engine_id, 5, pb.Snapshot(cached=[stored(*range(50))]))
        await until(agree((one, two)))
        await two.sharing.close()
        late = Worker(tmp_path, 2, 2)
        late.sharing.start()
        mine = [engine_id for engine_id in ENGINES if one.sharing.hears(engine_id)]
        await until(lambda: all(late.known()[each] == one.known()[each] for each in mine))
        await late.sharing.close()
    assert mine


async def test_an_engine_that_is_new_to_a_worker_is_asked_for(tmp_path: Path) -> None:
    async with workers(tmp_path, 2) as all_workers:
        hearing = listener(all_workers, ENGINES[0])
        (other,) = (each for each in all_workers if each is not hearing)
        hearing.hear(ENGINES[0], 5, pb.Snapshot(cached=[stored(1, 2, 3)]))
        await until(agree(all_workers))
        other.forget(ENGINES[0])
        other.sharing.want(ENGINES[0])
        await until(agree(all_workers))
        assert other.known()[ENGINES[0]][0] == 5


async def test_a_worker_that_is_back_is_believed_and_one_that_stays_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_sharing, "GONE_SECONDS", 0.05)
    async with workers(tmp_path, 2) as (one, two):
        engine_id = next(each for each in ENGINES if one.sharing.hears(each))
        one.hear(engine_id, 5, pb.Snapshot(cached=[stored(1, 2, 3)]))
        await until(agree((one, two)))
        await one.sharing.close()
        await until(lambda: two.known()[engine_id] == (0, set()))
        again = Worker(tmp_path, 1, 2)
        again.sharing.start()
        again.hear(engine_id, 6, pb.Snapshot(cached=[stored(4)]))
        await until(lambda: two.known()[engine_id] == (6, {(Tier.DEVICE, name(4))}))
        await again.sharing.close()


async def test_what_changes_while_all_is_sent_is_not_undone_by_it(tmp_path: Path) -> None:
    async with workers(tmp_path, 2) as all_workers:
        hearing = listener(all_workers, ENGINES[0])
        (other,) = (each for each in all_workers if each is not hearing)
        hearing.hear(ENGINES[0], 5, pb.Snapshot(cached=[stored(1, 2, 3, 4)]))
        await until(agree(all_workers))

        def changing(engine_id: str) -> Iterable[tuple[Tier, bytes]]:
            for place, block in enumerate(list(hearing.events.blocks(engine_id) or ())):
                yield block
                if place == 2:  # the first ones are collected
                    hearing.hear(engine_id, 6, went(1))
                    hearing.sharing._pass_on()

        hearing.sharing.blocks = changing
        other.sharing.want(ENGINES[0])
        await until(lambda: other.known()[ENGINES[0]] == (6, {(Tier.DEVICE, name(number)) for number in (2, 3, 4)}))
        await asyncio.sleep(0.01)  # nothing comes after it
        assert agree(all_workers)()


async def test_what_changed_before_a_snapshot_does_not_count_after_it(tmp_path: Path) -> None:
    async with workers(tmp_path, 2) as all_workers:
        hearing = listener(all_workers, ENGINES[0])
        hearing.hear(ENGINES[0], 5, pb.Snapshot(cached=[stored(1)]), went(1), pb.Snapshot(cached=[stored(1, 2)]))
        await until(lambda: all(worker.known()[ENGINES[0]][0] == 5 for worker in all_workers))
        assert all(len(worker.known()[ENGINES[0]][1] or ()) == 2 for worker in all_workers)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ENGINES[:2]), st.lists(st.integers(0, 4), min_size=1, max_size=5)),
        st.tuples(st.sampled_from(ENGINES[:2]), st.just("snapshot"), st.sets(st.integers(0, 4))),
        st.just(("want",)),
        st.just(("pause",)),
    ),
    max_size=20,
)


@settings(max_examples=30)
@given(STEPS)
def test_whatever_happens_workers_agree_in_the_end(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    async def run() -> None:
        async with workers(tmp_path_factory.mktemp("w"), 2) as (one, two):
            cached: dict[str, set[int]] = {engine_id: set() for engine_id in ENGINES}
            for number, step in enumerate(steps, 1):
                match step:
                    case ("want",):
                        for engine_id in ENGINES:
                            (two if one.sharing.hears(engine_id) else one).sharing.want(engine_id)
                    case ("pause",):
                        await asyncio.sleep(0.002)
                    case (engine_id, "snapshot", blocks):
                        cached[engine_id] = set(blocks)
                        snapshot = pb.Snapshot(cached=[stored(*blocks)])
                        listener((one, two), engine_id).hear(engine_id, number, snapshot)
                    case (engine_id, blocks):
                        for block in blocks:
                            event = went(block) if block in cached[engine_id] else came(block)
                            cached[engine_id] ^= {block}
                            listener((one, two), engine_id).hear(engine_id, number, event)
                        await asyncio.sleep(0)
            await until(agree((one, two)))
            for engine_id, blocks in cached.items():
                await until(lambda e=engine_id: two.known()[e][1] is not None)
                assert two.known()[engine_id][1] == {(Tier.DEVICE, name(block)) for block in blocks}

    asyncio.run(run())


async def test_a_pool_asks_an_engine_of_another_worker_for_nothing_and_believes_that_worker(tmp_path: Path) -> None:
    engine, table, index = ScriptedEngine(blocks_total=10), EngineTable(), PrefixIndex()
    address = await engine.start()
    sharing = UpdateSharing(next(_places_that_do_not_hear(tmp_path, address)))
    quick = ConnectionSettings(grace=0.01, refused_grace=0.01, backoff=0.01)
    events = CacheEvents(index, table)
    discovery = StaticDiscovery([address])
    fleet = EnginePool(discovery, ["m"], quick, on_kv_event=events, table=table, update_sharing=sharing)
    await fleet.start()
    try:
        assert (await asyncio.wait_for(engine.opened.get(), 10)).updates.off
        engine.send(load=pb.Load(waiting=3), kv_events=[came(1)])  # an older engine does not know of it
        await until(lambda: fleet.engines()[0].connection.session.sequence == 1)
        row = table.row_of(address)
        assert (table.waiting[row], index.counts.blocks) == (0, 0)
        snapshot = pb.Snapshot(cached=[stored(1, 2)])
        sharing.apply(load_pb2.EngineUpdate(engine_id=address, load=pb.Load(waiting=4), snapshot=snapshot))
        sharing.apply(load_pb2.EngineUpdate(engine_id="unknown:1", load=pb.Load(waiting=4)))
        assert (table.waiting[row], index.counts.blocks) == (4, 2)
        await engine.stop()
        await until(lambda: fleet.engines()[0].connection.condition == "lost")
        assert table.waiting[row] == 4  # the other worker would say
        sharing.forget(address)
        assert table.waiting[row] == 0
        assert set(index.blocks(row)) == set()
    finally:
        await fleet.close()
        await engine.stop()


def _places_that_do_not_hear(folder: Path, address: str) -> Iterable[WorkerPlace]:
    return (
        place
        for place in (WorkerPlace(folder, number, 2) for number in (1, 2))
        if not UpdateSharing(place).hears(address)
    )
