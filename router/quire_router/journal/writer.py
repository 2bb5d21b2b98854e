"""The one task that writes to Redis. Takes from ``Pending``; nothing waits for it, and it outlives every failure."""

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire_proto.sampling import FinishReason
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router import metrics
from quire_router.journal import scripts
from quire_router.journal.codec import TOKEN_BYTES, encode_request, pack_tokens
from quire_router.journal.pending import Pending, Write
from quire_router.journal.scripts import Answer

log = logging.getLogger(__name__)

MAX_WRITES = 128  # a flush of so many holds the loop for two milliseconds or so
FIRST_DELAY, LAST_DELAY = 0.05, 5.0


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Times in seconds.

    A router holds a ``lease`` on each record it writes and renews it three times as often. A record is forgotten
    ``retention`` after it was finished, or ``running_ttl`` after its last write. ``pause`` between two flushes lets
    tokens gather, which costs a dying router at most that many seconds of tokens to be generated again.
    """

    lease: float = 15.0
    retention: float = 3600.0
    running_ttl: float = 86_400.0
    pause: float = 0.02


def keys(request_id: str) -> tuple[str, str]:
    """A request's record and its tokens; the braces put both into one slot of a cluster."""
    return f"quire:{{{request_id}}}:record", f"quire:{{{request_id}}}:tokens"


class RedisWriter:
    """Flushes what is dirty in one pipeline after the other, as fast as Redis takes them.

    A write may be repeated after a failure, because nobody knows whether Redis saw it: every script can be run twice.
    A Redis that answers may still refuse to write, so once it did, only a write that succeeded ends the outage.
    """

    def __init__(self, client: Redis, pending: Pending, settings: WriterSettings) -> None:
        self.available = False
        self._client = client
        self._pending = pending
        self._settings = settings
        self._loaded = False
        self._refusing = False
        self._delay = FIRST_DELAY
        self._next_beat = 0.0
        self._flushed = asyncio.Event()
        metrics.JOURNAL_AVAILABLE.set(0)

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

    async def _turn(self) -> None:
        if not self._loaded:
            await self._load()
        if asyncio.get_running_loop().time() >= self._next_beat:
            await self._beat()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_beat):
                await self._pending.wait()
        await self._write(self._pending.next_writes(MAX_WRITES))
        metrics.JOURNAL_PENDING.set(len(self._pending))
        self._flushed.set()
        await asyncio.sleep(self._settings.pause)

    async def _load(self) -> None:
        for script in scripts.ALL:
            await self._client.script_load(script.source)
        self._loaded = True
        self._reached()

    async def _beat(self) -> None:
        """Renews every lease, and finds out that Redis is gone also when there is nothing to write."""
        await self._client.ping()
        self._reached()
        self._pending.touch_running()
        self._next_beat = asyncio.get_running_loop().time() + self._settings.lease / 3

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
        count = 1
        if write.opens:
            self._queue_open(pipeline, write)
            count += 1
        self._queue_append(pipeline, write)
        if write.finish is not None:
            self._queue_finish(pipeline, write, *write.finish)
            count += 1
        return count

    def _queue_open(self, pipeline: Pipeline, write: Write) -> None:
        generation = write.entry.generation
        prompt = pack_tokens(generation.prompt_token_ids)
        self._evaluate(pipeline, scripts.OPEN, write, *self._terms(), encode_request(generation), prompt)

    def _queue_append(self, pipeline: Pipeline, write: Write) -> None:
        packed = pack_tokens(write.entry.deliveries.values[write.start : write.end])
        self._evaluate(pipeline, scripts.APPEND, write, *self._terms(), write.start * TOKEN_BYTES, packed)

    def _queue_finish(self, pipeline: Pipeline, write: Write, reason: FinishReason, error: str) -> None:
        text = error.encode("utf-8", "surrogatepass")
        retention = _seconds(self._settings.retention)
        self._evaluate(pipeline, scripts.FINISH, write, write.end * TOKEN_BYTES, retention, reason.value, text)

    def _terms(self) -> tuple[int, int]:
        return int(self._settings.lease * 1000), _seconds(self._settings.running_ttl)

    @staticmethod
    def _evaluate(pipeline: Pipeline, script: scripts.Script, write: Write, *arguments: str | int | bytes) -> None:
        lease = write.entry.lease
        pipeline.evalsha(script.sha, 2, *keys(lease.request_id), lease.owner, lease.epoch, *arguments)

    def _settle(self, write: Write, answers: list[Any]) -> Exception | None:
        """Takes note of what became of a write; returns what makes it worth trying again later."""
        problem = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if isinstance(problem, ResponseError) and "WRONGTYPE" in str(problem):
            metrics.JOURNAL_DROPPED.inc()
            self._pending.drop(write.entry)  # the key is somebody else's: it would fail for ever
            return None
        if problem is not None:
            return problem
        if Answer.STALE in answers:
            metrics.STALE_EPOCHS.inc()
            self._pending.drop(write.entry)
        elif Answer.LOST in answers:
            self._pending.lost(write.entry)
        else:
            self._pending.stored(write)
        return None


def _seconds(duration: float) -> int:
    return max(1, round(duration))
