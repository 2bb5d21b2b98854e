"""A router's fleet of engines that are in pods, for what routers say of the pods."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from quire_router.discovery.base import Endpoint
from quire_router.engines.cache_events import CacheEvents
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex, Tier

from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until


@asynccontextmanager
async def fleet(pods: Sequence[str]) -> AsyncIterator[tuple[EnginePool, PrefixIndex]]:
    """An idle engine in each of these pods (``NAMESPACE/NAME``), used just now: the first has 100 blocks cached, and
    each twice as many as the one before.
    """
    engines, discovery = [ScriptedEngine() for _ in pods], ScriptedDiscovery()
    index, table = PrefixIndex(), EngineTable()
    settings = ConnectionSettings(silence=600, stall=600)
    pool = EnginePool(discovery, ["m"], settings, table=table, on_kv_event=CacheEvents(index, table))
    found = [Endpoint(await engine.start(), pod=pod) for engine, pod in zip(engines, pods, strict=True)]
    await pool.start()
    discovery.publish(*found)
    try:
        await until(lambda: pool.ready("m") == len(engines))
        for number, engine in enumerate(pool.engines()):
            hashes = [(100_000 * number + block).to_bytes(16, "big") for block in range(100 * 2**number)]
            index.store(engine.row, Tier.DEVICE, hashes)
            pool.table.stepped[engine.row] = monotonic()
            pool.table.blocks_total[engine.row] = pool.table.blocks_free[engine.row] = 1000
        yield pool, index
    finally:
        await pool.close()
        for engine in engines:
            await engine.stop()
