"""The file of a journal in SQLite: who may have it, what is refused, what is left in it, and what a full disk costs."""

import asyncio
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any
from zlib import crc32

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import Lease
from quire_router.journal.codec import (
    MIN_RETENTION,
    MIN_RUNNING_TTL,
    TOKEN_BYTES,
    JournalSettings,
    encode_request_fields,
)
from quire_router.journal.sqlite import database, record_reader, record_writer, sqlite_journal
from quire_router.journal.sqlite.database import MIGRATIONS, JournalFileError
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from quire_router.journal.token_log import FRAME_MARKER

from tests.support.journals import append_tokens
from tests.support.redis_journals import counted, small_request
from tests.support.waiting import until

PATTERN = [0x51EED001, 0x51EED002, 0x51EED003]
BYTES = array("i", PATTERN).tobytes()
HOLD = """
import sys, time
from pathlib import Path
from quire_router.journal.sqlite.database import JournalFile
file = JournalFile(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@asynccontextmanager
async def journal_at(path: Path, **options: Any) -> AsyncIterator[SqliteJournal]:
    journal = SqliteJournal(path, owner="me", **options)
    try:
        yield journal
    finally:
        await journal.close()


async def flushed(journal: SqliteJournal) -> None:
    await asyncio.wait_for(journal.flush(), 15)


async def write(journal: SqliteJournal, generation: GenerationRequest, *, ended: bool = True) -> None:
    lease = journal.open(generation)
    append_tokens(journal, lease, 0, PATTERN)
    if ended:
        journal.finish(lease, FinishReason.STOP)
    await flushed(journal)


def files_of(path: Path) -> list[Path]:
    return [each for each in path.parent.iterdir() if each.name.startswith(path.name)]


def is_anywhere(content: bytes, path: Path) -> bool:
    return any(content in each.read_bytes() for each in files_of(path))


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, later: float) -> Iterator[None]:
    """So many seconds later."""
    with monkeypatch.context() as patched:
        for module in (record_writer, record_reader, database):
            now = module.time
            patched.setattr(module, "time", lambda now=now: now() + later)
        yield


# Who may have it


async def test_the_files_are_their_users_alone(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT, 0o666))
    async with journal_at(path) as journal:
        await write(journal, small_request(), ended=False)
        assert len(files_of(path)) == 4  # with WAL, shared memory and lock
        assert {stat.S_IMODE(each.stat().st_mode) for each in files_of(path)} == {0o600}


def test_a_second_router_is_refused_until_the_first_was_killed(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JournalFileError, match=rf"in use by another router \(process {holder.pid}\): give each"):
            SqliteJournal(path)
        holder.send_signal(signal.SIGKILL)
    asyncio.run(SqliteJournal(path).close())


def test_a_file_is_free_again_when_it_was_closed_or_refused(path: Path) -> None:
    for _ in range(2):
        asyncio.run(SqliteJournal(path).close())
        path.write_bytes(b"no database" * 1000)
        with pytest.raises(JournalFileError):
            SqliteJournal(path)
        path.unlink()


# What is refused


def make_another_programs(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cookies (name TEXT)")


async def test_a_file_of_the_first_version_is_brought_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are read as they were: their checksums cover no conversation."""
    former = small_request("former")
    with monkeypatch.context() as patched:
        patched.setattr(database, "MIGRATIONS", MIGRATIONS[:1])
        connection = database.JournalFile(path)
        fields = encode_request_fields(former)
        connection.writer.execute(
            "INSERT INTO records (request_id, owner, epoch, expires, opened, running_ttl, background, reason, length) "
            "VALUES ('former', 'me', 1, ?, 0, 60, 0, 'stop', 0)",
            (int(time()) + 60,),
        )
        connection.writer.execute(
            "INSERT INTO requests VALUES (1, ?, ?, ?)", (fields.request, fields.prompt, fields.seal)
        )
        connection.close()
    async with journal_at(path) as journal:
        read = await journal.read("former")
        assert read is not None
        assert read.generation == former
        talked = replace(small_request("talked"), conversation="[]")
        await write(journal, talked)
        again = await journal.read("talked")
        assert again is not None
        assert again.generation == talked


def make_newer(path: Path) -> None:
    asyncio.run(SqliteJournal(path).close())
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")


def damage(path: Path) -> None:
    asyncio.run(SqliteJournal(path).close())
    content = bytearray(path.read_bytes())
    content[100:] = b"\xa5" * len(content[100:])
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"x" * 5000), "is damaged, or no database: move it away"),
        (damage, "is damaged, or no database: move it away"),
        (make_another_programs, "is a database of another program: name another file"),
        (make_newer, r"was written by a newer Quire \(its version is 8, this one knows 7\)"),
        (lambda path: path.mkdir(), "is a folder: name a file"),
        (os.mkfifo, "is not a file"),
    ],
)
def test_what_is_no_journal_is_refused_in_one_sentence_and_left_as_it_is(
    path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(JournalFileError, match=message) as caught:
        SqliteJournal(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert not path.is_file() or path.read_bytes() == before


def test_a_folder_that_is_not_there_or_cannot_be_written_is_refused(path: Path) -> None:
    with pytest.raises(JournalFileError, match="cannot be created: its folder does not exist"):
        SqliteJournal(path / "journal")
    path.parent.chmod(0o500)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)  # root may write everywhere
        with pytest.raises(JournalFileError, match="cannot be written: this user may not write it, or its folder"):
            SqliteJournal(path)
    finally:
        os.seteuid(user)
        path.parent.chmod(0o700)


# What is left, and for how long


@pytest.mark.parametrize(("retention", "expected"), [(None, 3600), (0, MIN_RETENTION), (90_000.0, 90_000)])
@pytest.mark.parametrize("end", ["finished", "released", "cancelled", "background"])
async def test_a_record_has_its_requests_retention_however_it_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, end: str, retention: float | None, expected: int
) -> None:
    generation = replace(small_request(), retention=retention, background=end == "background")
    async with journal_at(path) as journal:
        await write(journal, generation, ended=end == "finished")
        if end != "finished":
            journal.release(next(each.lease for each in [journal._buffer.get("r")] if each is not None))
            await flushed(journal)
        if end == "cancelled":
            assert await journal.cancel("r")
        expected = 86_400 if end == "background" else expected
        with at(monkeypatch, expected - 5):
            assert await journal.read("r") is not None
        with at(monkeypatch, expected + 1):
            assert await journal.read("r") is None
            assert await journal.statuses(["r"]) == [None]
            assert await journal.follow("r").poll() is None
            assert not await journal.cancel("r")
            assert await journal.claim("r") is None
            assert await journal.orphans() == []
            assert await journal.open_if_absent(replace(generation, created=9.0)) is not None


@pytest.mark.parametrize(
    ("retention", "background", "expected"), [(None, False, 86_400), (0, False, MIN_RUNNING_TTL), (0, True, 86_400)]
)
async def test_a_dead_routers_record_is_kept_for_its_client(
    path: Path, monkeypatch: pytest.MonkeyPatch, retention: float | None, background: bool, expected: int
) -> None:
    async with journal_at(path) as journal:
        await write(journal, replace(small_request(), retention=retention, background=background), ended=False)
    for _ in range(2):  # also while routers come and go
        async with journal_at(path) as journal:
            with at(monkeypatch, expected - 5):
                assert await journal.read("r") is not None
            with at(monkeypatch, expected + 5):
                assert await journal.read("r") is None


@pytest.mark.parametrize(
    ("retention", "background", "expected"), [(None, False, 3600), (90_000.0, False, 90_000), (0, True, 86_400)]
)
async def test_a_record_whose_lease_is_abandoned_is_kept_as_one_that_was_released(
    path: Path, monkeypatch: pytest.MonkeyPatch, retention: float | None, background: bool, expected: int
) -> None:
    async with journal_at(path) as journal:
        await write(journal, replace(small_request(), retention=retention, background=background), ended=False)
        journal._store.abandon(Lease("r", "me", 1))
        await journal._store.clean()  # type: ignore[attr-defined]
        with at(monkeypatch, expected - 5):
            assert await journal.read("r") is not None
            assert await journal.orphans() == ["r"] * background
        with at(monkeypatch, expected + 1):
            assert await journal.read("r") is None


async def test_a_running_request_does_not_expire(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with journal_at(path) as journal:
        await write(journal, replace(small_request(), retention=0), ended=False)
        with at(monkeypatch, 1e6):
            await journal._store.clean()  # type: ignore[attr-defined]
            assert await journal.read("r") is not None


@pytest.mark.parametrize("deleted", [False, True])
async def test_nothing_of_a_request_is_left_in_the_files(
    path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    monkeypatch.setattr(sqlite_journal, "CLEANUP_PERIOD", 0.0)
    generation = replace(small_request("gone"), prompt_token_ids=array("i", PATTERN), retention=None if deleted else 0)
    async with journal_at(path, settings=JournalSettings(lease=0.2)) as journal:
        await write(journal, small_request("kept"))
        await write(journal, generation)
        assert is_anywhere(BYTES, path)
        assert is_anywhere(b"gone", path)
        await journal.delete("kept")
        if deleted:
            assert await journal.delete("gone")
            await until(lambda: not is_anywhere(b"gone", path))
        else:
            with at(monkeypatch, MIN_RETENTION + 1):
                await until(lambda: not is_anywhere(b"gone", path))
        assert not is_anywhere(BYTES, path)


async def test_the_file_does_not_grow_with_the_requests_that_it_has_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_journal, "CLEANUP_PERIOD", 0.0)
    monkeypatch.setattr(record_writer, "MIN_FREE_PAGES", 16)
    prompt = array("i", range(20_000))
    sizes = []
    async with journal_at(path, settings=JournalSettings(pause=0.001)) as journal:
        for number in range(6):
            for each in range(10 if number < 5 else 0):
                await write(journal, replace(small_request(f"{number}-{each}"), prompt_token_ids=prompt))
            sizes.append(sum(each.stat().st_size for each in files_of(path)))
            with at(monkeypatch, 4000):
                await journal._store.clean()  # type: ignore[attr-defined]
    assert max(sizes[:5]) < 2 * sizes[0]
    assert sum(each.stat().st_size for each in files_of(path)) < 200_000


async def test_the_log_of_a_record_that_has_ended_is_one_part(path: Path) -> None:
    async with journal_at(path) as journal:
        lease = journal.open(small_request())
        for position in range(5):
            append_tokens(journal, lease, position, [position])
            await flushed(journal)
        journal.finish(lease, FinishReason.STOP)
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [0, 1, 2, 3, 4]
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT count(*) FROM logs").fetchone() == (1,)


async def test_what_is_left_of_a_delta_that_was_cut_off_does_not_precede_the_next_one(path: Path) -> None:
    async with journal_at(path) as journal:
        lease = journal.open(small_request())
        append_tokens(journal, lease, 0, [1, 2])
        journal.release(lease)
        await flushed(journal)
        with closing(sqlite3.connect(path)) as connection, connection:
            (record, checksum) = connection.execute("SELECT record, checksum FROM logs").fetchone()
            cut = array("i", [FRAME_MARKER, 9, 0, 0]).tobytes()
            part = (record, 2 * TOKEN_BYTES, cut, crc32(cut, checksum), None)
            connection.execute("INSERT INTO logs VALUES (?, ?, ?, ?, ?)", part)
        claimed = await journal.claim("r")
        assert claimed is not None
        append_tokens(journal, claimed[1], 2, [3])
        await flushed(journal)
        record = await journal.read("r")
        assert record is not None
        assert record.choices[0].token_ids == [1, 2, 3]


async def test_the_file_has_a_largest_size_for_which_the_oldest_records_go_before_their_time(path: Path) -> None:
    prompt, most = array("i", range(20_000)), 4 << 20
    async with journal_at(path, settings=JournalSettings(pause=0.001, lease=0.05), max_bytes=most) as journal:
        await write(journal, replace(small_request("running"), prompt_token_ids=prompt), ended=False)
        for number in range(100):  # twice as much as there is room for
            await write(journal, replace(small_request(f"{number}"), prompt_token_ids=prompt))
        assert await journal.read("0") is None
        for name in ("running", "70", "99"):  # the last 40 or so of 80 kB each
            assert await journal.read(name) is not None
        assert sum(each.stat().st_size for each in files_of(path) if each == path) <= most


def take_away(path: Path, away: Path, *, replaced: bool) -> None:
    path.rename(away)
    if replaced:
        path.write_bytes(away.read_bytes())


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_a_file_that_is_taken_away_counts_as_unavailable_until_it_is_back(
    path: Path, caplog: pytest.LogCaptureFixture, suffix: str, replaced: bool
) -> None:
    taken, away = path.with_name(path.name + suffix), path.parent / "away"
    async with journal_at(path, settings=JournalSettings(lease=0.05)) as journal:
        await write(journal, small_request())
        assert journal.available
        take_away(taken, away, replaced=replaced)
        await until(lambda: not journal.available)
        journal.open(small_request("later"))
        await asyncio.sleep(0.1)
        assert not journal.available
        away.replace(taken)
        await until(lambda: journal.available)
        await flushed(journal)
        assert await journal.read("later") is not None
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert told == [
        f"cannot write the journal to {path} (it was moved, deleted or replaced: put it back, or restart the "
        "router for a new one); requests continue"
    ]


READ = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT * FROM session").fetchall()
connection.close()
"""


async def test_the_wal_is_in_place_from_the_start_and_whoever_comes_and_goes(path: Path) -> None:
    for _ in range(2):
        async with journal_at(path) as journal:
            journal._store.check_in_place()  # type: ignore[attr-defined]
            await write(journal, small_request())
            await journal._store.clean()  # type: ignore[attr-defined]
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", READ, path)
            assert await other.wait() == 0
            journal._store.check_in_place()  # type: ignore[attr-defined]
        assert not path.with_name(f"{path.name}-wal").exists()


# A full disk


def limit_pages(journal: SqliteJournal, pages: int) -> None:
    """As if the disk were full; 0: not any more."""
    connection = journal._store._file.writer  # type: ignore[attr-defined]
    (used,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {used + pages if pages else 1_000_000}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system: run it as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, to: int = 0) -> None:
    """Leaves about ``to`` bytes of the file system."""
    with (folder / "other").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(folder / "other", max(0, (folder / "other").stat().st_size - to))


async def test_requests_go_on_while_a_disk_is_really_full(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same as below, where the system refuses and not the library; and the file is whole afterwards."""
    large = replace(small_request("large"), prompt_token_ids=array("i", range(200_000)))
    path = disk / "journal"
    async with journal_at(path) as journal:
        running = journal.open(small_request("running"))
        append_tokens(journal, running, 0, [1])
        await flushed(journal)
        fill(disk, to=100_000)
        lease = journal.open(large)
        append_tokens(journal, running, 1, [2])
        await until(lambda: not journal.available)
        fill(disk)
        append_tokens(journal, lease, 0, [5, 6])
        await asyncio.sleep(0.5)  # so that it tries again, in vain
        assert not journal.available
        before = await journal.read("running")
        assert before is not None
        assert before.choices[0].token_ids == [1]
        (disk / "other").unlink()
        await flushed(journal)
        assert journal.available
    told = [each for each in caplog.records if each.name.startswith("quire_router") and each.levelno > logging.INFO]
    assert len(told) == 1
    async with journal_at(path) as journal:
        for name, tokens in (("large", [5, 6]), ("running", [1, 2])):
            record = await journal.read(name)
            assert record is not None
            assert record.choices[0].token_ids == tokens
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_requests_go_on_while_the_disk_is_full_and_are_written_when_there_is_room(path: Path) -> None:
    large = replace(small_request("large"), prompt_token_ids=array("i", range(100_000)))
    async with journal_at(path) as journal:
        running = journal.open(small_request("running"))
        append_tokens(journal, running, 0, [1])
        await flushed(journal)
        assert journal.available
        assert counted("quire_journal_available") == 1
        limit_pages(journal, 4)
        lease = journal.open(large)
        append_tokens(journal, lease, 0, [5])
        append_tokens(journal, running, 1, [2])
        await until(lambda: not journal.available)
        assert counted("quire_journal_available") == 0
        with pytest.raises(QuireError) as caught:
            await journal.read("large")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert await journal.claim("nobody") is None
        before = await journal.read("running")
        assert before is not None
        assert before.choices[0].token_ids == [1]
        append_tokens(journal, lease, 1, [6])
        journal.finish(lease, FinishReason.STOP)
        limit_pages(journal, 0)
        await flushed(journal)
        assert journal.available
        for name, tokens in (("large", [5, 6]), ("running", [1, 2])):
            record = await journal.read(name)
            assert record is not None
            assert record.choices[0].token_ids == tokens


async def test_a_request_that_has_to_be_stored_first_says_that_it_is_not(path: Path) -> None:
    async with journal_at(path) as journal:
        limit_pages(journal, 4)
        large = replace(small_request(), prompt_token_ids=array("i", range(100_000)))
        assert await journal.open_if_absent(large) is not None
        assert not journal.available
        limit_pages(journal, 0)
        await flushed(journal)
        assert await journal.read("r") is not None


async def test_a_request_that_is_dropped_loses_its_lease(path: Path) -> None:
    """So that it is not said to run for ever."""
    async with journal_at(path, max_tokens=2000, settings=JournalSettings(lease=0.2)) as journal:
        lease = journal.open(small_request())
        await flushed(journal)
        append_tokens(journal, lease, 0, [1] * 3000)
        released = [True]

        async def is_released() -> None:
            while released[0]:
                record = await journal.read("r")
                released[0] = record is not None and record.leased

        await asyncio.wait_for(is_released(), 15)
        assert await journal.claim("r") is not None


async def test_whoever_reads_a_journal_that_has_been_closed_is_told_that_it_is_away(path: Path) -> None:
    journal = SqliteJournal(path, owner="me")
    follower = journal.follow("r")
    await journal.close()
    reads: list[Callable[[], Awaitable[object]]] = [
        lambda: journal.read("r"),
        lambda: journal.claim("r"),
        follower.poll,
        lambda: journal.objects.get("x"),
        lambda: journal.objects.put("x", b"", 0, 60.0),
    ]
    for read in reads:
        with pytest.raises(QuireError) as away:
            await read()
        assert away.value.code is ErrorCode.UNAVAILABLE
