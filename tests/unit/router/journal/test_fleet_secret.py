"""The secret that routers share: in each database, after restarts, and where the database has lost it or is away."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from quire_proto.errors import QuireError
from quire_router.core.errors import journal_unavailable
from quire_router.journal.fleet_secret import NAME, SECRET_BYTES, FleetSecret
from quire_router.journal.objects import MemoryObjectStore, ObjectStore, StoredObject
from quire_router.journal.redis.redis_objects import RedisObjectStore
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.journal_kinds import Databases, databases

LASTING = ["redis", "sqlite"]


@pytest.fixture(scope="module")
def stores() -> Iterator[Databases]:
    with databases() as running:
        yield running


@asynccontextmanager
async def router_of(kind: str, stores: Databases) -> AsyncIterator[ObjectStore]:
    """The store of a router that lives as long as the block."""
    if kind == "redis":
        store = RedisObjectStore(stores.redis.url)
        yield store
        await store.close()
    else:
        journal = SqliteJournal(stores.file, max_bytes=2_000_000)
        yield journal.objects
        await journal.close()


@pytest.mark.parametrize("kind", LASTING)
async def test_it_outlives_the_router_that_made_it(kind: str, stores: Databases) -> None:
    seen = []
    for _ in range(3):
        async with router_of(kind, stores) as store:
            secret = FleetSecret(store)
            own = secret.value
            assert await secret.agree()
            seen.append(await secret.shared())
            assert (secret.value == own) == (len(seen) == 1)
    assert len(set(seen)) == 1
    assert len(seen[0]) == SECRET_BYTES


async def test_routers_that_start_together_agree(stores: Databases) -> None:
    async with router_of("redis", stores) as one, router_of("redis", stores) as other:
        await one.delete(NAME)
        first, second = FleetSecret(one), FleetSecret(other)
        assert await first.agree()
        assert await second.agree()
        assert first.value == second.value


async def test_a_database_that_lost_it_gets_it_again() -> None:
    store = MemoryObjectStore()
    running, later = FleetSecret(store), FleetSecret(store)
    await running.agree()
    await store.delete(NAME)
    await running.agree()
    await later.agree()
    assert later.value == running.value


async def test_what_is_no_secret_is_not_taken_for_one() -> None:
    store = MemoryObjectStore()
    await store.put(NAME, b"short", 0, 60)
    secret = FleetSecret(store)
    own = secret.value
    await secret.agree()
    assert secret.value == own


async def test_while_the_database_is_away_it_is_the_routers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryObjectStore):
        async def get(self, name: str) -> StoredObject | None:
            raise journal_unavailable()

    monkeypatch.setattr("quire_router.journal.fleet_secret._MOST_WAIT", 0.01)
    secret = FleetSecret(Away())
    with pytest.raises(QuireError):
        await Away().get("x")
    assert not await secret.agree()
    assert await secret.shared() == secret.value
