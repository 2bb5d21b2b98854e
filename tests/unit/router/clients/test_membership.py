"""Which routers are alive: the two registers in a real Redis, with the keys that routers of other versions use."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from quire_router.clients.membership import CHANNEL, PeerRegister, TotalsRegister
from quire_router.clients.redis_client import redis_client
from redis.asyncio import Redis

from tests.support.redis_server import RedisServer, redis_server

LEASE = 0.6


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Redis]:
    client = redis_client(server.url, timeout=5)
    await client.flushall()
    yield client
    await client.aclose()


async def test_peers_register_renew_and_are_forgotten(client: Redis) -> None:
    register = PeerRegister(client, LEASE)
    await register.renew("first", b"1", b"")
    await register.renew("second", b"22", b"")
    assert await client.smembers("quire:routers") == {b"first", b"second"}
    assert await client.get("quire:load:first") == b"1"
    found = await register.read(10, 0)
    assert sorted(record for record, _ in found) == [b"1", b"2"]  # of a longer record a part
    assert all(0 < seconds <= LEASE for _, seconds in found)
    await asyncio.sleep(LEASE * 0.7)
    await register.renew("second", b"33", b"")
    await asyncio.sleep(LEASE * 0.7)
    assert [record for record, _ in await register.read(10, 10)] == [b"33"]
    assert await client.smembers("quire:routers") == {b"second"}


async def test_peers_hear_each_message_and_who_leaves(client: Redis) -> None:
    register = PeerRegister(client, LEASE)
    async with client.pubsub() as channel:
        await channel.subscribe(CHANNEL)
        await register.renew("first", b"record", b"message")
        await register.leave("first", b"farewell")
        heard = [await channel.get_message(ignore_subscribe_messages=True, timeout=1) for _ in range(3)]
    assert [message["data"] for message in heard if message is not None] == [b"message", b"farewell"]
    assert await client.keys("quire:*") == []
    assert await register.read(10, 10) == []


async def test_totals_register_renew_and_are_forgotten(client: Redis) -> None:
    register = TotalsRegister(client, LEASE)
    assert (await register.read(10))[1:] == (0, [])
    await register.renew("first", b"1")
    await register.renew("second", b"2")
    assert sorted(await client.keys("quire:*")) == [
        b"quire:{autoscale}:born",
        b"quire:{autoscale}:leases",
        b"quire:{autoscale}:parts",
    ]
    assert await client.hgetall("quire:{autoscale}:parts") == {b"first": b"1", b"second": b"2"}
    seconds, routers, records = await register.read(10)
    assert 0 <= seconds < LEASE
    assert (routers, sorted(record for record in records if record)) == (2, [b"1", b"2"])
    assert (await register.read(1))[1:] == (2, [])  # more than can be added up
    await asyncio.sleep(LEASE * 0.7)
    await register.renew("second", b"3")
    await asyncio.sleep(LEASE * 0.7)
    assert (await register.read(10))[1:] == (1, [b"3"])
    await register.leave("second")
    assert (await register.read(10))[1:] == (0, [])
