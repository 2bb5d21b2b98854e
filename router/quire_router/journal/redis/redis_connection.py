"""The Lua scripts that change a record in one step each. They are known to Redis by the hash of their source."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha1
from time import monotonic
from typing import Any

from hiredis import pack_command
from quire_proto.errors import ErrorCode, QuireError, internal
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from quire_router.clients.redis_client import lua_source

log = logging.getLogger(__name__)


class ScriptReply(IntEnum):
    """What a script that writes returns; ``common.lua`` says when."""

    CANCELLED = 2
    DONE = 1
    STALE = 0
    LOST = -1


@dataclass(frozen=True, slots=True)
class LuaScript:
    """One script; ``sha`` is the name that EVALSHA takes."""

    source: str
    sha: str


def _load_script(*names: str) -> LuaScript:
    source = "".join(lua_source(__package__, name) for name in names)
    return LuaScript(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


OPEN = _load_script("common", "open")
APPEND = _load_script("common", "append")
FINISH = _load_script("common", "finish")
RELEASE = _load_script("common", "release")
CLAIM = _load_script("common", "claim")
CANCEL = _load_script("common", "cancel")
DELETE = _load_script("common", "delete")
INDEX = _load_script("index")
ALL = (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE, INDEX)


# What a journal's keys in Redis are called.


BACKGROUND = "quire:background"
"""The index of background requests that have not ended, by when their leases expire (ms, by Redis' clock)."""

PROBE = "quire:probe"
"""Is never there: nothing is written to it, to see whether anything can be."""


def keys(request_id: str) -> tuple[str, str]:
    """A request's record and its tokens; the braces put both into one slot of a cluster."""
    return f"quire:{{{request_id}}}:record", f"quire:{{{request_id}}}:tokens"


# Many commands to Redis in one write, and their answers. Knows nothing of records.


def encode_command(*command: str | int | bytes) -> bytes:
    """A command as ``Wire`` sends it."""
    packed: bytes = pack_command(command)  # type: ignore[arg-type]  # the library's type says that it takes one word
    return packed


class PipelinedConnection:
    """Exchanges commands over one of ``client``'s connections, which need no answer timeout of their own.

    The library's own pipeline encodes each word in Python and arms a timer for each answer, which takes five times as
    long as all that Redis needs of this process. Here hiredis encodes, and one timer of ``timeout`` seconds watches
    over the whole exchange.
    """

    def __init__(self, client: Redis, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    async def execute(self, commands: Iterable[bytes]) -> list[Any]:
        """The answer to each command in order, errors that Redis answers among them. Raises what the client raises."""
        pool: Any = self._client.connection_pool
        async with asyncio.timeout(self._timeout):
            connection = await pool.get_connection()
            try:
                return await _execute(connection, list(commands))
            finally:
                await pool.release(connection)


async def _execute(connection: Any, commands: list[bytes]) -> list[Any]:
    await connection.send_packed_command(commands)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers


# Whether Redis was there all the time, and still is the one that it was. Knows nothing of records.


MAX_REDIS_WAIT = 0.5  # seconds that a request waits for Redis where it can go on, or begin, without


class RedisHealth:
    """What this router has seen of Redis, and what Redis says of its own start, which a router that came later did not
    see. While it was away, or when it lost its data, routers went on without: for ``settle`` seconds from then on they
    may still have to write what they hold, so that what is not there need not be unknown.
    """

    def __init__(self, client: Redis, settle: float) -> None:
        self._client = client
        self._settle = settle
        self._run_id = ""
        self._settled_at = 0.0
        # Of reads and of writes: when the last was answered, and when those were asked that are not, in their order.
        self._last_reply = {False: 0.0, True: 0.0}
        self._outstanding: dict[bool, dict[object, float]] = {False: {}, True: {}}

    @property
    def is_settling(self) -> bool:
        """Whether a record that is not there may yet be written."""
        return monotonic() < self._settled_at

    @contextmanager
    def track_exchange(self, *, writes: bool = False) -> Iterator[None]:
        """Around an exchange with it: one that takes longer than requests wait, while no other is answered, means that
        it was away. Answers to reads say nothing of those to what ``writes``. Where many ask at once, one may just have
        waited here for its turn: each of them would keep all others from going on.
        """
        asked = object()
        self._outstanding[writes][asked] = monotonic()
        try:
            yield
        finally:
            self._check_latency(writes)
            del self._outstanding[writes][asked]
        self._last_reply[writes] = monotonic()

    def _check_latency(self, writes: bool) -> None:
        """Whether it was silent since it was asked what it was asked first, of all that is not answered."""
        first = next(iter(self._outstanding[writes].values()))
        if monotonic() - max(first, self._last_reply[writes]) > MAX_REDIS_WAIT:
            self.mark_unavailable()

    def mark_unavailable(self) -> None:
        """It cannot be written to, or could not until now."""
        self._settled_at = monotonic() + self._settle

    async def check(self) -> ResponseError | None:
        """Finds out whether it was restarted, and whether it takes what is written: a router that has nothing to write
        would not know. Returns why it does not. Raises what the client raises.
        """
        pipeline = self._client.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.setrange(PROBE, 0, "")
        told, taken = await pipeline.execute(raise_on_error=False)
        if not isinstance(told, ResponseError):  # else this user may not ask
            self._check_run_id(told)
        if isinstance(taken, ResponseError) and not isinstance(taken, NoPermissionError):
            self.mark_unavailable()
            return taken
        return None

    def _check_run_id(self, info: dict[str, Any]) -> None:
        run_id = str(info.get("run_id", ""))
        if run_id and run_id == self._run_id:
            return  # its age says nothing new, and goes by a clock that may go back: below zero, if to before its start
        if self._run_id:
            self.mark_unavailable()
        self._run_id = run_id
        uptime = max(0.0, float(info.get("uptime_in_seconds", self._settle)))  # rounded down
        self._settled_at = max(self._settled_at, monotonic() + self._settle - uptime)


def to_milliseconds(time: tuple[int, int]) -> int:
    """What TIME answered, in ms."""
    return time[0] * 1000 + time[1] // 1000


# What can be wrong with Redis, or with one record in it, and what is said of it.


_CORRUPTION_MESSAGES = ("WRONGTYPE", "DAMAGED", "string exceeds maximum allowed size", "attempt to")


def is_corruption(error: Exception) -> bool:
    """Whether an error is of one record's keys, which it will be again, rather than of Redis, which may pass."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _CORRUPTION_MESSAGES)


def unavailable_error() -> QuireError:
    """Redis does not answer."""
    return QuireError(ErrorCode.UNAVAILABLE, "Request state cannot be read now.", retry_after=1.0)


def corrupt_record_error(request_id: str) -> QuireError:
    """What is stored is no record."""
    log.error("the record of request %s is damaged", request_id)
    return internal()
