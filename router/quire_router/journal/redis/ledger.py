"""The ledger in Redis: what tenants used, by the hour.

A record and the ledger are in different slots, so no script changes both. A request is noted in the ledger before its
record is opened, and again, with what it used, before that ends or is released; once Redis has confirmed that, it is
counted. Whichever router dies in between: ``RedisLedger.settle`` of another one finds the note, looks at the record,
and counts. The scripts (``usage_common.lua``) add only what is more than was counted before, and remember for
``REMEMBERED`` seconds which requests were counted to their end, longer than anybody counts them again.
"""

import logging
from collections.abc import Awaitable, Callable
from math import ceil
from time import monotonic
from typing import Any

from redis.asyncio import Redis

from quire_router.clients.redis_client import execute_each
from quire_router.core import metrics
from quire_router.core.generation import NO_USAGE, Usage
from quire_router.core.tenant_ids import owns
from quire_router.core.usage import HOUR, MAX_COUNTED_AGE, REMEMBERED, Account, UsageRow, in_order, used
from quire_router.journal.codec import (
    MAX_LEASE,
    TOKEN_BYTES,
    JournalSettings,
    decode_usage,
    is_epoch,
)
from quire_router.journal.redis.redis_connection import (
    LEDGER,
    USAGE_COUNT,
    USAGE_GONE,
    LuaScript,
    keys,
    to_milliseconds,
)

log = logging.getLogger(__name__)

GRACE = 20.0  # seconds from a note to the look at its record; with SETTLE_PERIOD less than any record is kept
EXAMINED = 64  # records that are looked at in one exchange
MAX_EXAMINED = 4_096  # records that one call of ``settle`` looks at
CLOCK_STEP = 1.0  # seconds by which Redis' clock may go back without a look at all notes
HOURS_READ = 100  # that are read in one exchange
_FIELDS = ("epoch", "reason", "usage", "lease_expires", "told", "ended")
_COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
Evaluate = Callable[..., Awaitable[Any]]


def expect_arguments(
    request_id: str, account: Account, usage: Usage | None, *, again: bool = False
) -> tuple[str | int, ...]:
    """The keys and arguments of ``usage_expect.lua``; ``usage`` when the request is about to end or to be released, and
    ``again`` for one that has the id of another, which was counted, and whose record is gone.
    """
    counts = ("", "", "") if usage is None else _counts(usage)
    return *LEDGER, request_id, f"{account.tenant} {account.model}", *counts, "again" if again else ""


def count_arguments(request_id: str, usage: Usage, settings: JournalSettings, *, ended: bool) -> tuple[str | int, ...]:
    """The keys and arguments of ``usage_count.lua``."""
    times = int(REMEMBERED * 1000), max(HOUR, int(settings.usage_retention))
    return *LEDGER, request_id, int(ended), *_counts(usage), *times


def _counts(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


class RedisLedger:
    """Reads the ledger, and settles what routers left that died. ``evaluate`` runs a script. Raises what that and
    ``client`` raise.
    """

    def __init__(self, client: Redis, settings: JournalSettings, evaluate: Evaluate) -> None:
        self._client = client
        self._settings = settings
        self._evaluate = evaluate
        self._clock_offset: float | None = None  # of Redis' clock (ms) to this process' monotonic one

    async def settle(self, grace: float = GRACE) -> None:
        """Counts requests that were noted more than ``grace`` seconds ago and do not run: to their end if they have
        ended, else as far as their answers were delivered. Those that run are looked at again later.
        """
        examined = 0
        await self._correct_future_notes()
        while examined < MAX_EXAMINED:
            now = to_milliseconds(await self._client.time())
            until = now - int(grace * 1000)
            due: Any = await self._client.zrangebyscore(LEDGER[0], "-inf", until, start=0, num=EXAMINED)
            if due:
                await self._examine([request_id.decode(errors="replace") for request_id in due], now)
            if len(due) < EXAMINED:
                return
            examined += len(due)

    async def _correct_future_notes(self) -> None:
        """Has notes looked at that were written before Redis' clock went back: they would wait until it has caught up,
        and their records might be gone. Looks for them after each step, and once at first.
        """
        now = to_milliseconds(await self._client.time())
        offset, before = now - monotonic() * 1000, self._clock_offset
        self._clock_offset = offset
        if before is not None and offset > before - CLOCK_STEP * 1000:
            return
        ahead: Any = await self._client.zrangebyscore(LEDGER[0], f"({now}", "+inf")
        for start in range(0, len(ahead), EXAMINED):
            part = ahead[start : start + EXAMINED]
            states: Any = await self._client.hmget(LEDGER[1], part)
            notes = [each for each, state in zip(part, states, strict=True) if (state or b"").startswith(b"here ")]
            if notes:  # those of the other states are to be looked at hours later
                await self._client.zadd(LEDGER[0], dict.fromkeys(notes, now), xx=True, lt=True)

    async def settle_one(self, request_id: str, *, running: bool = False) -> None:
        """Counts what this request used, if it has a record, which is about to be ended or deleted. If it runs, only
        with ``running``: what it has used so far.
        """
        await self._examine([request_id], to_milliseconds(await self._client.time()), running=running, gone=False)

    async def _examine(self, request_ids: list[str], now: int, *, running: bool = False, gone: bool = True) -> None:
        """Counts what these requests used, of those that run at ``now``, Redis' time in ms, only with ``running``, and
        of those without a record only with ``gone``.
        """
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            record, _ = keys(request_id)
            pipeline.hmget(record, _FIELDS)
            pipeline.hstrlen(record, "prompt")
        answers = await execute_each(pipeline)
        leased = []
        for request_id, fields, prompt in zip(request_ids, answers[::2], answers[1::2], strict=True):
            if isinstance(fields, Exception) or isinstance(prompt, Exception) or not is_epoch(fields[0] or b""):
                if gone:
                    await self._settle_gone(request_id)
            elif fields[1] is None and _is_leased(fields, now) and not running:
                leased.append(request_id)
            else:
                await self._settle_record(request_id, fields, prompt, now)
        if leased:
            await self._client.zadd(LEDGER[0], dict.fromkeys(leased, now), xx=True)

    async def _settle_record(self, request_id: str, fields: list[bytes | None], prompt: int, now: int) -> None:
        _, reason, usage, _, told, ended = fields
        if reason is not None and ended and ended.isdigit() and now - int(ended) > MAX_COUNTED_AGE * 1000:
            await self._count(request_id, NO_USAGE, ended=True)
            _log_lost(request_id, "it ended long ago")
            return
        try:
            total = used(decode_usage(usage or b""), prompt // TOKEN_BYTES, int(told or 0))
        except (TypeError, ValueError):
            total = NO_USAGE  # the record is damaged, which ends its request with an error
        await self._count(request_id, total, ended=reason is not None)

    async def _settle_gone(self, request_id: str) -> None:
        """The record is not there, or no record: the request has used what its router noted before it wrote the end."""
        state: Any = await self._client.hget(LEDGER[1], request_id)
        words = (state or b"").split(b" ", 8)
        noted = Usage(int(words[5]), int(words[7]), int(words[6])) if len(words) == 9 else NO_USAGE
        if noted != NO_USAGE:
            await self._count(request_id, noted, ended=True)
        elif not await self._run(USAGE_GONE, *LEDGER, request_id, int(REMEMBERED * 1000)):
            _log_lost(request_id, "its record is gone")

    async def _count(self, request_id: str, usage: Usage, *, ended: bool) -> None:
        await self._run(USAGE_COUNT, *count_arguments(request_id, usage, self._settings, ended=ended))

    async def _run(self, script: LuaScript, *arguments: str | int) -> Any:
        return await self._evaluate(script, len(LEDGER), *arguments)

    async def rows(self, since: float, until: float, tenant: str | None) -> list[UsageRow]:
        """Rows of the hours that begin from ``since`` until before ``until``, of one tenant or of all, in order."""
        return await read_usage(self._client, since, until, tenant, self._settings.usage_retention)


async def read_usage(client: Redis, since: float, until: float, tenant: str | None, retention: float) -> list[UsageRow]:
    """As ``RedisLedger.rows``; hours that are older than ``retention`` seconds are not there."""
    now = to_milliseconds(await client.time()) / 1000
    first = ceil(max(since, now - retention - HOUR) / HOUR) * HOUR
    hours = range(first, ceil(min(until, now + HOUR)), HOUR)
    rows: list[UsageRow] = []
    for start in range(0, len(hours), HOURS_READ):
        part = hours[start : start + HOURS_READ]
        pipeline = client.pipeline(transaction=False)
        for hour in part:
            pipeline.hgetall(f"{LEDGER[3]}{hour}")
        for hour, counts in zip(part, await pipeline.execute(), strict=True):
            rows += rows_of(hour, counts)
    return in_order(row for row in rows if tenant is None or owns(tenant, row.tenant))


def rows_of(hour: int, counts: dict[bytes, bytes]) -> list[UsageRow]:
    """The rows of an hour's hash, whose fields are a column, a tenant and a model. Columns of newer routers are none of
    these.
    """
    found: dict[tuple[str, str], dict[str, int]] = {}
    for field, count in counts.items():
        column, _, account = field.decode(errors="replace").partition(" ")
        tenant, separator, model = account.partition(" ")
        if column in _COLUMNS and separator:
            found.setdefault((tenant, model), dict.fromkeys(_COLUMNS, 0))[column] = int(count)
    return [UsageRow(hour, tenant, model, *columns.values()) for (tenant, model), columns in found.items()]


def _is_leased(fields: list[bytes | None], now: int) -> bool:
    expires = fields[3] or b"0"
    return expires.isdigit() and 0 < int(expires) - now <= MAX_LEASE


def _log_lost(request_id: str, why: str) -> None:
    log.warning("the usage of request %s may not have been counted: %s", request_id, why)
    metrics.USAGE_LOST.inc()
