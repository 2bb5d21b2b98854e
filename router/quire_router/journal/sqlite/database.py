"""The file of a journal in SQLite: opened, checked, locked and migrated; one connection that writes and one that reads.

The file belongs to one router at a time, which a lock on a second file beside it makes sure of: it ends with its
process, however that ends. So no lease of an earlier router is a living one's, and what it left can be claimed at once.
Where locks do not work, as on some network file systems, the number of the ``session`` fences off the earlier router:
it finds another one with its next transaction, and has written its last.

``synchronous=NORMAL`` in WAL mode: a commit waits for no disk, and survives the end of the process, also by SIGKILL. A
power failure may cost the commits since the last checkpoint, and never more than these.
"""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

from quire_router.journal.codec import MIN_RUNNING_TTL

APPLICATION_ID = 0x5155_4A4C  # "QUJL", in the file's header
MAX_WAL_BYTES = 16_777_216  # that the WAL keeps after a checkpoint
MIN_SQLITE = (3, 37)  # the first one with STRICT tables
BUSY_TIMEOUT = 5.0  # seconds: only a program beside the router, such as a backup, has a lock for a moment

MIGRATIONS = (
    """
    CREATE TABLE session (number INTEGER NOT NULL) STRICT;
    INSERT INTO session VALUES (0);
    CREATE TABLE records (
        record INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        epoch INTEGER NOT NULL CHECK (epoch BETWEEN 1 AND 999999999999999),
        expires INTEGER,  -- s; NULL while it is leased
        opened INTEGER NOT NULL,  -- ms
        retention INTEGER,  -- s, where the request has its own
        running_ttl INTEGER NOT NULL,  -- s
        background INTEGER NOT NULL,
        cancelled INTEGER NOT NULL DEFAULT 0,
        reason TEXT,  -- NULL until it has ended
        length INTEGER,  -- of its log in bytes, once it has ended
        error BLOB,
        usage TEXT
    ) STRICT;
    CREATE INDEX expiring ON records (expires);
    CREATE INDEX running_in_background ON records (record) WHERE background AND reason IS NULL;
    CREATE TABLE requests (
        record INTEGER PRIMARY KEY REFERENCES records ON DELETE CASCADE,
        request BLOB NOT NULL,
        prompt BLOB NOT NULL,
        seal INTEGER NOT NULL  -- the checksum of all others
    ) STRICT;
    CREATE TABLE logs (
        record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE,
        start INTEGER NOT NULL CHECK (start >= 0),  -- offset in the token log, in bytes
        packed BLOB NOT NULL,
        checksum INTEGER NOT NULL,  -- of the log up to the end of this part
        num_tokens INTEGER,  -- in the log up to there; NULL: the next part says it
        PRIMARY KEY (record, start)
    ) STRICT, WITHOUT ROWID;
    """,
    "ALTER TABLE requests ADD COLUMN conversation BLOB",  # NULL where it has none; covered by the seal
    """
    CREATE TABLE usage (
        hour INTEGER NOT NULL,  -- when it began, s
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, model)
    ) STRICT, WITHOUT ROWID;
    ALTER TABLE records ADD COLUMN counted TEXT;  -- the part of its usage that is in there
    """,
    """
    CREATE TABLE objects (
        name TEXT PRIMARY KEY,
        version INTEGER NOT NULL,  -- 0 while only parts of it are there
        data BLOB NOT NULL,
        expires INTEGER NOT NULL  -- s
    ) STRICT;
    CREATE INDEX expiring_objects ON objects (expires);
    CREATE TABLE parts (
        part INTEGER PRIMARY KEY,
        name TEXT NOT NULL REFERENCES objects ON DELETE CASCADE,
        number INTEGER NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (name, number)
    ) STRICT;
    CREATE TABLE members (
        member INTEGER PRIMARY KEY,
        collection TEXT NOT NULL,
        name TEXT NOT NULL,
        expires INTEGER NOT NULL,  -- s
        UNIQUE (collection, name)
    ) STRICT;
    CREATE INDEX expiring_members ON members (expires);
    CREATE TABLE object_bytes (bytes INTEGER NOT NULL  -- of all parts
    ) STRICT;
    INSERT INTO object_bytes VALUES (0);
    CREATE TRIGGER part_came AFTER INSERT ON parts
    BEGIN UPDATE object_bytes SET bytes = bytes + length(NEW.data); END;
    CREATE TRIGGER part_left AFTER DELETE ON parts
    BEGIN UPDATE object_bytes SET bytes = bytes - length(OLD.data); END;
    """,
    """
    CREATE TABLE accounts (
        account TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        expires INTEGER NOT NULL,  -- s
        PRIMARY KEY (account, name)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX expiring_accounts ON accounts (account, expires);
    CREATE TABLE account_totals (account TEXT PRIMARY KEY, names INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
    CREATE TRIGGER name_came AFTER INSERT ON accounts
    BEGIN INSERT INTO account_totals VALUES (NEW.account, 1, NEW.bytes)
        ON CONFLICT (account) DO UPDATE SET names = names + 1, bytes = bytes + excluded.bytes; END;
    CREATE TRIGGER name_left AFTER DELETE ON accounts
    BEGIN UPDATE account_totals SET names = names - 1, bytes = bytes - OLD.bytes WHERE account = OLD.account; END;
    CREATE TRIGGER account_emptied AFTER UPDATE ON account_totals WHEN NEW.names = 0
    BEGIN DELETE FROM account_totals WHERE account = NEW.account; END;
    """,
    """
    CREATE TABLE counted (
        request_id TEXT PRIMARY KEY,  -- of requests without a record whose usage is in there
        at INTEGER NOT NULL  -- s
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX counted_at ON counted (at);
    """,
    "ALTER TABLE records ADD COLUMN version TEXT",  # of the model that the log is of
)
"""What makes each version of the schema of the one before; ``PRAGMA user_version`` counts them."""


class JournalFileError(ValueError):
    """The file cannot be this router's journal; the message is one sentence that says why, and what to do."""


class FileTakenError(sqlite3.OperationalError):
    """The file is not this router's any more: another one has opened it since, or it is not in its place. The text says
    what to do.
    """


class JournalFile:
    """An open file, locked for this process. ``writer`` and ``reader`` are its connections, each of which one thread
    at a time may use. Creates it, for its user alone, if it is not there. ``session`` is its number, which only the
    router that opened it last has. Raises ``JournalFileError``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise JournalFileError(f"--journal-file needs SQLite 3.37, and Python has {sqlite3.sqlite_version} here")
        self._lock = _lock(path)
        try:
            last_write = _create(path)
            self.writer = _connect(path)
            try:
                version = _checked_version(self.writer, path)
                path.chmod(0o600)  # SQLite gives the files beside it the same permissions
                _configure(self.writer, path)
                _migrate(self.writer, version)
                self.session = _begin_session(self.writer, last_write)
                self.reader = _connect(path)
                _configure(self.reader, path)
                self.reader.execute("PRAGMA query_only = ON")
            except BaseException:
                self.writer.close()
                raise
            wal = _wal(path)  # the session's number was written to it, and it stays while a connection is open
            self._statuses = {path: path.stat(), wal: wal.stat()}
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise _file_error(path, error) from error
        except BaseException:
            os.close(self._lock)
            raise

    def check_in_place(self) -> None:
        """Raises ``FileTakenError`` if the file or its WAL was moved, deleted or replaced: what is written to it would
        be lost.
        """
        try:
            in_place = all(os.path.samestat(path.stat(), status) for path, status in self._statuses.items())
        except OSError:
            in_place = False
        if not in_place:
            raise FileTakenError("it was moved, deleted or replaced: put it back, or restart the router for a new one")

    def close(self) -> None:
        """Closes the connections, the last of which writes the WAL into the file, and gives up the lock."""
        try:
            self.reader.close()
            self.writer.close()
        finally:
            os.close(self._lock)


def _lock(path: Path) -> int:
    """The descriptor of a locked file beside ``path``, which has the number of the process in it."""
    name = path.with_name(f"{path.name}-lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _file_error(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        process = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise JournalFileError(
            f"the journal {path} is in use by another router (process {process}): "
            "give each router a file of its own, or all of them one --redis-url"
        ) from None
    with suppress(OSError):  # on a full disk it is locked all the same
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


def _create(path: Path) -> float:
    """Creates the file if there is none. Returns when it was last written to, in seconds. Raises ``OSError``. (A later
    one that opened and closed the file would take SQLite's locks away.)
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise JournalFileError(f"the journal {path} is not a file")
    finally:
        os.close(descriptor)
    wal = _wal(path)
    return max(status.st_mtime, wal.stat().st_mtime if wal.exists() else 0.0)


def _wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _connect(path: Path) -> sqlite3.Connection:
    """A connection on which transactions begin where ``BEGIN`` says so."""
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)


def _configure(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect while the file is empty
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise JournalFileError(f"the journal {path} cannot be on this file system: put it on a local disk")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten with zeros
    connection.execute(f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}")


def _checked_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the file's schema, 0 for an empty file; changes nothing."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise JournalFileError(f"the journal {path} is a database of another program: name another file")
    if version > len(MIGRATIONS):
        raise JournalFileError(
            f"the journal {path} was written by a newer Quire (its version is {version}, this one knows "
            f"{len(MIGRATIONS)}): install that one, or name another file"
        )
    return int(version)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """Brings the schema from this version to the newest, all or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    for migration in MIGRATIONS[version:]:
        for statement in migration.split(";\n"):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.execute("COMMIT")


def _begin_session(connection: sqlite3.Connection, last_write: float) -> int:
    """The number of a new session. Takes the leases of the router that had the file before, which is dead. Its records
    are kept as long as those of any router that died, and a minute from now at least.
    """
    least = int(time()) + MIN_RUNNING_TTL
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE session SET number = number + 1")
    connection.execute(
        "UPDATE records SET expires = max(? + running_ttl, ?) WHERE expires IS NULL", (int(last_write), least)
    )
    number = session_number(connection)
    connection.execute("COMMIT")
    return number


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All or nothing of what the block does. ``IMMEDIATE`` writes, ``DEFERRED`` reads the state of one moment."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have rolled it back
            connection.execute("ROLLBACK")
        raise


def session_number(connection: sqlite3.Connection) -> int:
    """That of the router that opened the file last."""
    (number,) = connection.execute("SELECT number FROM session").fetchone()
    return int(number)


def _file_error(path: Path, error: OSError | sqlite3.Error) -> JournalFileError:
    if isinstance(error, FileNotFoundError):
        return JournalFileError(f"the journal {path} cannot be created: its folder does not exist")
    if isinstance(error, PermissionError):
        return JournalFileError(f"the journal {path} cannot be written: this user may not write it, or its folder")
    if isinstance(error, IsADirectoryError):
        return JournalFileError(f"the journal {path} is a folder: name a file")
    if isinstance(error, OSError):
        return JournalFileError(f"the journal {path} cannot be written: {error.strerror}")
    if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return JournalFileError(f"the journal {path} is damaged, or no database: move it away, or name another file")
    return JournalFileError(f"the journal {path} cannot be opened: {error}")
