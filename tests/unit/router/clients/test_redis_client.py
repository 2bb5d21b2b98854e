"""Clients of Redis, against a real one."""

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest
import uvloop
from quire_router.clients.redis_client import redis_client
from redis.asyncio import Connection, Redis, SSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.redis_server import RedisServer, redis_server

MOMENTS = 120  # turns of the loop, enough for a few exchanges


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.mark.parametrize("connections", [None, 2])
async def test_a_cancelled_command_leaves_its_reply_to_no_other(redis: RedisServer, connections: int | None) -> None:
    client = redis_client(redis.url, timeout=5.0, connections=connections)
    for moment in range(MOMENTS):
        asking = asyncio.create_task(_ask(client))
        for _ in range(moment):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=5.0)
        ended = asking.cancelled()
        asking.cancel()
        assert ended, f"it goes on after it was cancelled at moment {moment}"
    await client.aclose()


async def test_a_timeout_ends_a_command(redis: RedisServer) -> None:
    client = redis_client(redis.url, timeout=5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await _ask(client)
    await client.aclose()


def test_a_connection_that_breaks_before_a_command_is_sent_is_a_connection_error(redis: RedisServer) -> None:
    async def ask_over_a_broken_one() -> None:
        client = redis_client(redis.url, timeout=5.0)
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0.05)
        try:
            await connection.send_command("PING")
        finally:
            await client.connection_pool.release(connection)
            assert await client.ping()
            await client.aclose()

    with pytest.raises(RedisConnectionError):
        uvloop.run(ask_over_a_broken_one())


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://:secret@127.0.0.1:1/0", Connection),
        ("rediss://127.0.0.1:1/0", SSLConnection),
        ("unix:///nowhere.sock", UnixDomainSocketConnection),
    ],
)
@pytest.mark.parametrize("connections", [None, 2])
def test_the_url_selects_the_kind_of_connection(url: str, kind: type, connections: int | None) -> None:
    pool = redis_client(url, timeout=1.0, connections=connections).connection_pool
    assert issubclass(pool.connection_class, kind)


def test_a_malformed_redis_url_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ValueError, match="not of the form") as refusal:
        redis_client("redis://:se/cret:@host:x/0", timeout=1.0)
    assert "cret" not in str(refusal.value)


async def _ask(client: Redis) -> None:
    for number in count():
        assert await client.echo(str(number)) == str(number).encode()
