"""What a journal asks of Redis and waits for. Knows nothing of what is still to be written."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from quire_proto.errors import internal
from quire_proto.sampling import FinishReason
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from quire_router.generation import GenerationRequest
from quire_router.journal import scripts
from quire_router.journal.base import Lease
from quire_router.journal.codec import STATUS_FIELDS, CorruptRecordError
from quire_router.journal.commands import open_arguments
from quire_router.journal.failure import encode_error
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.keys import BACKGROUND, keys
from quire_router.journal.scripts import ScriptReply
from quire_router.journal.server import to_milliseconds
from quire_router.journal.settings import MIN_RETENTION, JournalSettings
from quire_router.journal.troubles import corrupt_record_error, is_corruption, unavailable_error

log = logging.getLogger(__name__)
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
