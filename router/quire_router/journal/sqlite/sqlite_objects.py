"""Objects in the tables of a journal's file. They take half of the largest file at most, so that requests have room."""

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import time
from typing import TYPE_CHECKING, TypeVar

from quire_router.core.errors import journal_unavailable, store_full
from quire_router.journal.objects import (
    ANY,
    MAX_NAMES,
    Excess,
    Quota,
    StoredObject,
    excess_of,
    fits_share,
    kind_of,
)

if TYPE_CHECKING:
    from quire_router.journal.sqlite.sqlite_journal import SqliteStore

log = logging.getLogger(__name__)
T = TypeVar("T")
V = TypeVar("V")
_SWEPT = 64  # objects that one write deletes because they expired
_READ_AT_ONCE = 500  # parts, or objects: a statement takes so many values


class SqliteObjectStore:
    """See ``ObjectStore``. Works on the two threads of ``store``, and takes ``max_bytes`` for all texts and parts."""

    def __init__(self, store: "SqliteStore", max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    async def get(self, name: str) -> StoredObject | None:
        """See ``ObjectStore``."""
        query = "SELECT data, version FROM objects WHERE name = ? AND version > 0 AND expires > ?"
        row = await self._read(lambda connection: connection.execute(query, (name, time())).fetchone())
        return None if row is None else StoredObject(*row)

    async def get_many(self, names: Sequence[str]) -> list[StoredObject | None]:
        """See ``ObjectStore``."""

        def read(connection: sqlite3.Connection) -> list[StoredObject | None]:
            found: dict[str, StoredObject] = {}
            for some in _batched(names):
                query = (
                    f"SELECT name, data, version FROM objects WHERE name IN ({_marks(some)}) "  # noqa: S608
                    "AND version > 0 AND expires > ?"
                )
                for name, data, version in connection.execute(query, (*some, time())):
                    found[name] = StoredObject(data, version)
            return [found.get(name) for name in names]

        return await self._read(read)

    async def put(self, name: str, data: bytes, version: int, ttl: float, *, drop_parts: bool = False) -> bool:
        """See ``ObjectStore``."""

        def write(connection: sqlite3.Connection) -> bool:
            _sweep(connection, name)
            query = "SELECT version, length(data) FROM objects WHERE name = ?"
            found, before = connection.execute(query, (name,)).fetchone() or (0, 0)
            if found != version:
                return False
            self._check_room(connection, len(data) - before)
            connection.execute(
                "INSERT INTO objects (name, version, data, expires) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET version = excluded.version, data = excluded.data, "
                "expires = excluded.expires",
                (name, version + 1, data, int(time() + ttl)),
            )
            if drop_parts:
                _execute(connection, "DELETE FROM parts WHERE name = ?", name)
            return True

        return await self._write(write)

    async def delete(self, name: str) -> None:
        """See ``ObjectStore``."""
        await self._write(lambda connection: _execute(connection, "DELETE FROM objects WHERE name = ?", name))

    async def add_part(self, name: str, number: int, data: bytes, ttl: float) -> bool:
        """See ``ObjectStore``."""

        def write(connection: sqlite3.Connection) -> bool:
            _sweep(connection, name)
            self._check_room(connection, len(data))
            connection.execute(
                "INSERT INTO objects (name, version, data, expires) VALUES (?, 0, x'', ?) "
                "ON CONFLICT DO UPDATE SET expires = max(expires, excluded.expires)",
                (name, int(time() + ttl)),
            )
            query = "INSERT INTO parts (name, number, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
            return connection.execute(query, (name, number, data)).rowcount == 1

        return await self._write(write)

    async def parts(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """See ``ObjectStore``."""

        def read(connection: sqlite3.Connection) -> list[bytes | None]:
            found: dict[int, bytes] = {}
            for some in _batched(numbers):
                query = f"SELECT number, data FROM parts WHERE name = ? AND number IN ({_marks(some)})"  # noqa: S608
                found.update(connection.execute(query, (name, *some)))
            return [found.get(number) for number in numbers]

        return await self._read(read)

    async def part_numbers(self, name: str) -> list[int]:
        """See ``ObjectStore``."""
        query = "SELECT number FROM parts WHERE name = ? ORDER BY number"
        return await self._read(lambda connection: [number for (number,) in connection.execute(query, (name,))])

    async def enter(self, collection: str, name: str, ttl: float) -> None:
        """See ``ObjectStore``."""
        query = (
            "INSERT INTO members (collection, name, expires) VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET expires = excluded.expires"
        )
        await self._write(lambda connection: _execute(connection, query, collection, name, int(time() + ttl)))

    async def leave(self, collection: str, *names: str) -> None:
        """See ``ObjectStore``."""
        query = "DELETE FROM members WHERE collection = ? AND name = ?"

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(query, [(collection, name) for name in names])

        await self._write(write)

    async def names(self, collection: str) -> list[str]:
        """See ``ObjectStore``."""
        query = "SELECT name FROM members WHERE collection = ? AND expires > ? ORDER BY member LIMIT ?"
        return await self._read(
            lambda connection: [name for (name,) in connection.execute(query, (collection, time(), MAX_NAMES))]
        )

    async def charge(self, account: str, name: str, size: int, ttl: float, quota: Quota = ANY) -> Excess | None:
        """See ``ObjectStore``."""

        def write(connection: sqlite3.Connection) -> Excess | None:
            connection.execute("DELETE FROM accounts WHERE account = ? AND expires <= ?", (account, time()))
            query = "SELECT names, bytes FROM account_totals WHERE account = ?"
            names, total = connection.execute(query, (account,)).fetchone() or (0, 0)
            query = "SELECT bytes FROM accounts WHERE account = ? AND name = ?"
            (before,) = connection.execute(query, (account, name)).fetchone() or (None,)
            excess = excess_of(quota, names, total, before, size)
            more = size - (before or 0)
            if excess is None and quota != ANY and more > 0 and not self._fits(connection, account, total + more, more):
                excess = Excess.SHARE
            if excess is None:
                _execute(connection, "DELETE FROM accounts WHERE account = ? AND name = ?", account, name)
                row = account, name, size, int(time() + ttl)
                _execute(connection, "INSERT INTO accounts VALUES (?, ?, ?, ?)", *row)
            return excess

        return await self._write(write)

    async def discharge(self, account: str, name: str) -> None:
        """See ``ObjectStore``."""
        query = "DELETE FROM accounts WHERE account = ? AND name = ?"
        await self._write(lambda connection: _execute(connection, query, account, name))

    async def close(self) -> None:
        """The journal closes the file."""

    def _fits(self, connection: sqlite3.Connection, account: str, own: int, more: int) -> bool:
        """Returns whether an account may have ``own`` bytes, ``more`` than now (see ``fits_share``)."""
        kind = (f"{kind_of(account)}:", f"{kind_of(account)};")  # accounts of this kind are between these
        query = "SELECT coalesce(sum(bytes), 0) FROM account_totals WHERE account >= ? AND account < ?"

        def fits() -> bool:
            (total,) = connection.execute(query, kind).fetchone()
            return fits_share(account, own, total + more, self._max_bytes)

        if fits():
            return True
        statement = "DELETE FROM accounts WHERE account >= ? AND account < ? AND expires <= ?"
        _execute(connection, statement, *kind, time())
        return fits()

    def _check_room(self, connection: sqlite3.Connection, size: int) -> None:
        (used,) = connection.execute("SELECT bytes FROM object_bytes").fetchone()
        if size > 0 and used + size > self._max_bytes:
            raise store_full()

    async def _write(self, write: Callable[[sqlite3.Connection], T]) -> T:
        return await self._run(self._store.write_objects(write))

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        return await self._run(self._store.read_objects(read))

    async def _run(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except (sqlite3.Error, OSError) as error:
            log.warning("files and batches cannot be read or written: %s", getattr(error, "sqlite_errorname", error))
            raise journal_unavailable() from error


def _batched(values: Sequence[V]) -> Iterator[Sequence[V]]:
    return (values[start : start + _READ_AT_ONCE] for start in range(0, len(values), _READ_AT_ONCE))


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _execute(connection: sqlite3.Connection, statement: str, *values: object) -> None:
    connection.execute(statement, values)


def _sweep(connection: sqlite3.Connection, name: str) -> None:
    """Deletes some of what has expired, and ``name`` if it has."""
    connection.execute("DELETE FROM objects WHERE name = ? AND expires <= ?", (name, time()))
    sweep_objects(connection)


def has_expired_objects(connection: sqlite3.Connection) -> bool:
    """Returns whether there is something for ``sweep_objects``."""
    query = "SELECT EXISTS (SELECT 1 FROM {} WHERE expires <= ?)"
    return any(connection.execute(query.format(each), (time(),)).fetchone()[0] for each in ("objects", "members"))


def sweep_objects(connection: sqlite3.Connection) -> None:
    """Deletes some of the objects, and of the names in collections, that have expired."""
    connection.execute(
        "DELETE FROM objects WHERE name IN (SELECT name FROM objects WHERE expires <= ? LIMIT ?)", (time(), _SWEPT)
    )
    connection.execute(
        "DELETE FROM members WHERE member IN (SELECT member FROM members WHERE expires <= ? LIMIT ?)", (time(), _SWEPT)
    )
