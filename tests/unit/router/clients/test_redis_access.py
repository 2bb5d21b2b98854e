"""Who a router is to Redis: a user and a password from files that change while it runs, against a real Redis."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis as blocking
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_proto.cli import read_settings
from quire_proto.errors import QuireError
from quire_router.admission.limits import ReserveRequest
from quire_router.admission.redis_rate_limit import RedisRateLimiter
from quire_router.autoscale.load_totals import LoadPublisher, RedisLoad
from quire_router.clients.redis_client import RedisAccess, read_password, redis_client
from quire_router.config import Settings
from quire_router.engines.load import LoadLedger
from quire_router.engines.load_messages import SpeculativeBlocks
from quire_router.engines.load_sharing import LoadSharing
from quire_router.journal.codec import JournalSettings
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.prefix_index import PrefixIndex

from tests.support.redis_journals import flushed, small_request
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import until

CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
PASSWORDS = st.text(CHARACTERS, min_size=1, max_size=60).filter(lambda text: text.rstrip("\n") == text)


@dataclass
class Guarded:
    """A Redis whose password tests change, and the file that says it."""

    server: RedisServer
    root: blocking.Redis
    file: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server.port}/0"

    def write(self, password: str) -> None:
        """As Kubernetes does it: all at once."""
        new = self.file.with_suffix(".new")
        new.write_bytes(password.encode())
        os.replace(new, self.file)

    def require(self, password: str) -> None:
        """From now on, of those who connect; whoever is connected has to do that again."""
        self.root.acl_setuser("default", enabled=True, reset_passwords=True, passwords=[f"+{password}"])
        self.cut()

    def cut(self) -> None:
        self.root.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with redis_server() as server:
        with blocking.Redis(port=server.port, protocol=2) as first:
            first.acl_setuser(
                "root", enabled=True, passwords=["+root"], categories=["+@all"], keys=["*"], channels=["*"]
            )
        with blocking.Redis(port=server.port, protocol=2, username="root", password="root") as root:
            yield Guarded(server, root, tmp_path_factory.mktemp("secret") / "password")


@asynccontextmanager
async def rooms(access: RedisAccess) -> AsyncIterator[tuple[RedisJournal, RedisRateLimiter, RedisLoad, LoadSharing]]:
    """Everything of a router that speaks to Redis."""
    journal = RedisJournal(access, owner="me", settings=JournalSettings(settle=0))
    meter = RedisRateLimiter(access, timeout=1.0)
    load = RedisLoad(access, ["m"])
    publisher = LoadPublisher(access, lambda: {"m": 7})
    peers = LoadSharing(access, LoadLedger(EngineTable()), SpeculativeBlocks(EngineTable(), PrefixIndex()))
    journal.start()
    publisher.start()
    peers.start()
    try:
        yield journal, meter, load, peers
    finally:
        for part in (journal, meter, peers, publisher, load):
            await part.close()


async def work(
    journal: RedisJournal, meter: RedisRateLimiter, load: RedisLoad, peers: LoadSharing, number: int
) -> None:
    """Returns once all of them have been to Redis and back."""
    charge = ReserveRequest("t", f"r{number}", 0, 0, max_concurrent=None)
    async with asyncio.timeout(20):
        journal.open(small_request(f"r{number}"))
        await flushed(journal)
        while await meter.reserve(charge) is None or await load_or_none(load) != 7:  # noqa: ASYNC110 - they are to be asked
            await asyncio.sleep(0.05)
    await until(lambda: journal.available and peers.available)


async def load_or_none(load: RedisLoad) -> int | None:
    try:
        return (await load.read())["m"]
    except QuireError:
        return None


async def test_a_password_that_changes_is_used_by_everybody_without_a_restart(guarded: Guarded) -> None:
    guarded.write("first")
    guarded.require("first")
    async with rooms(RedisAccess(guarded.url, password_file=guarded.file)) as parts:
        for number, password in enumerate(("first", "sec ond/@:#?%", "drittes \N{SNOWMAN} \"'\\")):
            guarded.write(password)
            guarded.require(password)
            await work(*parts, number)
            assert guarded.root.keys(f"*r{number}*")


async def test_a_late_or_missing_file_counts_as_an_unavailable_redis(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.write("old-horse")
    guarded.require("old-horse")
    async with rooms(RedisAccess(guarded.url, password_file=guarded.file)) as (journal, *others):
        await work(journal, *others, 10)
        guarded.require("new-horse")
        await until(lambda: not journal.available)
        guarded.file.unlink()
        guarded.cut()
        journal.open(small_request("kept"))
        guarded.write("new-horse")
        await work(journal, *others, 11)
        assert guarded.root.keys("*kept*")
    assert "horse" not in caplog.text


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(password=PASSWORDS, ending=st.sampled_from(["", "\n", "\n\n"]), username=st.sampled_from([None, "quire"]))
async def test_any_characters_may_be_in_it(guarded: Guarded, password: str, ending: str, username: str | None) -> None:
    guarded.root.acl_setuser(
        username or "default", enabled=True, reset_passwords=True, passwords=[f"+{password}"], categories=["+@all"]
    )
    guarded.write(password + ending)
    client = redis_client(RedisAccess(guarded.url, username, guarded.file), timeout=5.0)
    assert await client.acl_whoami() == (username or "default")
    await client.aclose()


@pytest.mark.parametrize("connections", [None, 2])
async def test_the_urls_credentials_count_where_no_others_are_set(guarded: Guarded, connections: int | None) -> None:
    guarded.root.acl_setuser("other", enabled=True, passwords=["+secret"], categories=["+@all"])
    guarded.write("secret")
    url = guarded.url
    for access in (
        RedisAccess(url.replace("//", "//other:secret@")),
        RedisAccess(url.replace("//", "//other@"), password_file=guarded.file),
        RedisAccess(url.replace("//", "//:secret@"), "other"),
        RedisAccess(url, "other", guarded.file),
    ):
        client = redis_client(access, timeout=5.0, connections=connections)
        assert await client.acl_whoami() == "other"
        await client.aclose()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--redis-username", "x"], "--redis-username needs --redis-url"),
        (["--redis-password-file", "FILE"], "--redis-password-file needs --redis-url"),
        (["--redis-url", "redis://:horse@h/0", "--journal-file", "FILE"], "--journal-file and --redis-url exclude"),
        (["--redis-url", "redis://:hor/se@h:1/0"], "the Redis URL is not of the form"),
        (["--redis-url", "redis://:horse@h/0", "--redis-password-file", "FILE"], "has a password already"),
        (["--redis-url", "redis://horse@h/0", "--redis-username", "x"], "has a user name already"),
        (["--redis-url", "redis://h/0", "--redis-username", "a b"], "--redis-username:"),
        (["--redis-url", "redis://h/0", "--redis-password-file", "EMPTY"], "is empty"),
        (["--redis-url", "redis://h/0", "--redis-password-file", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_invalid_settings_are_refused_without_showing_a_password(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"FILE": tmp_path / "password", "EMPTY": tmp_path / "empty"}
    files["FILE"].write_text("horse\n")
    files["EMPTY"].write_text("\n")
    with pytest.raises(SystemExit):
        read_settings(Settings, ["--model", "/m", *(str(files.get(flag, flag)) for flag in flags)])
    load_or_none = capsys.readouterr().err
    assert problem in load_or_none
    assert "horse" not in load_or_none


def test_a_password_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not text"):
        read_password(tmp_path / "password")


def test_settings_lead_to_redis_and_show_no_password(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("horse")
    flags = ["--redis-url", "redis://:@h:1/0", "--redis-username", "x", "--redis-password-file", str(file)]
    read = read_settings(Settings, ["--model", "/m", *flags])
    assert read.redis == RedisAccess("redis://:@h:1/0", "x", file)
    assert "horse" not in repr(RedisAccess("redis://:horse@h:1/0"))
