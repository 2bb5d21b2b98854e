"""The journal's connection sends and returns what redis-py would, and every exchange has a timeout."""

import asyncio
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_router.clients.redis_client import redis_client
from quire_router.journal.redis.redis_connection import PipelinedConnection, encode_command
from redis.asyncio import Connection

from tests.support.redis_journals import redis_at
from tests.support.redis_server import RedisServer, redis_server

LIBRARY = Connection()  # to nowhere
words = st.text(max_size=9) | st.binary(max_size=9) | st.integers(-(2**63), 2**63)
commands = st.sampled_from(
    [("SET", "k", "5"), ("INCR", "k"), ("GET", "k"), ("LPUSH", "k", "x"), ("STRLEN",), ("DEL", "k")]
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@given(st.sampled_from(["GET", "EVALSHA"]), st.lists(words, max_size=6))
def test_commands_are_packed_as_the_library_packs_them(name: str, arguments: list[str | bytes | int]) -> None:
    assert encode_command(name, *arguments) == b"".join(LIBRARY.pack_command(name, *arguments))


@given(st.lists(commands, max_size=20))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_those_of_the_librarys_pipeline(server: RedisServer, script: list[tuple[str, ...]]) -> None:
    async def run() -> None:
        async with redis_at(server) as redis:
            await redis.delete("k")
            mine = await PipelinedConnection(redis, 5.0).execute(encode_command(*command) for command in script)
            await redis.delete("k")
            pipeline = redis.pipeline(transaction=False)
            for command in script:
                pipeline.execute_command(*command)
            theirs = await pipeline.execute(raise_on_error=False)
            assert [plain(answer) for answer in mine] == [plain(answer) for answer in theirs]

    asyncio.run(run())


def plain(answer: object) -> str:
    """The library makes True of OK."""
    return repr(b"OK" if answer is True else answer)


@pytest.mark.parametrize("how", ["in vain", "cancelled"])
async def test_an_abandoned_exchange_leaves_its_replies_to_no_other(server: RedisServer, how: str) -> None:
    async with redis_at(server) as redis:
        wire = PipelinedConnection(redis, 0.1 if how == "in vain" else 60.0)
        assert await wire.execute([encode_command("ECHO", "first")]) == [b"first"]
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20 if how == "in vain" else 0.1):
                    await wire.execute([encode_command("ECHO", "unheard")] * 3)
        finally:
            server.signal(signal.SIGCONT)
        assert await PipelinedConnection(redis, 20.0).execute([encode_command("ECHO", "second")]) == [b"second"]


@pytest.mark.parametrize("stopped", [False, True])
async def test_one_timeout_covers_the_whole_exchange_with_its_connect(server: RedisServer, *, stopped: bool) -> None:
    """Also where the connection itself is not answered, and its client has no patience of its own."""
    redis = redis_client(server.url, timeout=60.0, limited_by_caller=True)
    if not stopped:
        await PipelinedConnection(redis, 60.0).execute([encode_command("PING")])
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                await PipelinedConnection(redis, 0.1).execute([encode_command("PING")])
    finally:
        server.signal(signal.SIGCONT)
        await redis.aclose()
