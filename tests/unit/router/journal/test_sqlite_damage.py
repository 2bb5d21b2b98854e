"""However a record in a file is changed behind its router's back, reading it gives what was written or an error that it
is damaged, and other records are as they were.
"""

import asyncio
import sqlite3
from array import array
from collections.abc import Awaitable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import Lease, RecordedDelta, RequestRecord
from quire_router.journal.codec import JournalSettings
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.journals import by_choice

T = TypeVar("T")
NUMBERS = count()
LOGPROBS = [TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))]
SENT = [
    RecordedDelta(0, [5, 6]),
    RecordedDelta(1, [7], FinishReason.STOP, LOGPROBS),
    RecordedDelta(0, [8, 9]),
    RecordedDelta(0, [10]),
]
POSITIONS = [0, 0, 2, 4]
OTHER = [RecordedDelta(0, [50, 51, 52])]
COLUMNS = {
    "records": ["owner", "epoch", "expires", "opened", "retention", "cancelled", "reason", "error", "usage", "length"],
    "requests": ["request", "prompt", "conversation", "seal"],
    "logs": ["start", "packed", "checksum", "num_tokens"],
}
places = st.sampled_from([(table, column) for table, columns in COLUMNS.items() for column in columns])
garbage = st.none() | st.integers(-(2**40), 2**40) | st.binary(max_size=9) | st.sampled_from(["", "stop", "x", "1 2 3"])
changes = st.sampled_from(["cut", "flipped", "longer", "deleted", "another's"]) | st.tuples(garbage)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, SqliteJournal, Path]]:
    path = tmp_path_factory.mktemp("damage") / "journal"
    with asyncio.Runner() as runner:
        journal = SqliteJournal(path, owner="me", settings=JournalSettings(pause=0.001))
        yield runner, journal, path
        runner.run(journal.close())


def request(request_id: str, seed: int) -> GenerationRequest:
    params = SamplingParams(seed=seed, n=2)
    prompt = array("i", [seed, 2, 3])
    return GenerationRequest(request_id, "m", prompt, params, background=True, conversation=f"said {seed}")


async def write(journal: SqliteJournal, request_id: str, state: str) -> Lease:
    other, lease = journal.open(request(request_id + "-other", 9)), journal.open(request(request_id, 3))
    journal.append(other, 0, OTHER[0])
    for delta, position in zip(SENT, POSITIONS, strict=True):  # each in a part of its own
        journal.append(lease, position, delta)
        await asyncio.wait_for(journal.flush(), 15)
    if state == "ended":
        journal.finish(lease, FinishReason.STOP, "why")
    elif state == "released":
        journal.release(lease)
    await asyncio.wait_for(journal.flush(), 15)
    return lease


def change(path: Path, request_id: str, table: str, column: str, how: str | tuple[object], at: int) -> None:
    """Changes one column of one row of the record, if the schema allows it."""
    with closing(sqlite3.connect(path)) as connection, connection:
        [(record,), (other,)] = (
            connection.execute("SELECT record FROM records WHERE request_id = ?", (name,)).fetchone()
            for name in (request_id, request_id + "-other")
        )
        key = "start" if table == "logs" else "record"
        rows = connection.execute(f"SELECT {key}, {column} FROM {table} WHERE record = ?", (record,)).fetchall()
        chosen, value = rows[at % len(rows)]
        where = f"WHERE record = {record} AND {key} = {chosen}"
        if how == "deleted" and table == "logs":
            # While it runs, a log without its last part is what it was a moment ago.
            ended = "EXISTS (SELECT 1 FROM records WHERE record = logs.record AND reason IS NOT NULL)"
            last = f"(SELECT max(start) FROM logs WHERE record = {record})"
            connection.execute(f"DELETE FROM logs {where} AND ({ended} OR start < {last})")
            return
        if how == "another's":
            value = connection.execute(f"SELECT {column} FROM {table} WHERE record = ?", (other,)).fetchone()[0]
        elif isinstance(how, tuple):
            (value,) = how
        elif isinstance(value, bytes):
            cut, byte = value[: at % (len(value) + 1)], at % max(1, len(value))
            flipped = value[:byte] + bytes([value[byte] ^ (1 << at % 8)]) + value[byte + 1 :] if value else b"\x00"
            value = {"cut": cut, "flipped": flipped}.get(how, value + b"\x01\x00\x00\x00")
        elif isinstance(value, int):
            value ^= 1 << at % 40
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? {where}", (value,))
        except sqlite3.IntegrityError:
            return  # a STRICT table has no such value


async def outcome(call: Awaitable[T]) -> T | QuireError:
    """The answer, or that the record is damaged. Nothing else may come of it."""
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(answer, BaseException):
        assert isinstance(answer, QuireError), repr(answer)
        assert answer.code is ErrorCode.INTERNAL
    return answer


def is_right(record: RequestRecord, *, more: bool = False) -> bool:
    expected = request(record.generation.request_id, 3)
    assert record.generation.params == expected.params
    assert record.generation.prompt_token_ids == expected.prompt_token_ids
    allowed = [SENT, [*SENT, RecordedDelta(0, [11])]] if more else [SENT]
    return by_choice(record.deltas) in list(map(by_choice, allowed))


@given(st.sampled_from(["running", "released", "ended"]), places, changes, st.integers(0, 2**16))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_changed_record_reads_as_it_was_written_or_as_damaged(
    journal: tuple[asyncio.Runner, SqliteJournal, Path],
    state: str,
    place: tuple[str, str],
    how: str | tuple[object],
    at: int,
) -> None:
    runner, mine, path = journal
    name = f"r-{next(NUMBERS)}"

    async def run() -> None:
        lease = await write(mine, name, state)
        change(path, name, *place, how, at)
        expired = await outcome(mine.statuses([name])) == [None]  # its time was changed
        record = await outcome(mine.read(name))
        assert expired == (record is None)
        assert record is None or isinstance(record, QuireError) or is_right(record)
        update = await outcome(mine.follow(name).poll())
        assert expired == (update is None)
        if update is not None and not isinstance(update, QuireError) and update.deltas:
            assert by_choice(update.deltas) == by_choice(SENT)
        claimed = await outcome(mine.claim(name))
        assert claimed is None or isinstance(claimed, QuireError) or is_right(claimed[0])
        assert isinstance(await outcome(mine.orphans()), list)
        mine.append(lease, 5, RecordedDelta(0, [11]))
        await asyncio.wait_for(mine.flush(), 15)
        record = await outcome(mine.read(name))
        assert record is None or isinstance(record, QuireError) or is_right(record, more=True)
        await outcome(mine.cancel(name))
        other = await mine.read(name + "-other")
        assert other is not None
        assert other.deltas == OTHER

    runner.run(asyncio.wait_for(run(), 60))
