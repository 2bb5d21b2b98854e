"""What operators do to a Redis: they fail over to a replica, and close connections that are idle; against real ones."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from quire_router.clients.redis_client import Failovers, RedisAccess, redis_client
from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from tests.chaos.proxy import Proxy
from tests.support.redis_server import RedisServer, redis_server
from tests.unit.router.clients.test_redis_access import rooms, work

REFUSALS = {
    "read-only": [("REPLICAOF", "127.0.0.1", "1")],
    "link-down": [("REPLICAOF", "127.0.0.1", "1"), ("CONFIG", "SET", "replica-serve-stale-data", "no")],
    "no-replicas": [("CONFIG", "SET", "min-replicas-to-write", "1")],
}
_SLOW_LOOKUP = r"""
#include <netdb.h>
#include <unistd.h>
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
  usleep(400000);
  return EAI_AGAIN;
}
"""
_LOOK_UP = """
import asyncio, uvloop
from quire_router.clients.redis_client import redis_client
async def main():
    client = redis_client("redis://redis.quire:6379/0", timeout=0.1)
    for _ in range(3):
        try:
            await client.ping()
        except Exception as error:
            print(type(error).__name__)
    await asyncio.sleep(1.5)
uvloop.run(main())
"""


@pytest.fixture
def former() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def latter() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def name_of(server: RedisServer) -> AsyncIterator[Proxy]:
    """What leads new connections to a server, as a Service or a DNS name does."""
    name = Proxy(server.port)
    await name.start()
    try:
        yield name
    finally:
        await name.stop()


async def fail_over(name: Proxy, former: RedisServer, latter: RedisServer, refusal: str) -> None:
    """The name leads to ``latter``, and ``former`` lives and refuses, on connections that stay."""
    async with Redis(port=former.port) as redis:
        for command in REFUSALS[refusal]:
            await redis.execute_command(*command)
    name.target = latter.port


async def publish_there(server: RedisServer) -> None:
    """As at a replica, which passes on what is published at its primary."""
    async with Redis(port=server.port) as redis:
        while True:
            for channel in ("quire:journal:me", "quire:load"):
                await redis.publish(channel, b"{}")
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_silent", [True, False])
async def test_everything_of_a_router_leaves_a_former_primary_that_lives(
    former: RedisServer, latter: RedisServer, is_silent: bool
) -> None:
    async with name_of(former) as name, rooms(RedisAccess(f"redis://{name.address}/0")) as parts:
        await work(*parts, 0)
        publishing = None if is_silent else asyncio.create_task(publish_there(former))
        await fail_over(name, former, latter, "read-only")
        await work(*parts, 1)
        async with Redis(port=latter.port) as redis:
            assert await redis.keys("*r1*")
            # Also those who only listen: both channels are there, and none is left behind.
            async with asyncio.timeout(20):
                while sorted(await redis.pubsub_channels()) != [b"quire:journal:me", b"quire:load"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        if publishing is not None:
            publishing.cancel()


@pytest.mark.parametrize("refusal", sorted(REFUSALS))
async def test_one_refusal_is_enough_for_all_clients(former: RedisServer, latter: RedisServer, refusal: str) -> None:
    async with name_of(former) as name:
        access = RedisAccess(f"redis://{name.address}/0")
        one, *others = [redis_client(access, timeout=5.0) for _ in range(3)]
        for client in (one, *others):
            await client.set("before", 1)
        await fail_over(name, former, latter, refusal)
        with pytest.raises(ResponseError):
            await one.set("after", 1)
        for client in (one, *others):
            assert await client.set("after", 1)
            await client.aclose()


async def test_a_redis_that_stays_read_only_is_not_stormed_with_connections(former: RedisServer) -> None:
    client = redis_client(former.url, timeout=5.0)
    await client.replicaof("127.0.0.1", "1")
    before = (await client.info("stats"))["total_connections_received"]
    for _ in range(50):
        with pytest.raises(ReadOnlyError):
            await client.set("a", 1)
    assert (await client.info("stats"))["total_connections_received"] - before < 10
    await client.aclose()


@pytest.mark.parametrize("connections", [None, 2])
async def test_a_connection_that_was_closed_while_idle_is_found_before_use(
    former: RedisServer, connections: int | None
) -> None:
    client = redis_client(former.url, timeout=5.0, repeats=0, connections=connections)
    await client.ping()
    async with Redis(port=former.port) as other:
        await other.client_kill_filter(_type="normal", skipme=True)
    await asyncio.sleep(0.05)
    assert await client.ping()
    await client.aclose()


async def test_a_command_is_repeated_on_a_new_connection_but_not_when_it_is_late(former: RedisServer) -> None:
    async with name_of(former) as name:
        client = redis_client(f"redis://{name.address}/0", timeout=0.3)
        waiting = asyncio.create_task(client.blpop(["nothing"], timeout=0.2))
        await asyncio.sleep(0.05)
        assert name.cut() == 1
        assert await waiting is None
        name.break_silently(["down"], loses=True)
        began = asyncio.get_running_loop().time()
        with pytest.raises((RedisError, TimeoutError)):
            await client.ping()
        assert asyncio.get_running_loop().time() - began < 0.55
        await client.aclose()


def test_an_error_of_redis_6_within_a_script_counts_and_one_of_an_older_connection_does_not() -> None:
    failovers = Failovers()
    failovers.notice(ResponseError("WRONGTYPE Operation against a key"), 0)
    assert failovers.count == 0
    text = "Error running script (call to f_1): @user_script:2: -READONLY You can't write against a read only replica."
    failovers.notice(ResponseError(text), 0)
    failovers.notice(ResponseError(text), 0)
    assert failovers.count == 1


def test_a_lookup_that_takes_too_long_leaves_no_future_without_an_owner(tmp_path: Path) -> None:
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(_SLOW_LOOKUP)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler makes a slow resolver: {error}")
    environment = {"LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", _LOOK_UP]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert ran.stdout.split() == ["TimeoutError"] * 3
    assert ran.stderr == ""
