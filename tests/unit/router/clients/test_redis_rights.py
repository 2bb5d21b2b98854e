"""What a user of Redis may do who has just the rights in docs/durability.md, and what routers say of one who may less,
and of servers that do not suit them; against a real one.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis as blocking
from quire_proto.sampling import FinishReason
from quire_router.admission.limits import ReserveRequest
from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.core.generation import Usage
from quire_router.journal.codec import JournalSettings
from quire_router.journal.objects import Quota
from quire_router.journal.redis.redis_connection import RedisHealth
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.redis.redis_objects import RedisObjectStore
from redis.exceptions import RedisError

from tests.support.certificates import Authority
from tests.support.journals import append_tokens
from tests.support.ports import free_port
from tests.support.redis_journals import flushed, small_request
from tests.support.redis_server import RedisServer, documented_rights, redis_server
from tests.support.waiting import until
from tests.unit.router.clients.test_redis_access import rooms, work


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def use_everything(url: str) -> None:
    """All that the parts of a router ask of Redis."""
    async with rooms(RedisAccess(url)) as (journal, meter, load, peers):
        await work(journal, meter, load, peers, 0)
        charge = ReserveRequest("t", "r", 1000, 1000, max_concurrent=2)
        assert await meter.reserve(charge) is not None
        meter.adopt("t", "adopted")
        meter.release("t", "r", newly_running=True, request_refund=1, token_refund=1)
        await meter._send_releases()
        await meter._send_adopted()
        await meter._renew_all()
        await use_journal(journal, url)
        await use_objects(url)


async def use_journal(journal: RedisJournal, url: str) -> None:
    other = RedisJournal(url, owner="other", settings=JournalSettings(settle=0))
    background = small_request("background")
    for name in ("ends", "released", "cancelled", "deleted"):
        lease = journal.open(small_request(name))
        append_tokens(journal, lease, 0, [5, 6])
        if name == "ends":
            journal.finish(lease, FinishReason.STOP, "", Usage(3, 2))
        elif name == "released":
            journal.release(lease, Usage(3, 2))
    assert await journal.open_if_absent(background) is not None
    await flushed(journal)
    assert await other.claim("released") is not None
    assert await other.read("ends") is not None
    await other.statuses(["ends", "released", "nothing"])
    await other.cancel("cancelled")
    await other.delete("deleted")
    assert await other.read("nothing") is None
    await other.orphans()
    await other.settle_usage()
    await other.usage(0.0, 2.0e9)
    await other.close()


async def use_objects(url: str) -> None:
    store = RedisObjectStore(url)
    assert await store.put("batch_1", b"x", 0, 60)
    assert await store.add_part("batch_1", 0, b"part", 60)
    await store.parts("batch_1", await store.part_numbers("batch_1"))
    await store.get("batch_1")
    await store.enter("batches", "batch_1", 60)
    await store.names("batches")
    await store.leave("batches", "batch_1")
    await store.charge("t", "batch_1", 5, 60, Quota(max_names=1, max_bytes=10))
    await store.discharge("t", "batch_1")
    await store.put("batch_1", b"y", 1, 60, drop_parts=True)
    await store.delete("batch_1")
    await store.close()


async def test_the_rights_in_the_documentation_suffice(server: RedisServer) -> None:
    await use_everything(server.router_url)
    assert server.refusals() == []


@pytest.mark.parametrize(
    ("right", "refused"),
    [
        ("-del", "its user lacks a right, which its ACL LOG names: NOPERM"),
        ("-script|load", "its user may not run SCRIPT LOAD: NOPERM"),
    ],
)
async def test_a_right_that_is_missing_is_named(right: str, refused: str, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        with blocking.Redis(port=server.port) as root:
            root.execute_command("ACL", "SETUSER", "quire", right)
        journal = RedisJournal(server.router_url, settings=JournalSettings(settle=0))
        journal.open(small_request())
        await until(lambda: refused in caplog.text)
        await journal.close()


def test_the_documented_user_may_not_do_everything() -> None:
    everything = {"allkeys", "allchannels", "allcommands", "+@all", "~*", "&*", "nopass"}
    assert not everything & set(documented_rights("secret"))


async def failure_at(access: RedisAccess | str) -> str:
    client = redis_client(access, timeout=0.5)
    try:
        with pytest.raises((RedisError, OSError, TimeoutError)) as failed:
            await client.set("quire:secret", "secret")
    finally:
        await client.aclose()
    return describe_failure(failed.value)


async def test_each_cause_that_is_observed_is_named_and_nothing_that_was_sent(
    server: RedisServer, tmp_path: Path
) -> None:
    with blocking.Redis(port=server.port) as root:
        root.execute_command("ACL", "SETUSER", "few", "on", ">secret", "+set", "~other:*")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = Authority(tmp_path).issue("localhost")
    context.load_cert_chain(files.certificate, files.key)
    async with AsyncExitStack() as ending:

        async def listening(accept: Callable[..., None], **more: Any) -> int:
            place = await asyncio.start_server(accept, "127.0.0.1", 0, **more)
            await ending.enter_async_context(place)
            return int(place.sockets[0].getsockname()[1])

        hanging = await listening(lambda _reader, _writer: None)
        closing = await listening(lambda _reader, writer: writer.close())
        strange = await listening(lambda _reader, _writer: None, ssl=context)
        found = {
            f"redis://127.0.0.1:{free_port()}/0": "Connection refused",
            server.router_url.replace("secret", "wrong"): "the user or the password is wrong: WRONGPASS",
            server.router_url.replace("quire", "few"): (
                "its user may not access all keys and channels of routers: NOPERM"
            ),
            f"redis://127.0.0.1:{hanging}/0": "it did not answer in time",
            f"redis://127.0.0.1:{closing}/0": "it closed the connection",
            "redis://no-such-host.invalid:1/0": "Name or service not known",
            f"rediss://localhost:{strange}/0": "its certificate is refused: unable to get local issuer certificate",
        }
        assert {url: await failure_at(url) for url in found} == found
        missing = RedisAccess(server.url, password_file=tmp_path / "missing")
        assert await failure_at(missing) == f"{tmp_path}/missing cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (["--maxmemory-policy", "allkeys-lru"], "set maxmemory-policy to noeviction, not allkeys-lru"),
        (["--maxmemory-policy", "volatile-ttl"], "set maxmemory-policy to noeviction, not volatile-ttl"),
        (["--cluster-enabled", "yes"], "Redis is a cluster"),
        ([], ""),
    ],
    ids=["allkeys-lru", "volatile-ttl", "cluster", "as it should be"],
)
async def test_a_server_that_does_not_suit_routers_is_reported_once_when_they_connect(
    setting: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(settings=setting) as server:
        health = RedisHealth(redis_client(server.router_url, timeout=5.0), settle=0.0)
        for _ in range(3):
            await health.check()
        await health._client.aclose()
    reports = [record.getMessage() for record in caplog.records if record.name.endswith("redis_connection")]
    assert len(reports) == bool(said)
    assert said in "".join(reports)


async def test_a_cluster_is_the_reason_that_the_log_gives(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(settings=["--cluster-enabled", "yes"]) as server:
        journal = RedisJournal(server.router_url, settings=JournalSettings(settle=0))
        journal.open(small_request())
        await until(lambda: "cannot write the journal to Redis (its cluster is down: CLUSTERDOWN)" in caplog.text)
        await journal.close()
