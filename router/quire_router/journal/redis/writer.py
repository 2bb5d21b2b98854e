"""The one task that writes to Redis: what a ``WriteBuffer`` has, in pipelined flushes.

Nothing waits for it, and it survives every failure. ``CommandBuilder`` says which commands a write is.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from quire_proto.supervise import Backoff
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router.core import metrics
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import LeaseListener
from quire_router.journal.codec import TOKEN_BYTES, JournalSettings, encode_request_fields, encode_usage
from quire_router.journal.redis.redis_connection import (
    ALL_SCRIPTS,
    APPEND,
    BACKGROUND,
    FINISH,
    INDEX,
    OPEN,
    RELEASE,
    LuaScript,
    PipelinedConnection,
    RedisHealth,
    ScriptReply,
    encode_command,
    is_corruption,
    keys,
)
from quire_router.journal.write_buffer import BufferedRequest, BufferedWrite, RequestEnd, WriteBuffer

log = logging.getLogger(__name__)

MAX_WRITES_PER_FLUSH = 128  # a flush of so many holds the loop for a millisecond or so
PAUSE_PER_WRITE = 0.0004  # seconds; a write takes about a thirtieth of that here
FIRST_DELAY, LAST_DELAY = 0.05, 1.0  # seconds from a failure to the next try
HEARTBEATS_PER_LEASE = 4


class RedisWriter:
    """Flushes dirty requests in one exchange after the other.

    A write is repeated after a failure, as it is not known whether Redis saw it: every script is idempotent. A Redis
    that replies may still refuse writes, so once it did, only a write that succeeded ends the outage.
    """

    def __init__(
        self,
        client: Redis,
        connection: PipelinedConnection,
        health: RedisHealth,
        buffer: WriteBuffer,
        settings: JournalSettings,
    ) -> None:
        self.available = False
        self._client = client
        self._connection = connection
        self._health = health
        self._buffer = buffer
        self._settings = settings
        self._commands = CommandBuilder(settings)
        self._listener: LeaseListener | None = None
        self._scripts_loaded = False
        self._refusing = False
        self._outage_logged = False
        self._backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        self._next_heartbeat = 0.0
        self._flushed = asyncio.Event()
        metrics.JOURNAL_AVAILABLE.set(0)

    def set_listener(self, listener: LeaseListener) -> None:
        """See ``Journal``."""
        self._listener = listener

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._run_once()
            except NoScriptError:
                # Redis was restarted, or its scripts were flushed, maybe again before they could be loaded and used.
                self._commands.send_source = True
                await asyncio.sleep(self._settings.pause)
            except ResponseError as error:  # read only, out of memory, not allowed: Redis is there and has the scripts
                await self._on_failure(error)
            except (RedisError, OSError, TimeoutError) as error:
                self._scripts_loaded = False
                await self._on_failure(error)
            except Exception as error:
                log.exception("the journal's writer failed")
                await self._on_failure(error)

    async def flush(self) -> None:
        """Waits until nothing is dirty."""
        while self._buffer:
            self._flushed.clear()
            await self._flushed.wait()

    async def wait_written(self, request: BufferedRequest) -> None:
        """Waits until a request that was finished or released is written, or dropped."""
        while self._buffer.contains(request):
            self._flushed.clear()
            await self._flushed.wait()

    async def _run_once(self) -> None:
        if not self._scripts_loaded:
            await self._load_scripts()
        if asyncio.get_running_loop().time() >= self._next_heartbeat:
            await self._renew_leases()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_heartbeat):
                await self._buffer.wait_dirty()
        writes = self._buffer.next_writes(MAX_WRITES_PER_FLUSH)
        await self._write(writes)
        metrics.JOURNAL_PENDING.set(len(self._buffer))
        self._flushed.set()
        await asyncio.sleep(max(self._settings.pause, PAUSE_PER_WRITE * len(writes)))

    async def _load_scripts(self) -> None:
        for script in ALL_SCRIPTS:
            await self._client.script_load(script.source)
        self._scripts_loaded = True

    async def _renew_leases(self) -> None:
        """Renews every lease: marks the records that were not written lately dirty, so that the next flush sends an
        ``append.lua`` for each, which renews it. Notices that Redis is gone or refuses writes even if there is nothing
        to write.
        """
        with self._health.track_exchange(writes=True):
            refusal = await self._health.check()
        if refusal is not None:
            raise refusal
        if not self._refusing or not self._buffer:  # it may refuse larger writes than the one that was tried here
            self._on_success()
        now, interval = asyncio.get_running_loop().time(), self._settings.lease / HEARTBEATS_PER_LEASE
        self._buffer.mark_unrenewed_dirty(now - interval / 2)
        self._next_heartbeat = now + interval

    def _on_success(self) -> None:
        if not self.available:
            log.info("the journal is written to Redis")
        self.available, self._refusing, self._outage_logged = True, False, False
        self._backoff.reset()
        metrics.JOURNAL_AVAILABLE.set(1)

    def record_failure(self, error: Exception) -> None:
        """Redis did not take a write, of this or another task: it counts as unavailable until it takes one."""
        if not self._outage_logged:
            # Only the type: a message might repeat a part of what was written.
            log.warning("the journal cannot be written to Redis (%s); requests go on", type(error).__name__)
        self.available, self._outage_logged = False, True
        self._refusing = self._refusing or isinstance(error, ResponseError)
        self._health.mark_unavailable()
        metrics.JOURNAL_AVAILABLE.set(0)
        metrics.JOURNAL_PENDING.set(len(self._buffer))

    async def _on_failure(self, error: Exception) -> None:
        self.record_failure(error)
        await asyncio.sleep(self._backoff.next())

    async def _write(self, writes: list[BufferedWrite]) -> None:
        if not writes:
            return
        commands = [self._commands.build(write) for write in writes]
        with self._health.track_exchange(writes=True):
            replies = iter(await self._connection.execute(chain.from_iterable(commands)))
        now = asyncio.get_running_loop().time()
        problems, last_replies = [], []
        for write, own_commands in zip(writes, commands, strict=True):
            *_, last = own_replies = list(islice(replies, len(own_commands)))
            problems.append(self._apply_replies(write, own_replies, now))
            last_replies.append(last)
        self._commands.send_source = False  # Redis knows the scripts by their hashes again
        ended = [
            write
            for write, last in zip(writes, last_replies, strict=True)
            if leaves_index(write) and last == ScriptReply.DONE
        ]
        if ended:
            await self._connection.execute([index_removal(ended)])
        for problem in filter(None, problems):
            raise problem
        self._on_success()

    def _apply_replies(self, write: BufferedWrite, replies: list[Any], now: float) -> Exception | None:
        """Applies the replies to one write; returns the error if it is to be tried again later."""
        if replies == [ScriptReply.DONE]:  # the usual case
            self._buffer.mark_stored(write, now)
            return None
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        problem = next((error for error in errors if not is_corruption(error)), None)
        if problem is None:
            self._apply_written(write, replies[1:] if enters_index(write) else replies, now)
        return problem

    def _apply_written(self, write: BufferedWrite, replies: list[Any], now: float) -> None:
        if any(isinstance(reply, Exception) for reply in replies):
            self._drop_corrupt(write.request)
        elif ScriptReply.STALE in replies:
            self._on_lease_lost(write.request)
        elif ScriptReply.LOST in replies:
            self._buffer.mark_lost(write.request)
        else:
            self._buffer.mark_stored(write, now)
            if ScriptReply.CANCELLED in replies:
                self._on_cancelled(write.request)

    def _drop_corrupt(self, request: BufferedRequest) -> None:
        """Drops a request whose keys are damaged or not a record's: its writes would always fail."""
        if self._buffer.contains(request):
            log.error("the record of request %s is damaged and is not written any more", request.lease.request_id)
            metrics.JOURNAL_DROPPED.inc()
            self._buffer.remove(request)

    def _on_lease_lost(self, request: BufferedRequest) -> None:
        metrics.STALE_EPOCHS.inc()
        notify = request.is_writable and self._buffer.contains(request)
        self._buffer.remove(request)
        if notify and self._listener is not None:
            self._listener.on_lease_lost(request.lease.request_id)

    def _on_cancelled(self, request: BufferedRequest) -> None:
        notify = request.is_writable and self._buffer.contains(request) and not request.cancelled
        request.cancelled = True
        if notify and self._listener is not None:
            self._listener.on_cancelled(request.lease.request_id)


class CommandBuilder:
    """Builds the commands of writes, with the times of ``settings``. Does no I/O. With ``send_source`` they contain the
    sources of their scripts, in case that Redis has forgotten them.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self.send_source = False
        self._settings = settings

    def build(self, write: BufferedWrite) -> list[bytes]:
        """The commands. Of a background request that goes on, the first adds it to the index, before it is opened; one
        that has ended is to be removed with ``index_removal`` once its end is known to be written.
        """
        commands = [self._index(write)] if enters_index(write) else []
        if write.opens:
            commands.append(self._open(write.request))
        commands.append(self._append(write))
        if write.end is not None:
            commands.append(self._finish(write, write.end))
        if write.releases:
            commands.append(self._release(write.request))
        return commands

    def _open(self, request: BufferedRequest) -> bytes:
        return self._evaluate(OPEN, request, *open_arguments(request.generation, self._settings))

    def _append(self, write: BufferedWrite) -> bytes:
        log_arguments = (
            write.start * TOKEN_BYTES,
            write.packed,
            write.checksum,
            "" if write.num_tokens is None else write.num_tokens,
        )
        times = self._settings.lease_ms, self._settings.running_ttl_of(write.request.generation)
        return self._evaluate(APPEND, write.request, *times, *log_arguments)

    def _finish(self, write: BufferedWrite, end: RequestEnd) -> bytes:
        text = end.error.encode("utf-8", "surrogatepass")
        kept = self._settings.retention_of(write.request.generation)
        times = kept, end.reason.value, text, encode_usage(end.usage), write.stop * TOKEN_BYTES
        return self._evaluate(FINISH, write.request, *times)

    def _release(self, request: BufferedRequest) -> bytes:
        retention = self._settings.retention_of(request.generation)
        kept = self._settings.running_ttl_s if request.generation.background else retention
        return self._evaluate(RELEASE, request, kept, retention)

    def _index(self, write: BufferedWrite) -> bytes:
        """Adds a background request to the index, or renews it there. The index is in a slot of its own, so it can be
        out of date: ``OrphanFinder`` examines each record.
        """
        until = 0 if write.releases else self._settings.lease_ms
        times = write.request.lease.request_id, until, self._settings.running_ttl_s
        return encode_command(*self._script_reference(INDEX), 1, BACKGROUND, *times)

    def _evaluate(self, script: LuaScript, request: BufferedRequest, *arguments: str | int | bytes) -> bytes:
        lease = request.lease
        return encode_command(
            *self._script_reference(script), 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments
        )

    def _script_reference(self, script: LuaScript) -> tuple[str, str]:
        return ("EVAL", script.source) if self.send_source else ("EVALSHA", script.sha)


def open_arguments(generation: GenerationRequest, settings: JournalSettings) -> tuple[str | int | bytes, ...]:
    """The arguments of ``open.lua`` after owner and epoch."""
    retention = "" if generation.retention is None else settings.retention_of(generation)
    return settings.lease_ms, settings.running_ttl_of(generation), *encode_request_fields(generation), retention


def enters_index(write: BufferedWrite) -> bool:
    """Whether writing this puts the request into the index: also one that begins and ends with this write, as its end
    may be refused.
    """
    return write.request.generation.background and (write.end is None or write.opens)


def leaves_index(write: BufferedWrite) -> bool:
    """Whether the request leaves the index once this is written."""
    return write.request.generation.background and write.end is not None


def index_removal(writes: Iterable[BufferedWrite]) -> bytes:
    """Removes requests from the index, once their ends are known to be written: Redis executes a ZREM also while it
    refuses writes for lack of memory, and ``OrphanFinder`` does not find a request that has not ended and is not in the
    index. What stays in the index because this fails, it removes.
    """
    return encode_command("ZREM", BACKGROUND, *(write.request.lease.request_id for write in writes))
