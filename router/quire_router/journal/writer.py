"""The one task that writes to Redis. Takes from ``Pending``; nothing waits for it, and it outlives every failure."""

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router import metrics
from quire_router.journal import scripts
from quire_router.journal.base import Owners
from quire_router.journal.codec import TOKEN_BYTES, encode_request, encode_usage, pack_tokens
from quire_router.journal.pending import End, Entry, Pending, Write
from quire_router.journal.scripts import Answer
from quire_router.journal.server import RedisServer

log = logging.getLogger(__name__)

MAX_WRITES = 128  # a flush of so many holds the loop for two milliseconds or so
PAUSE_A_WRITE = 0.0004  # seconds; a write takes about the twentieth part of that here
FIRST_DELAY, LAST_DELAY = 0.05, 1.0
BEATS_A_LEASE = 4
BACKGROUND = "quire:background"
"""The index of background requests that have not ended, by when their leases expire (ms, by Redis' clock)."""


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Times in seconds.

    A router holds a ``lease`` on each record it writes and renews it four times as often, so that a slow beat does not
    lose it. A record is forgotten ``retention`` after it was finished or, if it is no background request, released, or
    ``running_ttl`` after its last write. A ``pause`` between two flushes lets tokens gather, and the more streams run,
    the longer: half a millisecond or so for each. A router that dies costs at most that many seconds of tokens, which
    are generated again. For ``settle`` after Redis was away, routers may still have to write what they hold.
    """

    lease: float = 4.0
    settle: float = 4.0
    retention: float = 3600.0
    running_ttl: float = 86_400.0
    pause: float = 0.02

    @property
    def lease_ms(self) -> int:
        """As Redis takes it."""
        return int(self.lease * 1000)

    @property
    def retention_s(self) -> int:
        """As Redis takes it."""
        return max(1, round(self.retention))

    @property
    def running_s(self) -> int:
        """As Redis takes it."""
        return max(1, round(self.running_ttl))


_SIGNS_OF_DAMAGE = ("WRONGTYPE", "DAMAGED", "string exceeds maximum allowed size", "attempt to")


def keys(request_id: str) -> tuple[str, str]:
    """A request's record and its tokens; the braces put both into one slot of a cluster."""
    return f"quire:{{{request_id}}}:record", f"quire:{{{request_id}}}:tokens"


class RedisWriter:
    """Flushes what is dirty in one pipeline after the other, as fast as Redis takes them.

    A write may be repeated after a failure, because nobody knows whether Redis saw it: every script can be run twice.
    A Redis that answers may still refuse to write, so once it did, only a write that succeeded ends the outage.
    """

    def __init__(self, client: Redis, server: RedisServer, pending: Pending, settings: WriterSettings) -> None:
        self.available = False
        self._client = client
        self._server = server
        self._pending = pending
        self._settings = settings
        self._owners: Owners | None = None
        self._loaded = False
        self._refusing = False
        self._delay = FIRST_DELAY
        self._next_beat = 0.0
        self._flushed = asyncio.Event()
        metrics.JOURNAL_AVAILABLE.set(0)

    def report_to(self, owners: Owners) -> None:
        """Who hears of cancelled and taken records."""
        self._owners = owners

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._turn()
            except NoScriptError:
                self._loaded = False  # Redis was restarted, or told to forget its scripts
                await asyncio.sleep(self._settings.pause)
            except ResponseError as error:
                self._refusing = True  # read only, out of memory, not allowed: it is there and knows the scripts
                await self._failed(error)
            except (RedisError, OSError, TimeoutError) as error:
                self._loaded = False
                await self._failed(error)
            except Exception as error:
                log.exception("the journal's writer failed")
                await self._failed(error)

    async def flush(self) -> None:
        """Waits until nothing is dirty."""
        while self._pending:
            self._flushed.clear()
            await self._flushed.wait()

    async def written(self, entry: Entry) -> None:
        """Waits until an entry that was finished or released is written, or given up."""
        while self._pending.has(entry):
            self._flushed.clear()
            await self._flushed.wait()

    async def _turn(self) -> None:
        if not self._loaded:
            await self._load()
        if asyncio.get_running_loop().time() >= self._next_beat:
            await self._beat()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_beat):
                await self._pending.wait()
        writes = self._pending.next_writes(MAX_WRITES)
        await self._write(writes)
        metrics.JOURNAL_PENDING.set(len(self._pending))
        self._flushed.set()
        await asyncio.sleep(max(self._settings.pause, PAUSE_A_WRITE * len(writes)))

    async def _load(self) -> None:
        for script in scripts.ALL:
            await self._client.script_load(script.source)
        await self._server.look()
        self._loaded = True
        self._reached()

    async def _beat(self) -> None:
        """Renews every lease, and finds out that Redis is gone also when there is nothing to write."""
        with self._server.exchange():
            await self._client.ping()
        self._reached()
        now, interval = asyncio.get_running_loop().time(), self._settings.lease / BEATS_A_LEASE
        self._pending.touch_older(now - interval / 2)
        self._next_beat = now + interval

    def _reached(self) -> None:
        if not self._refusing:
            self._succeeded()

    def _succeeded(self) -> None:
        if not self.available:
            log.info("the journal is written to Redis")
        self.available, self._refusing, self._delay = True, False, FIRST_DELAY
        metrics.JOURNAL_AVAILABLE.set(1)

    async def _failed(self, error: Exception) -> None:
        if self.available or self._delay == FIRST_DELAY:
            # The type says enough; a message might repeat a part of what was written.
            log.warning("the journal cannot be written to Redis (%s); requests go on", type(error).__name__)
        self.available = False
        self._server.was_away()
        metrics.JOURNAL_AVAILABLE.set(0)
        metrics.JOURNAL_PENDING.set(len(self._pending))
        await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, hides nothing
        self._delay = min(2 * self._delay, LAST_DELAY)

    # One flush

    async def _write(self, writes: list[Write]) -> None:
        if not writes:
            return
        pipeline = self._client.pipeline(transaction=False)
        counts = [self._queue(pipeline, write) for write in writes]
        answers = iter(await pipeline.execute(raise_on_error=False))
        problems = [
            self._settle(write, list(islice(answers, count))) for write, count in zip(writes, counts, strict=True)
        ]
        for problem in filter(None, problems):
            raise problem
        self._succeeded()

    def _queue(self, pipeline: Pipeline, write: Write) -> int:
        """Adds the write's commands; returns how many."""
        before = len(pipeline)
        if write.opens:
            self._queue_open(pipeline, write.entry)
        self._queue_append(pipeline, write)
        if write.end is not None:
            self._queue_finish(pipeline, write, write.end)
        if write.releases:
            self._queue_release(pipeline, write.entry)
        if write.entry.generation.background:
            self._queue_index(pipeline, write)
        return len(pipeline) - before

    def _queue_open(self, pipeline: Pipeline, entry: Entry) -> None:
        prompt = pack_tokens(entry.generation.prompt_token_ids)
        self._evaluate(pipeline, scripts.OPEN, entry, *self._terms(), encode_request(entry.generation), prompt)

    def _queue_append(self, pipeline: Pipeline, write: Write) -> None:
        packed = pack_tokens(write.entry.deliveries.values[write.start : write.stop])
        self._evaluate(pipeline, scripts.APPEND, write.entry, *self._terms(), write.start * TOKEN_BYTES, packed)

    def _queue_finish(self, pipeline: Pipeline, write: Write, end: End) -> None:
        retention, text = self._settings.retention_s, end.error.encode("utf-8", "surrogatepass")
        terms = retention, end.reason.value, text, encode_usage(end.usage), write.stop * TOKEN_BYTES
        self._evaluate(pipeline, scripts.FINISH, write.entry, *terms)

    def _queue_release(self, pipeline: Pipeline, entry: Entry) -> None:
        settings = self._settings
        kept = settings.running_s if entry.generation.background else settings.retention_s
        self._evaluate(pipeline, scripts.RELEASE, entry, kept, settings.retention_s)

    def _queue_index(self, pipeline: Pipeline, write: Write) -> None:
        """Notes a background request in the index. It is in a slot of its own, so it can be behind or wrong:
        ``orphans`` looks at each record.
        """
        request_id, (lease, ttl) = write.entry.lease.request_id, self._terms()
        if write.end is not None:
            pipeline.zrem(BACKGROUND, request_id)
        else:
            pipeline.evalsha(scripts.INDEX.sha, 1, BACKGROUND, request_id, 0 if write.releases else lease, ttl)

    def _terms(self) -> tuple[int, int]:
        return self._settings.lease_ms, self._settings.running_s

    @staticmethod
    def _evaluate(pipeline: Pipeline, script: scripts.Script, entry: Entry, *arguments: str | int | bytes) -> None:
        lease = entry.lease
        pipeline.evalsha(script.sha, 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments)

    def _settle(self, write: Write, answers: list[Any]) -> Exception | None:
        """Takes note of what became of a write; returns what makes it worth trying again later."""
        problem = next((answer for answer in answers if isinstance(answer, Exception) and not is_damage(answer)), None)
        if problem is not None:
            return problem
        if write.entry.generation.background:
            answers.pop()  # the index' own
        if any(isinstance(answer, Exception) for answer in answers):
            self._give_up(write.entry)
        elif Answer.STALE in answers:
            self._lose(write.entry)
        elif Answer.LOST in answers:
            self._pending.lost(write.entry)
        else:
            self._pending.stored(write, asyncio.get_running_loop().time())
            if Answer.CANCELLED in answers:
                self._cancel(write.entry)
        return None

    def _give_up(self, entry: Entry) -> None:
        """The keys are damaged or something else's: it would fail for ever."""
        if self._pending.has(entry):
            log.error("the record of request %s is damaged and is not written any more", entry.lease.request_id)
            metrics.JOURNAL_DROPPED.inc()
            self._pending.drop(entry)

    def _lose(self, entry: Entry) -> None:
        metrics.STALE_EPOCHS.inc()
        told = entry.live and self._pending.has(entry)
        self._pending.drop(entry)
        if told and self._owners is not None:
            self._owners.on_taken(entry.lease.request_id)

    def _cancel(self, entry: Entry) -> None:
        told = entry.live and self._pending.has(entry) and not entry.cancelled
        entry.cancelled = True
        if told and self._owners is not None:
            self._owners.on_cancelled(entry.lease.request_id)


def is_damage(error: Exception) -> bool:
    """Whether an error is of one record's keys, which it will be again, rather than of Redis, which may pass."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _SIGNS_OF_DAMAGE)
