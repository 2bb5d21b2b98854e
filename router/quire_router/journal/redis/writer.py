"""What a journal writes to Redis: pipelined flushes of scripts.

``RedisTarget`` exchanges them; ``CommandBuilder`` says which commands a write is.
"""

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router.core.generation import GenerationRequest
from quire_router.journal.codec import TOKEN_BYTES, JournalSettings, encode_request_fields, encode_usage
from quire_router.journal.journal_writer import WriteReply
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
from quire_router.journal.write_buffer import BufferedRequest, BufferedWrite, RequestEnd


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
        commands = [self._commands.build(write) for write in writes]
        with self._health.track_exchange(writes=True):
            answers = iter(await self._connection.execute(chain.from_iterable(commands)))
        replies, ended = list[WriteReply | Exception](), list[BufferedWrite]()
        for write, own_commands in zip(writes, commands, strict=True):
            own_answers = list(islice(answers, len(own_commands)))
            replies.append(_reply(own_answers[1:] if enters_index(write) else own_answers, own_answers))
            if leaves_index(write) and own_answers[-1] == ScriptReply.DONE:
                ended.append(write)
        self._commands.send_source = False  # Redis knows the scripts by their hashes again
        if ended:
            await self._connection.execute([index_removal(ended)])
        return replies

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
        """See ``WriteTarget``. Only the type: Redis' messages may repeat a part of a command."""
        return type(error).__name__

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
    if ScriptReply.STALE in replies:
        return WriteReply.STALE
    if ScriptReply.LOST in replies:
        return WriteReply.LOST
    return WriteReply.CANCELLED if ScriptReply.CANCELLED in replies else WriteReply.DONE


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
    stored = encode_request_fields(generation)
    fields = stored.request, stored.prompt, stored.conversation, stored.seal
    return settings.lease_ms, settings.running_ttl_of(generation), *fields, retention


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
