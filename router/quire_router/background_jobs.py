"""``BackgroundJobs``: what a router does beside its requests, at intervals. It claims orphaned requests, settles the
usage of dead routers' requests, sweeps the prefix index, flushes token metrics and gives memory back.
"""

import asyncio
import ctypes
import gc
import logging
import random
import resource
from contextlib import suppress
from pathlib import Path

from quire_proto.errors import QuireError
from quire_proto.supervise import SupervisedTask

from quire_router.core.metrics import FLUSH_PERIOD, flush_token_metrics
from quire_router.core.retry import supervise
from quire_router.journal.base import Journal
from quire_router.placement.prefix_index import PrefixIndex
from quire_router.requests.runner import RequestRunner

log = logging.getLogger(__name__)

ADOPTION_PERIOD = 1.0  # seconds
SETTLE_PERIOD = 20.0  # seconds at most; with the ledger's ``GRACE`` less than the records of dead routers are kept
SWEEP_PERIOD, SWEEP_PAUSE = 1.0, 0.02  # seconds between sweeps, and between parts of one
SWEEP_BLOCKS = 2_000  # a millisecond or so of work at once
TRIM_PERIOD, TRIM_GROWTH = 1.0, 64 << 20  # seconds between checks, and the growth in bytes that is worth a trim
TRIM_MAX_PERIOD = 10.0  # seconds at most between two attempts while the memory seems to be in use
_PAGE = resource.getpagesize()


class BackgroundJobs:
    """What runs at intervals, from ``start`` to ``stop``; a run that fails is tried again the next time."""

    def __init__(self, runner: RequestRunner, index: PrefixIndex, journal: Journal) -> None:
        self._runner = runner
        self._index = index
        self._journal = journal
        self._tasks: list[SupervisedTask] = []

    def start(self) -> None:
        """Starts the tasks; never waits."""
        self._tasks = [
            supervise("orphans", self._claim_orphans),
            supervise("prefix index", self._sweep_index),
            supervise("usage", self._settle_usage),
            supervise("tally", _flush_token_metrics),
            supervise("memory", _trim_memory),
        ]

    async def stop(self) -> None:
        """Ends the tasks."""
        await asyncio.gather(*(task.stop() for task in self._tasks))

    async def _claim_orphans(self) -> None:
        while True:
            await asyncio.sleep(ADOPTION_PERIOD)
            try:
                adopted = await self._runner.claim_orphans()
            except QuireError:
                continue  # request state cannot be read now, which the journal logs
            except Exception:  # one record that cannot be claimed is no reason to restart a router
                log.exception("looking for orphans failed")
                continue
            if adopted:
                log.info("resumed %d background requests of routers that are gone", adopted)

    async def _settle_usage(self) -> None:
        """At random times, so that routers do not do the same at once."""
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.0) * SETTLE_PERIOD)  # noqa: S311 - no secret
            with suppress(QuireError):  # the journal is away, and logs that
                await self._journal.settle_usage()

    async def _sweep_index(self) -> None:
        """Seldom while there is nothing to sweep, so that an idle router is not woken for it."""
        more = False
        while True:
            await asyncio.sleep(SWEEP_PAUSE if more else SWEEP_PERIOD)
            more = self._index.sweep(SWEEP_BLOCKS)


async def _flush_token_metrics() -> None:
    while True:
        await asyncio.sleep(FLUSH_PERIOD)
        flush_token_metrics()


async def _trim_memory() -> None:
    """Gives free memory back to the system whenever the process has grown. Refused gRPC calls are garbage in cycles, of
    which Python sees a few objects and not the megabyte of headers behind each, and the C library keeps what its
    threads have freed in many small parts. So memory that hostile headers took would stay, and add up to gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # only glibc has it
        return
    least = after = _resident_memory()
    period, idle = TRIM_PERIOD, 0.0
    while True:
        await asyncio.sleep(TRIM_PERIOD)
        idle += TRIM_PERIOD
        before = _resident_memory()
        least = min(least, before)
        if before > after + TRIM_GROWTH or (before > least + TRIM_GROWTH and idle >= period):
            gc.collect(1)
            await asyncio.to_thread(trim, 0)
            after, idle = _resident_memory(), 0.0
            helped = before - after > TRIM_GROWTH / 4
            period = TRIM_PERIOD if helped else min(2 * period, TRIM_MAX_PERIOD)


def _resident_memory() -> int:
    """Resident memory of the process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0
