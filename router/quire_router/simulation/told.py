"""What a simulated engine tells routers, in the messages of ``quire.v1``."""

from collections.abc import Sequence
from itertools import groupby

from quire.v1 import engine_pb2
from quire_engine.kv.events import BlockStored, KVCacheEvent, Tier
from quire_engine.simulation.config import SimulatedEngineConfig

from quire_router.placement import tier
from quire_router.simulation.replica import CacheChange

_TIERS = {Tier.DEVICE: tier.Tier.DEVICE, Tier.HOST: tier.Tier.HOST}


def describe(settings: SimulatedEngineConfig) -> engine_pb2.DescribeResponse:
    """What such an engine says that it is."""
    capacity = settings.kv_cache_config
    return engine_pb2.DescribeResponse(
        block_size=capacity.block_size,
        blocks_total=capacity.device_blocks - 1,
        host_blocks_total=capacity.host_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.enable_prefix_caching,
    )


def cache_changes(events: Sequence[KVCacheEvent]) -> list[CacheChange]:
    """The events in their order, those alike that follow each other together."""
    groups = groupby(events, key=lambda event: (isinstance(event, BlockStored), event.tier))
    return [CacheChange(stored, _TIERS[where], [e.block_hash for e in group]) for (stored, where), group in groups]
