"""What a journal reads from Redis, and changes there at once: calls that wait for the reply.

``RedisStore`` has the calls; ``OrphanFinder`` looks for background requests without a lease.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from typing import Any, TypeVar

from quire_proto.errors import internal
from quire_proto.sampling import FinishReason
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router.clients.redis_client import execute_each
from quire_router.core.generation import GenerationRequest
from quire_router.core.usage import Account, UsageRow
from quire_router.journal.base import MAX_ORPHANS, Lease, encode_error
from quire_router.journal.codec import (
    MAX_LEASE,
    STATUS_FIELDS,
    CorruptRecordError,
    JournalSettings,
    encode_request,
    is_epoch,
)
from quire_router.journal.follower import RawRecordUpdate
from quire_router.journal.record_store import StoredRecord
from quire_router.journal.redis.ledger import RedisLedger, expect_arguments
from quire_router.journal.redis.redis_connection import (
    BACKGROUND,
    CANCEL,
    CLAIM,
    DELETE,
    FINISH,
    INDEX,
    LEDGER,
    OPEN,
    USAGE_EXPECT,
    LuaScript,
    RedisHealth,
    ScriptReply,
    is_corruption,
    keys,
    to_milliseconds,
    tombstone,
)
from quire_router.journal.redis.writer import open_arguments

log = logging.getLogger(__name__)

MAX_EXAMINED = 4 * MAX_ORPHANS
TOMBSTONE_TTL = 3600  # seconds: a router that was frozen for longer may write a record again that was deleted
T = TypeVar("T")


class RedisStore:
    """See ``RecordStore``. Each call is one exchange, which the client repeats when its connection breaks: all of them
    are idempotent. ``health`` gets to know how long they take.
    """

    errors: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)

    def __init__(self, client: Redis, settings: JournalSettings, health: RedisHealth) -> None:
        self._client = client
        self._settings = settings
        self._health = health
        self._orphans = OrphanFinder(client)
        self._ledger = RedisLedger(client, settings, self._evaluate)

    async def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """Creates the record with this lease; False if there is one of another request or owner. A background request
        enters the index first, so that others find it even if this router dies in between. Each is noted in the ledger
        first, for the same reason.
        """
        terms = lease.owner, lease.epoch, *open_arguments(generation, self._settings)
        if generation.background:
            await self._index(lease.request_id)
        account = Account.of(generation)
        noted = await self._evaluate(USAGE_EXPECT, len(LEDGER), *expect_arguments(lease.request_id, account, None))
        names = *keys(lease.request_id), tombstone(lease.request_id)
        reply = await self._evaluate(OPEN, len(names), *names, *terms)
        opened = bool(reply == ScriptReply.DONE)
        if opened and not noted:  # its key was used before, for a request that was deleted or has expired
            note = expect_arguments(lease.request_id, account, None, again=True)
            await self._evaluate(USAGE_EXPECT, len(LEDGER), *note)
        return opened

    async def claim(self, request_id: str, owner: str, name: str) -> StoredRecord | None:
        """Takes the lease on a record that has none; None if it cannot. ``name`` is the claim's own, so it can be
        repeated.
        """
        terms = self._settings.lease_ms, self._settings.running_ttl_s, self._settings.retention_s
        reply = await self._run_on_record(CLAIM, request_id, owner, name, *terms)
        if reply is None:
            return None
        pairs = iter(reply[0])
        return dict(zip(pairs, pairs, strict=True)), reply[1], int(reply[2])

    async def fail_corrupt(self, lease: Lease) -> None:
        """Ends a record that cannot be read."""
        log.error("the record of request %s is damaged", lease.request_id)
        terms = lease.owner, lease.epoch, self._settings.retention_s
        await self._run_on_record(
            FINISH, lease.request_id, *terms, FinishReason.ERROR.value, encode_error(internal()), 0, -1
        )

    async def cancel(self, request_id: str) -> bool:
        """Ends the record, or marks it as cancelled if it is leased; False if there is none that has not ended."""
        await self._call(lambda: self._ledger.settle_one(request_id))
        return bool(await self._run_on_record(CANCEL, request_id, self._settings.retention_s))

    async def delete(self, request_id: str, buffered: GenerationRequest | None) -> bool:
        """See ``RecordStore``. For ``TOMBSTONE_TTL`` seconds no router can write the record again."""
        await self._call(lambda: self._ledger.settle_one(request_id, running=True))
        request = b"" if buffered is None else encode_request(buffered)
        digest = sha1(request, usedforsecurity=False).hexdigest() if request else ""
        names = *keys(request_id), tombstone(request_id)
        return bool(await self._evaluate(DELETE, len(names), *names, TOMBSTONE_TTL, digest))

    async def usage(self, since: float, until: float, tenant: str | None) -> list[UsageRow]:
        """See ``Journal``."""
        return await self._call(lambda: self._ledger.rows(since, until, tenant))

    async def settle_usage(self) -> None:
        """See ``Journal``."""
        await self._call(self._ledger.settle)

    async def read(self, request_id: str) -> StoredRecord | None:
        """The record as it is; None if there is none."""
        record, tokens = keys(request_id)

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hgetall(record)
            pipeline.get(tokens)
            pipeline.time()
            return await pipeline.execute()

        fields, packed, time = await self._tracked(exchange)
        return (fields, packed or b"", to_milliseconds(time)) if fields else None

    async def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """Of each record its ``STATUS_FIELDS``, the bytes of its prompt, and Redis' time in ms."""

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            for record, _ in map(keys, request_ids):
                pipeline.hmget(record, STATUS_FIELDS)
                pipeline.hstrlen(record, "prompt")
            return await pipeline.execute()

        time, *answers = await self._tracked(exchange)
        now = to_milliseconds(time)
        found = [_present_fields(STATUS_FIELDS, values) for values in answers[::2]]
        return [(fields, length, now) for fields, length in zip(found, answers[1::2], strict=True)]

    async def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """What is new in the record."""
        record, tokens = keys(request_id)

        async def exchange() -> Any:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hmget(record, names)
            pipeline.strlen(tokens)
            pipeline.getrange(tokens, offset, -1)
            pipeline.time()
            return await pipeline.execute()

        values, length, packed, time = await self._tracked(exchange)
        return RawRecordUpdate(_present_fields(names, values), length, packed, to_milliseconds(time))

    async def orphans(self) -> list[str]:
        """See ``Journal``."""
        return await self._call(self._orphans.find)

    async def is_settling(self, request_id: str) -> bool:
        """Whether a record that is missing may yet be written: see ``RedisHealth``. One that was deleted may not."""
        with self._health.track_exchange(writes=True):
            await self._call(self._health.check)
        if not self._health.is_settling:
            return False
        return not await self._call(lambda: self._client.exists(tombstone(request_id)))

    def abandon(self, lease: Lease) -> None:
        """Does nothing: the lease expires."""

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _index(self, request_id: str) -> None:
        terms = self._settings.lease_ms, self._settings.running_ttl_s
        await self._evaluate(INDEX, 1, BACKGROUND, request_id, *terms)

    async def _run_on_record(self, script: LuaScript, request_id: str, *arguments: str | int | bytes) -> Any:
        return await self._evaluate(script, 2, *keys(request_id), *arguments)

    async def _evaluate(self, script: LuaScript, number_of_keys: int, *arguments: str | int | bytes) -> Any:
        async def exchange() -> Any:
            try:
                return await self._client.evalsha(script.sha, number_of_keys, *arguments)
            except NoScriptError:
                return await self._client.eval(script.source, number_of_keys, *arguments)

        return await self._call(exchange)

    async def _tracked(self, exchange: Callable[[], Awaitable[T]]) -> T:
        """The reply to a read."""
        with self._health.track_exchange():
            return await self._call(exchange)

    async def _call(self, exchange: Callable[[], Awaitable[T]]) -> T:
        """The reply."""
        try:
            return await exchange()
        except ResponseError as error:
            if is_corruption(error):
                raise CorruptRecordError("the keys are not a record's") from None
            raise


def _present_fields(names: Sequence[str], values: Sequence[bytes | None]) -> dict[bytes, bytes]:
    """The fields that have a value."""
    return {name.encode(): value for name, value in zip(names, values, strict=True) if value is not None}


class OrphanFinder:
    """Finds background requests without a lease. Changes nothing but their index, which may be out of date.

    Each search begins where the last one ended, and after the last with the first again: requests that no router
    claims, because their models run elsewhere or they fail again and again, delay the others by a round at most.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._start = 0

    async def find(self) -> list[str]:
        """At most 16 of them. Removes from the index what has ended. Raises what the client raises."""
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
        return dict(zip(names, await execute_each(pipeline), strict=True))


def _has_ended(state: Any) -> bool:
    """Whether a record is gone, so damaged that it can never be claimed, or has a reason why it ended."""
    return isinstance(state, Exception) or not is_epoch(state[0] or b"") or state[1] is not None


def _is_free(state: Any, now: int) -> bool:
    """Whether a record has neither ended nor a lease."""
    if _has_ended(state):
        return False
    expires = state[2] or b"0"
    return not expires.isdigit() or not 0 < int(expires) - now <= MAX_LEASE
