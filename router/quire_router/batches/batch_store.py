"""``Batches``: the records of batches, by their tenants, and the list of those that have not ended."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time

from quire_router.batches.batch import Batch
from quire_router.batches.files import FileInfo, Files, owned_objects
from quire_router.core.errors import batch_ended, batch_not_found, share_full, too_many_batches, too_much_stored
from quire_router.core.tenant_ids import ids_of, owns
from quire_router.journal import records
from quire_router.journal.objects import BATCHES, BEGUN, Excess, ObjectStore, Quota, account_of, read_objects

ACTIVE = "batches"
"""The collection of batches that have not ended."""
MAX_ACTIVE, MAX_BATCHES = 20, 1_000  # of a tenant: that have not ended, and in all


class Batches:
    """The records of batches, which the API reads and changes. One that is damaged is a batch that failed, and disturbs
    no other. Raises ``QuireError``.
    """

    def __init__(self, store: ObjectStore, files: Files) -> None:
        self.store = store
        self.files = files

    async def create(self, batch: Batch) -> None:
        """Stores a new batch, which some router takes up. Raises ``QuireError`` when its tenant has too many."""
        data, ttl, tenant = batch.to_json(), self.ttl(batch), batch.tenant
        try:
            await self._charge(batch, len(data), BEGUN)
            # Listed when it is there: routers that look for batches take names without a record out of the lists.
            await self.store.put(batch.id, data, 0, ttl)
            for collection in (collection_of(tenant), _readers_of(batch.input_file_id), ACTIVE):
                await self.store.enter(collection, batch.id, ttl)
            await self._charge(batch, len(data), ttl)
        except BaseException:
            await self.store.delete(batch.id)
            await self.store.discharge(account_of(BATCHES, tenant), batch.id)
            await self.store.discharge(_active_account(tenant), batch.id)
            raise

    async def _charge(self, batch: Batch, size: int, ttl: float) -> None:
        """Counts a batch for ``ttl`` seconds among all of its tenant, and among those that have not ended. Raises
        ``QuireError`` when it has too many.
        """
        account, active = account_of(BATCHES, batch.tenant), _active_account(batch.tenant)
        excess = await self.store.charge(account, batch.id, size, ttl, Quota(MAX_BATCHES))
        if excess is Excess.SHARE:
            raise share_full()
        if excess is not None:
            raise too_much_stored(f"There are {MAX_BATCHES} batches, as many as there may be.")
        if await self.store.charge(active, batch.id, 0, ttl, Quota(MAX_ACTIVE)) is Excess.NAMES:
            raise too_many_batches(MAX_ACTIVE)

    async def forget(self, batch: Batch) -> None:
        """A batch has ended: it counts no more among those that have not, and its results are files."""
        await self.files.discharge(batch.tenant, batch.id)
        await self.store.discharge(_active_account(batch.tenant), batch.id)
        await self.store.leave(ACTIVE, batch.id)

    async def reading(self, info: FileInfo) -> str | None:
        """Returns the id of a batch that reads this file and has not ended, or None."""
        readers = _readers_of(info.id)
        async with aclosing(read_objects(self.store, readers, await self.store.names(readers))) as objects:
            async for name, found in objects:
                batch = records.read(Batch, name, found.data)
                if batch is not None and not batch.ended:
                    return name
        return None

    async def get(self, batch_id: str, tenant: str) -> Batch:
        """Returns a batch of this tenant, and lists one that nobody works on again. Raises ``QuireError`` NOT_FOUND."""
        batch, _ = await self._read(batch_id, tenant)
        if not batch.ended and batch.lease_until <= time():  # a Redis that died may have lost its name
            await self.store.enter(ACTIVE, batch.id, self.ttl(batch))
        return batch

    async def list(self, tenant: str, after: str = "") -> AsyncGenerator[Batch]:
        """Yields the batches of a tenant, the newest first, or those that come ``after`` one of them. Raises
        ``QuireError`` INVALID if there is none of that id.
        """
        async with aclosing(owned_objects(self.store, collection_of, tenant, after)) as objects:
            async for name, found in objects:
                yield records.read(Batch, name, found.data) or Batch.unreadable(name, tenant)

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Asks for the end of a batch, and returns it. Raises ``QuireError`` CONFLICT if it has ended."""
        while True:
            batch, version = await self._read(batch_id, tenant)
            if batch.status == "cancelling":
                return batch
            if batch.ended or batch.status == "finalizing":
                raise batch_ended(batch.status)
            batch.status, batch.cancelling_at = "cancelling", int(time())
            if await self.store.put(batch.id, batch.to_json(), version, self.ttl(batch)):
                return batch

    def ttl(self, batch: Batch) -> float:
        """Returns for how many seconds a batch is kept from now on: as long as its files."""
        return max(batch.expires_at - time(), 0.0) + self.files.settings.retention

    async def _read(self, batch_id: str, tenant: str) -> tuple[Batch, int]:
        named = batch_id.startswith("batch_") and batch_id.isascii() and len(batch_id) <= 64
        found = await self.store.get(batch_id) if named else None
        batch = None if found is None else records.read(Batch, batch_id, found.data)
        if found is not None and batch is None and await self._is_listed(batch_id, tenant):
            return Batch.unreadable(batch_id, tenant), found.version
        if found is None or batch is None or not owns(tenant, batch.tenant):
            raise batch_not_found(batch_id)
        return batch, found.version

    async def _is_listed(self, batch_id: str, tenant: str) -> bool:
        return any([batch_id in await self.store.names(collection_of(each)) for each in ids_of(tenant)])


def collection_of(tenant: str) -> str:
    """Returns the collection of a tenant's batches."""
    return f"batches:{tenant}"


def _readers_of(file_id: str) -> str:
    """Returns the collection of the batches of a file."""
    return f"readers:{file_id}"


def _active_account(tenant: str) -> str:
    return account_of("active", tenant)
