"""The one task that writes to Redis. Takes from ``Pending``; nothing waits for it, and it outlives every failure."""

import asyncio
import logging
import random
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from quire_router import metrics
from quire_router.journal import scripts
from quire_router.journal.base import Owners
from quire_router.journal.commands import Commands, is_listed, is_unlisted, unlist
from quire_router.journal.pending import Entry, Pending, Write
from quire_router.journal.scripts import Answer
from quire_router.journal.server import RedisServer
from quire_router.journal.settings import JournalSettings
from quire_router.journal.troubles import is_damage
from quire_router.journal.wire import Wire

log = logging.getLogger(__name__)

MAX_WRITES = 128  # a flush of so many holds the loop for a millisecond or so
PAUSE_A_WRITE = 0.0004  # seconds; a write takes about the thirtieth part of that here
FIRST_DELAY, LAST_DELAY = 0.05, 1.0
BEATS_A_LEASE = 4


class RedisWriter:
    """Flushes what is dirty in one exchange after the other.

    A write may be repeated after a failure, because nobody knows whether Redis saw it: every script can be run twice.
    A Redis that answers may still refuse to write, so once it did, only a write that succeeded ends the outage.
    """

    def __init__(
        self, client: Redis, wire: Wire, server: RedisServer, pending: Pending, settings: JournalSettings
    ) -> None:
        self.available = False
        self._client = client
        self._wire = wire
        self._server = server
        self._pending = pending
        self._settings = settings
        self._commands = Commands(settings)
        self._owners: Owners | None = None
        self._loaded = False
        self._refusing = False
        self._outage_logged = False
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
                # Redis was restarted, or told to forget its scripts, maybe again before they could be loaded and used.
                self._commands.by_source = True
                await asyncio.sleep(self._settings.pause)
            except ResponseError as error:  # read only, out of memory, not allowed: it is there and knows the scripts
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
        self._loaded = True

    async def _beat(self) -> None:
        """Renews every lease, and finds out that Redis is gone, or refuses writes, also when there is nothing to
        write.
        """
        with self._server.exchange(writes=True):
            refusal = await self._server.look()
        if refusal is not None:
            raise refusal
        if not self._refusing or not self._pending:  # what it refused may be more than what was tried here
            self._succeeded()
        now, interval = asyncio.get_running_loop().time(), self._settings.lease / BEATS_A_LEASE
        self._pending.touch_older(now - interval / 2)
        self._next_beat = now + interval

    def _succeeded(self) -> None:
        if not self.available:
            log.info("the journal is written to Redis")
        self.available, self._refusing, self._delay, self._outage_logged = True, False, FIRST_DELAY, False
        metrics.JOURNAL_AVAILABLE.set(1)

    def note_failure(self, error: Exception) -> None:
        """Redis did not take a write, of whatever task: it counts as away until it takes one."""
        if not self._outage_logged:
            # The type says enough; a message might repeat a part of what was written.
            log.warning("the journal cannot be written to Redis (%s); requests go on", type(error).__name__)
        self.available, self._outage_logged = False, True
        self._refusing = self._refusing or isinstance(error, ResponseError)
        self._server.was_away()
        metrics.JOURNAL_AVAILABLE.set(0)
        metrics.JOURNAL_PENDING.set(len(self._pending))

    async def _failed(self, error: Exception) -> None:
        self.note_failure(error)
        await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, hides nothing
        self._delay = min(2 * self._delay, LAST_DELAY)

    # One flush

    async def _write(self, writes: list[Write]) -> None:
        if not writes:
            return
        commands = [self._commands.of(write) for write in writes]
        with self._server.exchange(writes=True):
            answers = iter(await self._wire.exchange(chain.from_iterable(commands)))
        now = asyncio.get_running_loop().time()
        problems, lasts = [], []
        for write, made in zip(writes, commands, strict=True):
            *_, last = own = list(islice(answers, len(made)))
            problems.append(self._settle(write, own, now))
            lasts.append(last)
        self._commands.by_source = False  # whatever was wanted is known by its hash again
        ended = [write for write, last in zip(writes, lasts, strict=True) if is_unlisted(write) and last == Answer.DONE]
        if ended:
            await self._wire.exchange([unlist(ended)])
        for problem in filter(None, problems):
            raise problem
        self._succeeded()

    def _settle(self, write: Write, answers: list[Any], now: float) -> Exception | None:
        """Takes note of what became of a write; returns what makes it worth trying again later."""
        if answers == [Answer.DONE]:  # as nearly all are
            self._pending.stored(write, now)
            return None
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        problem = next((error for error in errors if not is_damage(error)), None)
        if problem is None:
            self._take_note(write, answers[1:] if is_listed(write) else answers, now)
        return problem

    def _take_note(self, write: Write, answers: list[Any], now: float) -> None:
        if any(isinstance(answer, Exception) for answer in answers):
            self._give_up(write.entry)
        elif Answer.STALE in answers:
            self._lose(write.entry)
        elif Answer.LOST in answers:
            self._pending.lost(write.entry)
        else:
            self._pending.stored(write, now)
            if Answer.CANCELLED in answers:
                self._cancel(write.entry)

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
