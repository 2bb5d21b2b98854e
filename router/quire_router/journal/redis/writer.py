"""What a journal writes to Redis: pipelined flushes of scripts.

``RedisTarget`` exchanges them; ``CommandBuilder`` says which commands a write is.
"""

import asyncio
import logging
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router.clients.redis_failure import describe_failure
from quire_router.core import metrics
from quire_router.core.generation import GenerationRequest
from quire_router.core.usage import Account
from quire_router.journal.codec import TOKEN_BYTES, JournalSettings, encode_request_fields, encode_usage
from quire_router.journal.journal_writer import WriteReply
from quire_router.journal.redis.ledger import count_arguments, expect_arguments
from quire_router.journal.redis.redis_connection import (
    ALL_SCRIPTS,
    APPEND,
    BACKGROUND,
    FINISH,
    INDEX,
    LEDGER,
    OPEN,
    RELEASE,
    USAGE_COUNT,
    USAGE_EXPECT,
    LuaScript,
    PipelinedConnection,
    RedisHealth,
    ScriptReply,
    encode_command,
    is_corruption,
    keys,
    tombstone,
)
from quire_router.journal.write_buffer import BufferedRequest, BufferedWrite, DroppedUsage, RequestEnd

log = logging.getLogger(__name__)
_MEANINGS = {
    ScriptReply.DELETED: WriteReply.DELETED,
    ScriptReply.STALE: WriteReply.STALE,
    ScriptReply.LOST: WriteReply.LOST,
    ScriptReply.CANCELLED: WriteReply.CANCELLED,
}
"""What a reply to one of a write's scripts means for the write; the first of several counts."""
_WRITTEN = (WriteReply.DONE, WriteReply.CANCELLED)


class RedisTarget:
    """See ``WriteTarget``: a Redis. Every script is idempotent."""

    name = "Redis"
    errors: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)

    def __init__(
        self, client: Redis, connection: PipelinedConnection, health: RedisHealth, settings: JournalSettings
    ) -> None:
        self._client = client
        self._connection = connection
        self._health = health
        self._commands = CommandBuilder(settings)
        self._lease = settings.lease
        self._scripts_loaded = False

    async def connect(self) -> None:
        """Loads the scripts."""
        if not self._scripts_loaded:
            for script in ALL_SCRIPTS:
                await self._client.script_load(script.source)
            self._scripts_loaded = True

    async def beat(self) -> None:
        """See ``WriteTarget``."""
        with self._health.track_exchange(writes=True):
            refusal = await self._health.check()
        if refusal is not None:
            raise refusal

    async def write(self, writes: list[BufferedWrite]) -> list[WriteReply | Exception]:
        """See ``WriteTarget``."""
        expired = asyncio.get_running_loop().time() - self._lease
        noted = [is_noted(write, expired) for write in writes]
        commands = [self._commands.build(write, noted=note) for write, note in zip(writes, noted, strict=True)]
        notes = [enters_index(write) + note for write, note in zip(writes, noted, strict=True)]  # before the record's
        with self._health.track_exchange(writes=True):
            answers = iter(await self._connection.execute(chain.from_iterable(commands)))
        replies = list[WriteReply | Exception]()
        for own_commands, before in zip(commands, notes, strict=True):
            own_answers = list(islice(answers, len(own_commands)))
            replies.append(_reply(own_answers[before:], own_answers))
        return replies

    async def count_closed(self, writes: list[BufferedWrite], replies: list[WriteReply | Exception]) -> None:
        """See ``WriteTarget``. Takes those that have ended out of the index, too."""
        closed = [write.end is not None or write.releases for write in writes]
        confirmed = [place for place, reply in enumerate(replies) if closed[place] and reply in _WRITTEN]
        if confirmed:
            await self._count_confirmed(writes, replies, confirmed)
        self._commands.send_source = False  # Redis knows the scripts by their hashes again

    async def _count_confirmed(
        self, writes: list[BufferedWrite], replies: list[WriteReply | Exception], confirmed: list[int]
    ) -> None:
        counted = [place for place in confirmed if writes[place].request.is_countable]
        metrics.USAGE_LOST.inc(len(confirmed) - len(counted))
        commands = [self._commands.count(writes[place]) for place in counted]
        ended = [writes[place] for place in confirmed if leaves_index(writes[place])]
        if ended:
            commands.append(index_removal(ended))
        if not commands:
            return
        for place, answer in zip(counted, await self._connection.execute(commands), strict=False):
            if isinstance(answer, Exception) and is_corruption(answer):
                log.error("the ledger of usage in Redis is damaged: its keys have another type")
                metrics.USAGE_LOST.inc()
            elif isinstance(answer, Exception):
                replies[place] = answer

    async def count(self, dropped: list[DroppedUsage]) -> None:
        """See ``WriteTarget``. Raises the first error among the replies."""
        commands = [command for each in dropped for command in self._commands.count_dropped(each)]
        for answer in await self._connection.execute(commands):
            if isinstance(answer, Exception) and not is_corruption(answer):
                raise answer

    def repeats(self, error: Exception) -> bool:
        """Whether Redis was restarted, or its scripts were flushed, maybe again before they could be used."""
        if isinstance(error, NoScriptError):
            self._commands.send_source = True
            return True
        if not isinstance(error, ResponseError):
            self._scripts_loaded = False
        return False

    def is_refusal(self, error: Exception) -> bool:
        """Whether Redis is there and has the scripts: it is read only, out of memory, or does not allow it."""
        return isinstance(error, ResponseError)

    def describe(self, error: Exception) -> str:
        """See ``WriteTarget``."""
        return describe_failure(error)

    def mark_unavailable(self) -> None:
        """See ``WriteTarget``."""
        self._health.mark_unavailable()


def _reply(replies: list[Any], with_index: list[Any]) -> WriteReply | Exception:
    """What the replies to one write's scripts mean; ``with_index`` are those and the one of the index."""
    if replies == [ScriptReply.DONE]:  # the usual case
        return WriteReply.DONE
    errors = [reply for reply in with_index if isinstance(reply, Exception)]
    problem = next((error for error in errors if not is_corruption(error)), None)
    if problem is not None:
        return problem
    if any(isinstance(reply, Exception) for reply in replies):
        return WriteReply.DAMAGED
    return next((meaning for reply, meaning in _MEANINGS.items() if reply in replies), WriteReply.DONE)


class CommandBuilder:
    """Builds the commands of writes, with the times of ``settings``. Does no I/O. With ``send_source`` they contain the
    sources of their scripts, in case that Redis has forgotten them.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self.send_source = False
        self._settings = settings

    def build(self, write: BufferedWrite, *, noted: bool) -> list[bytes]:
        """The commands; one of them is for the ledger if it is ``noted`` (``is_noted``). Of a background request that
        goes on, the first adds it to the index, before it is opened; one that has ended is to be removed with
        ``index_removal`` once its end is known to be written.
        """
        commands = [self._index(write)] if enters_index(write) else []
        if noted:
            commands.append(self._expect(write))
        if write.opens:
            commands.append(self._open(write.request))
        commands.append(self._append(write))
        if write.end is not None:
            commands.append(self._finish(write, write.end))
        if write.releases:
            commands.append(self._release(write.request))
        return commands

    def count(self, write: BufferedWrite) -> bytes:
        """Counts what the request used, once it is known that its end or release is written."""
        request, ended = write.request, write.end is not None
        arguments = count_arguments(request.lease.request_id, request.used, self._settings, ended=ended)
        return encode_command(*self._script_reference(USAGE_COUNT), len(LEDGER), *arguments)

    def count_dropped(self, dropped: DroppedUsage) -> list[bytes]:
        """Notes and counts what a request used that has no record, or only its beginning."""
        request_id, usage = dropped.lease.request_id, dropped.usage
        note = expect_arguments(request_id, dropped.account, usage)
        arguments = count_arguments(request_id, usage, self._settings, ended=True)
        return [
            encode_command(*self._script_reference(USAGE_EXPECT), len(LEDGER), *note),
            encode_command(*self._script_reference(USAGE_COUNT), len(LEDGER), *arguments),
        ]

    def _expect(self, write: BufferedWrite) -> bytes:
        request = write.request
        closed = write.end is not None or write.releases
        account = Account.of(request.generation)
        arguments = expect_arguments(request.lease.request_id, account, request.used if closed else None)
        return encode_command(*self._script_reference(USAGE_EXPECT), len(LEDGER), *arguments)

    def _open(self, request: BufferedRequest) -> bytes:
        lease, arguments = request.lease, open_arguments(request.generation, self._settings)
        names = *keys(lease.request_id), tombstone(lease.request_id)
        return encode_command(*self._script_reference(OPEN), len(names), *names, lease.owner, lease.epoch, *arguments)

    def _append(self, write: BufferedWrite) -> bytes:
        log_arguments = (
            write.start * TOKEN_BYTES,
            write.packed,
            write.checksum,
            "" if write.num_tokens is None else write.num_tokens,
            write.version,
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
    stored = encode_request_fields(generation)
    fields = stored.request, stored.prompt, stored.conversation, stored.seal
    return settings.lease_ms, settings.running_ttl_of(generation), *fields, retention


def is_noted(write: BufferedWrite, expired: float) -> bool:
    """Whether writing this notes the request in the ledger: its first write with a lease, or the first after it was not
    renewed since ``expired`` (the loop's time), its end or its release.
    """
    begins = write.opens or write.request.renewed <= max(0.0, expired)
    return (begins or write.end is not None or write.releases) and write.request.is_countable


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
