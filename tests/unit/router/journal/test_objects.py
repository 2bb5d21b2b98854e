"""The contract of all object stores: who has not read the last version replaces nothing, and a part is written once."""

import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_router.clients.redis_client import execute_each
from quire_router.journal.objects import (
    SHARES,
    Excess,
    MemoryObjectStore,
    ObjectStore,
    Quota,
    StoredObject,
    account_of,
    read_objects,
)
from quire_router.journal.redis.redis_objects import RedisObjectStore
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from redis.exceptions import ResponseError

from tests.support.journal_kinds import KINDS, Databases, databases
from tests.support.redis_journals import busy_with_a_script, redis_at

TTL = 60.0


@pytest.fixture(scope="module")
def stores() -> Iterator[Databases]:
    with databases() as running:
        yield running


@asynccontextmanager
async def store_of(kind: str, stores: Databases) -> AsyncIterator[ObjectStore]:
    if kind == "memory":
        yield MemoryObjectStore(max_bytes=1_000_000)
    elif kind == "redis":
        store = RedisObjectStore(stores.redis.url)
        yield store
        await store.close()
    else:
        journal = SqliteJournal(stores.file, max_bytes=2_000_000)
        yield journal.objects
        await journal.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_object_is_replaced_by_who_has_read_its_last_version_alone(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        assert await store.get("a") is None
        assert await store.put("a", b"one", 0, TTL)
        assert not await store.put("a", b"other", 0, TTL)
        found = await store.get("a")
        assert found is not None
        assert (found.data, found.version) == (b"one", 1)
        assert await store.put("a", b"two", 1, TTL)
        assert not await store.put("a", b"late", 1, TTL)
        found = await store.get("a")
        assert found is not None
        assert (found.data, found.version) == (b"two", 2)
        await store.delete("a")
        assert await store.get("a") is None
        assert not await store.put("a", b"three", 2, TTL)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_is_written_once_and_before_its_object(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        assert await store.add_part("p", 7, b"seven", TTL)
        assert not await store.add_part("p", 7, b"again", TTL)
        assert await store.add_part("p", 2, b"\x00two", TTL)
        assert await store.get("p") is None
        assert await store.put("p", b"text", 0, TTL)
        assert await store.part_numbers("p") == [2, 7]
        assert await store.parts("p", [7, 3, 2]) == [b"seven", None, b"\x00two"]
        assert await store.parts("p", []) == []
        assert not await store.put("p", b"other", 0, TTL, drop_parts=True)
        assert await store.part_numbers("p") == [2, 7]
        assert await store.put("p", b"other", 1, TTL, drop_parts=True)
        assert await store.part_numbers("p") == []
        found = await store.get("p")
        assert found is not None
        assert found.data == b"other"
        await store.delete("p")
        assert await store.get("p") is None


@pytest.mark.parametrize("kind", KINDS)
async def test_names_come_in_the_order_in_which_they_were_entered(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        for name in ("c", "a", "b", "a"):
            await store.enter("names", name, TTL)
        assert await store.names("names") == ["c", "a", "b"]
        await store.leave("names", "a")
        await store.leave("names", "nobody")
        assert await store.names("names") == ["c", "b"]
        assert await store.names("others") == []


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_what_has_no_room_is_refused_until_something_is_deleted(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        assert await store.add_part("large", 0, b"x" * 900_000, TTL)
        with pytest.raises(QuireError) as refused:
            await store.add_part("more", 0, b"x" * 200_000, TTL)
        assert refused.value.code is ErrorCode.OVERLOADED
        await store.delete("large")
        assert await store.add_part("more", 0, b"x" * 200_000, TTL)


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
async def test_objects_outlive_their_router(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        assert await store.put("kept", b"text", 0, TTL)
        assert await store.add_part("kept", 0, b"part", TTL)
    async with store_of(kind, stores) as store:
        found = await store.get("kept")
        assert found is not None
        assert (found.data, await store.parts("kept", [0])) == (b"text", [b"part"])


async def test_what_expires_in_memory_makes_room() -> None:
    now = 0.0
    store = MemoryObjectStore(max_bytes=100, clock=lambda: now)
    await store.put("a", b"x" * 90, 0, 10)
    now = 11.0
    assert await store.get("a") is None
    assert await store.put("b", b"x" * 90, 0, 10)


async def test_what_expires_in_a_file_is_deleted_with_its_parts(stores: Databases) -> None:
    async with store_of("sqlite", stores) as store:
        await store.add_part("old", 0, b"part", 0.0)
        await store.put("new", b"text", 0, TTL)
    with sqlite3.connect(stores.file) as connection:
        (left,) = connection.execute("SELECT count(*) FROM parts WHERE name = 'old'").fetchone()
    connection.close()
    assert left == 0


async def test_objects_in_redis_have_no_key_that_stays_for_ever(stores: Databases) -> None:
    async with store_of("redis", stores) as store:
        await store.put("gone", b"text", 0, TTL)
        await store.add_part("gone", 0, b"part", TTL)
        await store.enter("leaving", "gone", TTL)
    client = RedisObjectStore(stores.redis.url)._client
    for key in ("quire:{gone}:object", "quire:{gone}:parts", "quire:collection:leaving"):
        assert await client.ttl(key) > 0
    await client.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_account_counts_what_is_kept_and_refuses_more_than_its_quota(kind: str, stores: Databases) -> None:
    quota = Quota(2, 100)
    async with store_of(kind, stores) as store:

        async def charge(name: str, size: int, most: Quota = quota, account: str = "a") -> Excess | None:
            return await store.charge(account, name, size, TTL, most)

        assert await charge("total", 60) is None
        assert await charge("x", 41) is Excess.BYTES
        assert await charge("x", 40) is None
        assert await charge("y", 0) is Excess.NAMES
        assert await charge("x", 41) is Excess.BYTES, "what is counted is replaced, not added to"
        assert await charge("x", 39) is None
        assert await charge("other", 100, account="b") is None, "each has an account of its own"
        assert await charge("x", 90, Quota()) is None, "what is written all the same counts"
        assert await charge("x", 80) is None, "less than before is never too much"
        await store.discharge("a", "x")
        await store.discharge("a", "x")
        assert await charge("y", 40) is None
        await store.charge("a", "total", 60, 0.0)
        assert await charge("z", 60) is None, "what expires counts no more"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("about", ["files", "conversations", "batches"])
async def test_a_tenant_leaves_as_much_of_a_store_free_as_it_has_itself(
    kind: str, about: str, stores: Databases
) -> None:
    async with store_of(kind, stores) as store:

        async def charge(tenant: str, name: str, size: int, ttl: float = TTL) -> Excess | None:
            return await store.charge(account_of(about, tenant), name, size, ttl, Quota(100, 2**40))

        part = int(SHARES[about] * 1_000_000)
        assert await charge("alice", "x", part // 2 + 1000) is Excess.SHARE
        assert await charge("alice", "x", part // 2) is None
        assert await charge("alice", "y", 1000) is Excess.SHARE
        assert await charge("bob", "x", part // 4) is None
        assert await charge("carol", "x", part // 8) is None
        assert await charge("dora", "x", part // 16) is None, "there is always something for one more"
        for other in SHARES.keys() - {about}:
            assert await store.charge(account_of(other, "alice"), "x", 1000, TTL, Quota(1, 2000)) is None
        assert await charge("alice", "x", part // 2 - 10) is None, "less than before is never too much"
        for tenant in ("alice", "bob", "carol", "dora"):
            assert await charge(tenant, "x", 0, 0.0) is None
        assert await charge("", "x", part) is None, "without keys there is one tenant"
        assert await charge("", "y", 1000) is Excess.SHARE
        await store.discharge(account_of(about, ""), "x")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_name_without_bytes_counts_and_leaves(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        await store.charge("empty", "gone", 0, 0.0)
        for _ in range(3):
            assert await store.charge("empty", "x", 0, TTL, Quota(1)) is None
            assert await store.charge("empty", "y", 0, TTL, Quota(1)) is Excess.NAMES
            await store.discharge("empty", "x")


async def test_a_part_keeps_its_object_for_longer() -> None:
    now = 0.0
    store = MemoryObjectStore(clock=lambda: now)
    await store.add_part("a", 0, b"x", 10)
    now = 9.0
    await store.add_part("a", 1, b"x", 10)
    now = 18.0
    assert await store.part_numbers("a") == [0, 1]


async def test_accounts_and_collections_in_memory_leave_when_they_have_expired() -> None:
    now = 0.0
    store = MemoryObjectStore(clock=lambda: now)
    for number in range(1000):
        now += 1
        await store.charge(account_of("files", str(number)), "x", 1, 5)
        await store.enter(str(number), "x", 5)
    assert len(store._accounts) < 200
    assert len(store._collections) < 200
    assert set(await store.names("999")) == {"x"}


async def test_what_is_charged_again_and_again_takes_no_more_memory() -> None:
    store, account = MemoryObjectStore(), account_of("files", "a")
    for _ in range(2000):
        await store.charge(account, "x", 1, TTL)
        await store.enter("list", "x", TTL)
    tracemalloc.start()
    for _ in range(2000):
        await store.charge(account, "x", 1, TTL)
        await store.enter("list", "x", TTL)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000


@pytest.mark.parametrize("kind", KINDS)
async def test_a_name_leaves_its_collection_when_it_expires_though_others_come(kind: str, stores: Databases) -> None:
    async with store_of(kind, stores) as store:
        await store.enter("expiring", "kept", TTL)
        for name in ("x", "y"):
            await store.enter("expiring", name, 0.0)
        await store.enter("expiring", "again", 0.0)
        await store.enter("expiring", "again", TTL)
        assert await store.names("expiring") == ["kept", "again"]


async def test_sqlite_deletes_what_has_expired_without_a_write(stores: Databases) -> None:
    with TemporaryDirectory() as folder:
        journal = SqliteJournal(Path(folder) / "journal")
        await journal.objects.add_part("old", 0, b"part", 0.0)
        await journal.objects.enter("list", "old", 0.0)
        await journal.objects.charge("files:gone", "old", 4, 0.0)
        await journal.objects._store.clean()
        await journal.close()
        with closing(sqlite3.connect(Path(folder) / "journal")) as connection:
            for table in ("objects", "parts", "members", "accounts", "account_totals"):
                assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


async def test_a_redis_that_is_out_of_memory_lets_go_of_what_was_charged(stores: Databases) -> None:
    async with store_of("redis", stores) as store, redis_at(stores.redis) as redis:
        await store.charge("full", "x", 100, TTL)
        await redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(QuireError) as refused:
                await store.charge("full", "y", 1, TTL)
            assert refused.value.code is ErrorCode.OVERLOADED
            await store.discharge("full", "x")
        finally:
            await redis.config_set("maxmemory", 0)
        assert await store.charge("full", "y", 100, TTL, Quota(1, 100)) is None


async def test_an_account_in_redis_stays_as_long_as_its_longest_name(stores: Databases) -> None:
    async with store_of("redis", stores) as store, redis_at(stores.redis) as redis:
        await store.charge("long", "x", 1, 1e8)
        await store.charge("long", "y", 1, TTL)
        await store.enter("long", "x", 1e8)
        await store.enter("long", "y", TTL)
        for key in await redis.keys("quire:*long*"):
            assert await redis.ttl(key) > 9e7, key


async def test_accounts_in_redis_do_not_stay_for_ever(stores: Databases) -> None:
    async with store_of("redis", stores) as store, redis_at(stores.redis) as redis:
        await store.charge("kept", "x", 1, TTL)
        for key in ("expirations", "sizes"):
            assert await redis.ttl(f"quire:{{account:kept}}:{key}") > 0


async def test_an_outage_of_redis_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire_router.journal.redis.redis_objects")
    with databases() as own:
        store = RedisObjectStore(own.redis.url)
        own.redis.kill()
        for _ in range(3):
            with pytest.raises(QuireError):
                await store.get("a")
        own.redis.start()
        assert await store.get("a") is None
        assert await store.get("a") is None
        await store.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_key_in_redis_that_is_something_else_costs_no_other_object(stores: Databases) -> None:
    async with store_of("redis", stores) as store, redis_at(stores.redis) as redis:
        for name in ("bad", "odd", "good"):
            await store.put(name, b"text", 0, 60.0)
        await redis.delete("quire:{bad}:object")
        await redis.set("quire:{bad}:object", "no hash")
        await redis.hset("quire:{odd}:object", "version", "x")
        found = await store.get_many(["bad", "odd", "good", "absent"])
        assert found == [StoredObject(b"", 0), StoredObject(b"", 0), StoredObject(b"text", 1), None]
        assert await store.get("bad") == found[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_objects_of_a_list_come_many_at_a_time_and_what_is_gone_leaves_it(
    kind: str, stores: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_router.journal.objects.OBJECTS_AT_ONCE", 3)
    async with store_of(kind, stores) as store:
        names = [f"listed {number}" for number in range(8)]
        for number, name in enumerate(names):
            await store.enter("many", name, TTL)
            if number not in (1, 6, 7):
                await store.put(name, name.encode(), 0, TTL)
        assert await store.get_many([]) == []
        found = await store.get_many([names[1], names[0], "nobody", names[0]])
        assert [None if each is None else (each.data, each.version) for each in found] == [
            None, (b"listed 0", 1), None, (b"listed 0", 1),
        ]  # fmt: skip
        left = [name for name in names if name not in ("listed 1", "listed 6", "listed 7")]
        assert [name async for name, _ in read_objects(store, "many", names)] == left
        assert await store.names("many") == left


async def test_a_redis_that_is_busy_with_a_script_says_nothing_of_what_is_stored(stores: Databases) -> None:
    async with store_of("redis", stores) as store, redis_at(stores.redis) as redis:
        assert await store.put("busy", b"{}", 0, TTL)
        async with busy_with_a_script(redis):
            with pytest.raises(QuireError) as refused:
                await store.get("busy")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        found = await store.get("busy")
    assert found is not None
    assert found.data == b"{}"


async def test_a_key_of_another_kind_fails_its_command_alone_and_a_busy_redis_all(stores: Databases) -> None:
    async with redis_at(stores.redis) as redis, redis_at(stores.redis) as other:
        await redis.set("text", "x")
        await redis.hset("fields", "a", "b")

        async def both() -> list[object]:
            pipeline = other.pipeline(transaction=False)
            pipeline.hget("text", "a")
            pipeline.hget("fields", "a")
            return await execute_each(pipeline)

        wrong, right = await both()
        assert isinstance(wrong, ResponseError)
        assert right == b"b"
        async with busy_with_a_script(redis):
            with pytest.raises(ResponseError, match="busy"):
                await both()
