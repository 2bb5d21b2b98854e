"""What a journal asks of Redis and waits for. Knows nothing of what is still to be written."""

import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire_proto.errors import internal
from quire_proto.sampling import FinishReason
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import MAX_ORPHANS, Lease, RecordUpdate, encode_error, partial_update
from quire_router.journal.codec import (
    MAX_LEASE,
    MIN_RETENTION,
    STATUS_FIELDS,
    TOKEN_BYTES,
    CorruptRecordError,
    JournalSettings,
    decode_epoch,
    decode_num_choices,
    decode_state,
    is_epoch,
    pack_tokens,
    unpack_tokens,
    verify_checksum,
)
from quire_router.journal.redis import redis_connection as scripts
from quire_router.journal.redis.redis_connection import (
    BACKGROUND,
    ScriptReply,
    corrupt_record_error,
    is_corruption,
    keys,
    to_milliseconds,
    unavailable_error,
)
from quire_router.journal.redis.writer import open_arguments
from quire_router.journal.token_log import TokenLogReader, log_checksum, read_chunk

log = logging.getLogger(__name__)

# A look after one record in Redis that somebody else may be writing. Reads only what is new.


UPDATE_FIELDS = ("epoch", "reason", "error", "usage", "lease_expires", "sum")


@dataclass(frozen=True, slots=True)
class RawRecordUpdate:
    """Some fields of a record, how many bytes its row has, the row from some byte on, and the time in ms by Redis'
    clock, all of one moment.
    """

    fields: Mapping[bytes, bytes]
    length: int
    row: bytes
    now: int


class RedisFollower:
    """Where one reader of a record stands. ``glance`` takes names of fields and an offset.

    The row may vanish with Redis' data and be written again, also by another router; then there is no news until it is
    as long as what was read. The record's checksum is of the whole row, so it tells whether what is there now goes on
    from what was read; if not, the record counts as damaged.
    """

    def __init__(self, read_update: Callable[[tuple[str, ...], int], Awaitable[RawRecordUpdate]]) -> None:
        self._read_update = read_update
        self._reader: TokenLogReader | None = None
        self._offset = 0  # bytes of the row that were read
        self._checksum = 0  # of these
        self._unread: _UnreadLog | None = None

    async def poll(self) -> RecordUpdate | None:
        """See ``Follower``."""
        if self._reader is not None and self._unread is not None:
            return await self._read(self._reader, self._unread)
        seen = await self._read_update(
            ("request", *UPDATE_FIELDS) if self._reader is None else UPDATE_FIELDS, self._offset
        )
        if not seen.fields:
            return None
        decode_epoch(seen.fields.get(b"epoch", b""))
        if self._reader is None:
            self._reader = TokenLogReader(decode_num_choices(seen.fields.get(b"request", b"")))
        end = decode_state(seen.fields, seen.now)
        if seen.length >= self._offset:
            total = await log_checksum(seen.row, self._checksum)
            verify_checksum(seen.fields, seen.length, total)
            self._unread = _UnreadLog(unpack_tokens(seen.row), total, end)
            return await self._read(self._reader, self._unread)
        if end.finish_reason is not None:
            raise CorruptRecordError("a record ended shorter than it was")
        return end

    async def _read(self, reader: TokenLogReader, unread: "_UnreadLog") -> RecordUpdate:
        try:
            deltas, taken = await read_chunk(reader, unread.values, unread.position)
        except ValueError:
            raise CorruptRecordError("the row is damaged") from None
        unread.position += taken
        if reader.has_complete_entry(unread.values, unread.position):
            return partial_update(deltas)
        self._unread = None
        self._offset += unread.position * TOKEN_BYTES
        complete = unread.position == len(unread.values)
        read = b"" if complete else pack_tokens(unread.values[: unread.position])
        self._checksum = unread.checksum if complete else await log_checksum(read, self._checksum)
        return replace(unread.end, deltas=deltas)


@dataclass(slots=True)
class _UnreadLog:
    """What was seen of a row and fits its checksum, of which so much as ``position`` says was told, and how it was with
    the record then.
    """

    values: "array[int]"
    checksum: int
    end: RecordUpdate
    position: int = 0


T = TypeVar("T")
StoredRecord = tuple[dict[bytes, bytes], bytes, int]
"""A record's fields, its row, and Redis' time in ms."""


class RedisStore:
    """Each call is one exchange, and repeated once when its connection turns out to be dead: all of them may be run
    twice. They raise what the client raises, or ``CorruptRecordError``; ``call`` makes a ``QuireError`` of that.
    """

    def __init__(self, client: Redis, settings: JournalSettings) -> None:
        self._client = client
        self._settings = settings

    async def call(self, request_id: str, operation: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns. Raises ``QuireError``: UNAVAILABLE without Redis, INTERNAL for what is no record."""
        try:
            return await self.call_with_retry(operation)
        except CorruptRecordError:
            raise corrupt_record_error(request_id) from None
        except (RedisError, OSError, TimeoutError) as error:
            raise (corrupt_record_error(request_id) if is_corruption(error) else unavailable_error()) from None

    async def call_with_retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns, at its second try if need be."""
        try:
            return await operation()
        except RedisConnectionError:
            # The pool may hold connections that died with a former Redis; a fresh one tells whether it is there.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            return await operation()

    async def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """Whether the record has begun with this lease: not when there is one of another request or owner. A background
        request is in the index before: whatever becomes of this router then, others find it.
        """
        terms = lease.owner, lease.epoch, *open_arguments(generation, self._settings)
        if generation.background:
            await self._index(lease.request_id)
        answer = await self._run(scripts.OPEN, lease.request_id, *terms)
        return bool(answer == ScriptReply.DONE)

    async def claim(self, request_id: str, owner: str, name: str) -> StoredRecord | None:
        """Takes over a record that nobody holds. ``name`` is the claim's own: repeating it changes nothing."""
        terms = self._settings.lease_ms, self._settings.running_ttl_s, self._settings.retention_s
        answer = await self._run(scripts.CLAIM, request_id, owner, name, *terms)
        if answer is None:
            return None
        pairs = iter(answer[0])
        return dict(zip(pairs, pairs, strict=True)), answer[1], int(answer[2])

    async def fail_corrupt(self, lease: Lease) -> None:
        """Ends a record that cannot be read."""
        log.error("the record of request %s is damaged", lease.request_id)
        terms = lease.owner, lease.epoch, self._settings.retention_s
        await self._run(
            scripts.FINISH, lease.request_id, *terms, FinishReason.ERROR.value, encode_error(internal()), 0, -1
        )

    async def cancel(self, request_id: str) -> bool:
        """Ends the record, or notes in it that it is to end; False when there is none that has not."""
        return bool(await self._run(scripts.CANCEL, request_id, self._settings.retention_s))

    async def delete(self, request_id: str) -> bool:
        """Deletes the record, at once or soon after the end that it asks for; False when there is none."""
        return bool(await self._run(scripts.DELETE, request_id, MIN_RETENTION))

    async def read(self, request_id: str) -> StoredRecord | None:
        """The record as it is; None when there is none."""
        record, tokens = keys(request_id)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hgetall(record)
        pipeline.get(tokens)
        pipeline.time()
        fields, row, time = await pipeline.execute()
        return (fields, row or b"", to_milliseconds(time)) if fields else None

    async def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """Of each record the fields that say how it is with it, the bytes of its prompt, and Redis' time in ms."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        for record, _ in map(keys, request_ids):
            pipeline.hmget(record, STATUS_FIELDS)
            pipeline.hstrlen(record, "prompt")
        time, *answers = await pipeline.execute()
        now = to_milliseconds(time)
        found = [_present_fields(STATUS_FIELDS, values) for values in answers[::2]]
        return [(fields, length, now) for fields, length in zip(found, answers[1::2], strict=True)]

    async def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """What is new in the record."""
        record, tokens = keys(request_id)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hmget(record, names)
        pipeline.strlen(tokens)
        pipeline.getrange(tokens, offset, -1)
        pipeline.time()
        values, length, row, time = await pipeline.execute()
        return RawRecordUpdate(_present_fields(names, values), length, row, to_milliseconds(time))

    async def _index(self, request_id: str) -> None:
        terms = self._settings.lease_ms, self._settings.running_ttl_s
        await self._evaluate(scripts.INDEX, 1, BACKGROUND, request_id, *terms)

    async def _run(self, script: scripts.LuaScript, request_id: str, *arguments: str | int | bytes) -> Any:
        return await self._evaluate(script, 2, *keys(request_id), *arguments)

    async def _evaluate(self, script: scripts.LuaScript, number_of_keys: int, *arguments: str | int | bytes) -> Any:
        try:
            return await self._client.evalsha(script.sha, number_of_keys, *arguments)
        except NoScriptError:
            return await self._client.eval(script.source, number_of_keys, *arguments)


def _present_fields(names: Sequence[str], values: Sequence[bytes | None]) -> dict[bytes, bytes]:
    """The fields that are there."""
    return {name.encode(): value for name, value in zip(names, values, strict=True) if value is not None}


# Looks for background requests that nobody holds. Changes nothing but the index of them, which may be behind.


MAX_EXAMINED = 4 * MAX_ORPHANS


class OrphanFinder:
    """Each search begins where the last one ended, and at the end with the first again: those that nobody takes up, as
    their models run elsewhere or they fail again and again, hold up the others for a round at most.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._start = 0

    async def find(self) -> list[str]:
        """At most 16 of them. Takes from the index what has ended. Raises what the client raises."""
        now = to_milliseconds(await self._client.time())
        await self._correct_future_leases(now)
        names = await self._next_names(now)
        states = await self._states(names)
        free = [name for name in names if _is_free(states[name], now)][:MAX_ORPHANS]
        if len(free) == MAX_ORPHANS:
            names = names[: names.index(free[-1]) + 1]
        ended = [name for name in names if _has_ended(states[name])]
        if ended:
            await self._client.zrem(BACKGROUND, *ended)
        self._start += len(names) - len(ended)
        return [name.decode() for name in free]

    async def _correct_future_leases(self, now: int) -> None:
        """Sets entries to ``now`` (ms) whose lease ends later than any lease can: they were written before Redis' clock
        went back. The holder, if it lives, writes the right time with its next heartbeat.
        """
        beyond = f"({now + MAX_LEASE}"
        ahead: Any = await self._client.zrangebyscore(BACKGROUND, beyond, "+inf", start=0, num=MAX_EXAMINED)
        if ahead:
            await self._client.zadd(BACKGROUND, dict.fromkeys(ahead, now), xx=True)

    async def _next_names(self, now: int) -> list[bytes]:
        """What comes next in the index, whose first are those with the oldest leases."""
        count = await self._client.zcount(BACKGROUND, "-inf", now)
        if self._start >= count:
            self._start = 0
        last = min(count, self._start + MAX_EXAMINED) - 1
        names: Any = await self._client.zrange(BACKGROUND, self._start, last) if count else []
        return list(names)

    async def _states(self, names: list[bytes]) -> dict[bytes, Any]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(keys(name.decode(errors="replace"))[0], "epoch", "reason", "lease_expires")
        return dict(zip(names, await pipeline.execute(raise_on_error=False), strict=True))


def _has_ended(state: Any) -> bool:
    """Whether a record is gone, so damaged that nobody can ever claim it, or has a reason why it ended."""
    return isinstance(state, Exception) or not is_epoch(state[0] or b"") or state[1] is not None


def _is_free(state: Any, now: int) -> bool:
    """Whether a record has not ended and nobody holds it."""
    if _has_ended(state):
        return False
    expires = state[2] or b"0"
    return not expires.isdigit() or not 0 < int(expires) - now <= MAX_LEASE
