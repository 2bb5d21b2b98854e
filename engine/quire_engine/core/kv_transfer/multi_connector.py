"""The list of tiers, and ``MultiConnector``, which asks each of them in turn (vLLM's class of this name)."""

from collections.abc import Callable, Sequence
from typing import cast

from quire_engine.core.block_pool import BlockCopies, BlockPool, KVCacheConfig
from quire_engine.core.block_table import BlockTable
from quire_engine.core.kv_transfer.connector import AsyncKVConnector, KVConnector
from quire_engine.core.kv_transfer.disk_tier import DiskTier
from quire_engine.core.kv_transfer.host_tier import HostTier
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult


def make_tiers(
    capacity: KVCacheConfig,
    device_pool: BlockPool,
    host: HostTier,
    *,
    disk: DiskContents | None,
    clock: Callable[[], int],
) -> list[KVConnector]:
    """Returns the tiers behind ``device_pool``, nearest first. ``disk`` is the disk that an executor has opened, or
    None.
    """
    tiers: list[KVConnector] = [host]
    if disk is not None:
        assert len(capacity.groups) == 1, "blocks on disk are those of one group"
        assert capacity.groups[0].window is None, "blocks on disk are those of layers that see all tokens"
        tiers.append(DiskTier(disk, device_pool, host, clock=clock))
    return tiers


class MultiConnector:
    """Asks ``tiers`` in their order. Requests wait for ``asynchronous`` tiers, each of which has its own gate in
    ``admission``.
    """

    def __init__(self, tiers: Sequence[KVConnector]) -> None:
        self.tiers = tiers
        self.asynchronous = [cast("AsyncKVConnector", tier) for tier in tiers if tier.is_async]

    def look_up(self, name: bytes) -> int | None:
        """Returns the block of the host pool that a step can read, from the first tier that has one."""
        for tier in self.tiers:
            if not tier.is_async and (block_id := tier.look_up(name)) is not None:
                return block_id
        return None

    def on_reuse(self, table: BlockTable) -> None:
        """See ``KVConnector.on_reuse``."""
        for tier in self.tiers:
            tier.on_reuse(table)

    def on_evict(self, copies: BlockCopies, block_id: int, name: bytes) -> None:
        """Offers a block that the device's pool gives up to each tier in turn, until one does not take it."""
        for tier in self.tiers:
            if not tier.on_evict(copies, block_id, name):
                break

    def begin_stores(self, copies: BlockCopies, max_copies: int) -> None:
        """See ``AsyncKVConnector.begin_stores``. All tiers together copy ``max_copies`` blocks at most."""
        for tier in self.asynchronous:
            max_copies -= tier.begin_stores(copies, max_copies)

    @property
    def is_busy(self) -> bool:
        """See ``AsyncKVConnector.is_busy``."""
        return any(tier.is_busy for tier in self.asynchronous)

    @property
    def has_transfers(self) -> bool:
        """See ``AsyncKVConnector.has_transfers``."""
        return any(tier.has_transfers for tier in self.asynchronous)

    @property
    def held_host_blocks(self) -> list[int]:
        """See ``AsyncKVConnector.held_host_blocks``."""
        return [block_id for tier in self.asynchronous for block_id in tier.held_host_blocks]

    def finish(self, results: Sequence[TransferResult]) -> None:
        """See ``AsyncKVConnector.finish``."""
        for tier in self.asynchronous:
            tier.finish(results)

    def check_integrity(self) -> None:
        """See ``AsyncKVConnector.check_integrity``."""
        for tier in self.asynchronous:
            tier.check_integrity()
