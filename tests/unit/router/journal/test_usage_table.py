"""What tenants used, in a journal's file and in memory: counted as records end, are released or are deleted."""

import sqlite3
from array import array
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import MAX_RESPONSE_OPTIONS_CHARACTERS, NO_USAGE, GenerationRequest, LoRA, Usage
from quire_router.core.usage import REMEMBERED
from quire_router.journal.base import Journal
from quire_router.journal.codec import JournalSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.sqlite import record_writer
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.journals import append_tokens

Rows = list[tuple[str, str, int, int, int, int]]


def request_of(name: str = "r", **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, "m", array("i", [1, 2, 3]), SamplingParams(), tenant="shop", **fields)


async def usage_of(journal: Journal) -> Rows:
    """Tenant, model, requests and tokens of each row. Some tests set the clock on, maybe into the next hour."""
    await journal.settle_usage()
    return [(row.tenant, row.model, *row.counts) for row in await journal.usage(time() - 7200, time() + 7200)]


@pytest.fixture(params=["file", "memory"])
async def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    journal = MemoryJournal() if request.param == "memory" else SqliteJournal(tmp_path / "journal")
    yield journal
    await journal.close()


async def test_rows_are_of_tenants_and_of_models_or_their_adapters(journal: Any) -> None:
    adapter = request_of("b", lora=LoRA("an/adapter", b"d"))
    for generation in (request_of("a"), adapter, replace(request_of("c"), tenant=""), request_of("d")):
        lease = journal.open(generation)
        append_tokens(journal, lease, 0, [5, 6])
        journal.finish(lease, FinishReason.STOP, "", Usage(3, 2, 1))
    await journal.flush()
    assert await usage_of(journal) == [
        ("", "m", 1, 3, 1, 2),
        ("shop", "an/adapter", 1, 3, 1, 2),
        ("shop", "m", 2, 6, 2, 4),
    ]
    [only] = await journal.usage(0, 1e11, "")
    assert (only.tenant, only.hour % 3600) == ("", 0)
    assert await journal.usage(only.hour + 1, 1e11) == []
    assert await journal.usage(0, only.hour) == []


async def test_an_answer_that_is_given_up_is_counted_at_once_and_the_rest_of_it_when_it_ends(journal: Any) -> None:
    lease = journal.open(request_of(stream=True))
    append_tokens(journal, lease, 0, [5, 6])
    journal.release(lease, Usage(3, 2, 1))
    await journal.flush()
    assert await usage_of(journal) == [("shop", "m", 1, 3, 1, 2)]
    _, lease = await journal.claim("r")
    append_tokens(journal, lease, 2, [7])
    journal.finish(lease, FinishReason.STOP, "", Usage(3, 3))
    await journal.flush()
    assert await usage_of(journal) == [("shop", "m", 1, 3, 1, 3)]
    assert await journal.delete("r")
    assert await usage_of(journal) == [("shop", "m", 1, 3, 1, 3)]


async def test_what_no_engine_had_is_not_counted_and_what_was_delivered_is(journal: Any) -> None:
    for name, delivered in (("a", []), ("b", [5, 6])):
        lease = journal.open(request_of(name))
        if delivered:
            append_tokens(journal, lease, 0, delivered)
        journal.finish(lease, FinishReason.ERROR, "UNAVAILABLE: no engine", NO_USAGE)
    await journal.flush()
    assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 2)]


async def test_a_request_that_is_too_large_to_be_stored_is_counted(journal: Any) -> None:
    lease = journal.open(request_of(response_options="x" * (MAX_RESPONSE_OPTIONS_CHARACTERS + 1)))
    append_tokens(journal, lease, 0, [5, 6])
    for _ in range(2):
        journal.finish(lease, FinishReason.STOP, "", Usage(3, 2, 1))
        await journal.flush()
    assert await journal.read("r") is None
    assert await usage_of(journal) == [("shop", "m", 1, 3, 1, 2)]


async def test_one_that_grows_too_large_while_it_runs_is_counted_once(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal", max_tokens=6)
    lease = journal.open(request_of())
    append_tokens(journal, lease, 0, [5, 6])
    await journal.flush()
    append_tokens(journal, lease, 2, [7] * 9)
    await journal._store.clean()  # type: ignore[attr-defined]  # its lease is given up, and what was delivered counted
    assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 2)]
    journal.finish(lease, FinishReason.STOP, "", Usage(3, 11))
    await journal.flush()
    assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 11)]
    await journal.close()


async def left(path: Path, *, cancelled: bool = False) -> None:
    """A router dies that wrote two tokens of a request."""
    journal = SqliteJournal(path)
    lease = journal.open(request_of(stream=True))
    append_tokens(journal, lease, 0, [5, 6])
    await journal.flush()
    if cancelled:
        await journal._store.cancel("r")
    await journal.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_a_dead_router_left_is_counted_when_the_next_one_starts(tmp_path: Path, cancelled: bool) -> None:
    for _ in range(2):
        await left(tmp_path / "journal", cancelled=cancelled)
        journal = SqliteJournal(tmp_path / "journal")
        assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 2)]
        await journal.close()


async def test_a_file_of_the_version_before_gets_the_table_and_counts_what_had_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    await left(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for later in ("parts", "members", "object_bytes", "objects", "usage", "accounts", "account_totals", "counted"):
            connection.execute(f"DROP TABLE {later}")
        connection.execute("ALTER TABLE records DROP COLUMN counted")
        connection.execute("ALTER TABLE records DROP COLUMN version")
        connection.execute("PRAGMA user_version = 2")
    journal = SqliteJournal(path)
    assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 2)]
    await journal.close()


async def test_a_record_that_expires_without_an_end_is_counted_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    lease = journal.open(request_of(stream=True, retention=0))
    append_tokens(journal, lease, 0, [5, 6])
    journal.release(lease)
    await journal.flush()
    with closing(sqlite3.connect(tmp_path / "journal", isolation_level=None)) as connection:
        connection.execute("UPDATE records SET counted = NULL")
        connection.execute("DELETE FROM usage")
    later = record_writer.time
    monkeypatch.setattr(record_writer, "time", lambda: later() + 20)
    await journal._store.clean()  # type: ignore[attr-defined]
    assert await usage_of(journal) == [("shop", "m", 1, 3, 0, 2)]
    await journal.close()


async def test_hours_go_when_their_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SqliteJournal(tmp_path / "journal", settings=JournalSettings(usage_retention=10_000))
    journal.finish(journal.open(request_of()), FinishReason.STOP, "", Usage(3, 2))
    await journal.flush()
    later = record_writer.time
    for seconds, rows in ((6_000, 1), (14_000, 0)):
        monkeypatch.setattr(record_writer, "time", lambda more=seconds: later() + more)
        await journal._store.clean()  # type: ignore[attr-defined]
        assert len(await journal.usage(0, 1e11)) == rows
    await journal.close()


async def test_what_was_counted_without_a_record_is_remembered_for_hours_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    later, requests = record_writer.time, []
    for seconds in (0, REMEMBERED - 60, REMEMBERED + 3600):
        monkeypatch.setattr(record_writer, "time", lambda more=seconds: later() + more)
        await journal._store.clean()  # type: ignore[attr-defined]
        journal.finish(journal.open_unrecorded(request_of()), FinishReason.STOP, "", Usage(3, 0))
        await journal.flush()
        requests.append(sum(row.requests for row in await journal.usage(0, 1e11)))
    assert requests == [1, 1, 2]
    await journal.close()


async def test_a_damaged_record_does_not_keep_the_file_from_being_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await left(tmp_path / "journal")
    with closing(sqlite3.connect(tmp_path / "journal", isolation_level=None)) as connection:
        connection.execute("UPDATE requests SET request = x'00'")
        connection.execute("UPDATE records SET counted = NULL")
        connection.execute("DELETE FROM usage")
    journal = SqliteJournal(tmp_path / "journal")
    assert await usage_of(journal) == []
    assert "the usage of a request is not counted, because its record is damaged" in caplog.text
    await journal.close()
