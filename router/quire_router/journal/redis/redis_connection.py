"""The journal's exchanges with Redis: Lua scripts, keys, pipelined commands, Redis' health and its errors.

Each script changes a record atomically; Redis knows it by the SHA-1 of its source. Many commands go in one write over a
``PipelinedConnection``. ``RedisHealth`` keeps track of whether Redis was available all the time, and still has the data
that it had.
"""

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
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from quire_router.clients.redis_client import lua_source
from quire_router.journal.buffered_journal import MAX_WAIT

log = logging.getLogger(__name__)

_CORRUPTION_MESSAGES = ("WRONGTYPE", "DAMAGED", "string exceeds maximum allowed size", "attempt to")


class ScriptReply(IntEnum):
    """What a script that writes returns; ``common.lua`` says when."""

    DELETED = 3
    CANCELLED = 2
    DONE = 1
    STALE = 0
    LOST = -1


@dataclass(frozen=True, slots=True)
class LuaScript:
    """One script; ``sha`` is what EVALSHA takes."""

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
USAGE_EXPECT = _load_script("usage_common", "usage_expect")
USAGE_COUNT = _load_script("usage_common", "usage_count")
USAGE_GONE = _load_script("usage_common", "usage_gone")
ALL_SCRIPTS = (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE, INDEX, USAGE_EXPECT, USAGE_COUNT, USAGE_GONE)

BACKGROUND = "quire:background"
"""The index of background requests that have not ended, by when their leases expire (ms, by Redis' clock)."""

LEDGER = "quire:{usage}:pending", "quire:{usage}:open", "quire:{usage}:counted", "quire:{usage}:hour:"
"""The keys of the ledger, see ``usage_common.lua``; the last one is the beginning of the hours' keys."""

PROBE = "quire:probe"
"""A key that never exists: writing nothing to it shows whether Redis takes writes."""


def keys(request_id: str) -> tuple[str, str]:
    """The keys of a request's record and of its token log; the braces put both into one slot of a cluster."""
    return f"quire:{{{request_id}}}:record", f"quire:{{{request_id}}}:tokens"


def tombstone(request_id: str) -> str:
    """The key that says that the record of a request was deleted, in the same slot."""
    return f"quire:{{{request_id}}}:deleted"


def encode_command(*command: str | int | bytes) -> bytes:
    """A command as ``PipelinedConnection`` sends it."""
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
        """The replies to the commands in order, Redis' error replies among them. Raises what the client raises."""
        pool: Any = self._client.connection_pool
        async with asyncio.timeout(self._timeout):
            connection, sent = await pool.get_connection(), list(commands)
            try:
                # As the library's own pipeline: again on a new connection if this one breaks.
                answers: list[Any] = await connection.retry.call_with_retry(
                    lambda: _execute(connection, sent), lambda _: connection.disconnect(nowait=True)
                )
            finally:
                await pool.release(connection)
        return answers


async def _execute(connection: Any, commands: list[bytes]) -> list[Any]:
    await connection.send_packed_command(commands)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers


class RedisHealth:
    """Whether Redis was unavailable or lost its data lately: from what this router has seen, and from Redis' uptime, as
    a router that started later has not seen it. While it was unavailable, routers went on without it: for ``settle``
    seconds from then on they may still have to write what they buffer, so a record that is missing may yet appear.
    """

    def __init__(self, client: Redis, settle: float) -> None:
        self._client = client
        self._settle = settle
        self._run_id = ""
        self._settled_at = 0.0
        # Of reads (False) and of writes: when the last reply came, and when those were sent that have none, in order.
        self._last_reply = {False: 0.0, True: 0.0}
        self._outstanding: dict[bool, dict[object, float]] = {False: {}, True: {}}

    @property
    def is_settling(self) -> bool:
        """Whether a record that is missing may yet be written."""
        return monotonic() < self._settled_at

    @contextmanager
    def track_exchange(self, *, writes: bool = False) -> Iterator[None]:
        """Around an exchange with Redis. One that takes longer than ``MAX_WAIT`` while no other gets a reply
        means that Redis was unavailable. Replies to reads say nothing of replies to ``writes``. With many exchanges at
        once, one may only have waited here for its turn, and must not make Redis count as unavailable for all others.
        """
        exchange = object()
        self._outstanding[writes][exchange] = monotonic()
        try:
            yield
        finally:
            self._check_latency(writes)
            del self._outstanding[writes][exchange]
        self._last_reply[writes] = monotonic()

    def _check_latency(self, writes: bool) -> None:
        """Marks Redis unavailable if it has sent no reply since the oldest outstanding exchange, for too long."""
        first = next(iter(self._outstanding[writes].values()))
        if monotonic() - max(first, self._last_reply[writes]) > MAX_WAIT:
            self.mark_unavailable()

    def mark_unavailable(self) -> None:
        """Redis cannot be written to, or could not until now."""
        self._settled_at = monotonic() + self._settle

    async def check(self) -> ResponseError | None:
        """Finds out whether Redis was restarted, and whether it takes writes, which a router with nothing to write
        would not notice. Returns the error if it does not. Raises what the client raises.
        """
        pipeline = self._client.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.setrange(PROBE, 0, "")
        info, written = await pipeline.execute(raise_on_error=False)
        if not isinstance(info, ResponseError) and self._check_run_id(info):  # else this user may not run INFO
            await self._report_settings(info)
        if isinstance(written, ResponseError) and not isinstance(written, NoPermissionError):
            self.mark_unavailable()
            return written
        return None

    async def _report_settings(self, server: dict[str, Any]) -> None:
        """Says once of each server what its operator should change."""
        policy = (await self._client.info("memory")).get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            log.warning(
                "Redis may evict parts of records, which damages them: set maxmemory-policy to noeviction, not %s",
                policy,
            )
        if server.get("redis_mode") == "cluster":
            log.error(
                "Redis is a cluster, and routers can use one node only: set --redis-url to a Redis without cluster mode"
            )

    def _check_run_id(self, info: dict[str, Any]) -> bool:
        """Returns whether this server was not seen before."""
        run_id = str(info.get("run_id", ""))
        if run_id and run_id == self._run_id:
            return False  # its uptime adds nothing, and follows a clock that may go back, even to before the start
        if self._run_id:
            self.mark_unavailable()
        self._run_id = run_id
        uptime = max(0.0, float(info.get("uptime_in_seconds", self._settle)))  # rounded down
        self._settled_at = max(self._settled_at, monotonic() + self._settle - uptime)
        return True


def to_milliseconds(time: tuple[int, int]) -> int:
    """The reply to TIME, in ms."""
    return time[0] * 1000 + time[1] // 1000


def is_corruption(error: Exception) -> bool:
    """Whether an error is of one record's keys, and will come again, rather than of Redis, which may pass."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _CORRUPTION_MESSAGES)
