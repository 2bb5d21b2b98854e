"""The three kinds of journal, whose contract is one: tests that are parametrised by ``KINDS`` run with each."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.codec import JournalSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.redis_server import RedisServer, redis_server

KINDS = ("memory", "redis", "sqlite")
AnyJournal = MemoryJournal | BufferedJournal
ALONE = JournalSettings(settle=0)  # there are no other routers


@dataclass(frozen=True)
class Databases:
    """A Redis, and the file of a journal."""

    redis: RedisServer
    file: Path


@contextmanager
def databases() -> Iterator[Databases]:
    with redis_server() as server, TemporaryDirectory() as folder:
        yield Databases(server, Path(folder) / "journal")


@asynccontextmanager
async def journal_of(kind: str, databases: Databases, settings: JournalSettings = ALONE) -> AsyncIterator[AnyJournal]:
    """One of this kind, owned by "me"."""
    journal: AnyJournal
    if kind == "memory":
        journal = MemoryJournal(owner="me", retention=settings.retention)
    elif kind == "redis":
        journal = RedisJournal(databases.redis.url, owner="me", settings=settings)
    else:
        journal = SqliteJournal(databases.file, owner="me", settings=settings)
    try:
        yield journal
    finally:
        await journal.close()
