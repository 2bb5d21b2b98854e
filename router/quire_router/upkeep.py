"""What a router does beside its requests, again and again: looks for orphans, tidies the index, counts tokens, gives
memory back.
"""

import asyncio
import ctypes
import gc
import logging
import resource
from pathlib import Path

from quire_proto.errors import QuireError

from quire_router import tally
from quire_router.lifecycle import RequestRunner
from quire_router.placement.index import PrefixIndex
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger("quire.router")
ADOPTION_PERIOD = 1.0  # seconds
SWEEP_PERIOD, SWEEP_PAUSE = 1.0, 0.02  # seconds between looks, and between parts while there is something to sweep
SWEEP_BLOCKS = 2_000  # a millisecond or so of work at once
TRIM_PERIOD, TRIM_GROWTH = 1.0, 64 << 20  # seconds between looks, and the bytes more that are worth it
TRIM_PATIENCE = 10.0  # seconds at most between one attempt and the next, where the memory seems to be in use
_PAGE = resource.getpagesize()


class Upkeep:
    """From ``start`` to ``stop``; what fails is tried again the next time."""

    def __init__(self, lifecycle: RequestRunner, index: PrefixIndex) -> None:
        self._lifecycle = lifecycle
        self._index = index
        self._tasks: list[SupervisedTask] = []

    def start(self) -> None:
        """Begins; never waits."""
        self._tasks = [
            supervise("orphans", self._adopt),
            supervise("prefix index", self._sweep),
            supervise("tally", _tally),
            supervise("memory", _trim),
        ]

    async def stop(self) -> None:
        """Ends what was begun."""
        await asyncio.gather(*(task.stop() for task in self._tasks))

    async def _adopt(self) -> None:
        while True:
            await asyncio.sleep(ADOPTION_PERIOD)
            try:
                adopted = await self._lifecycle.claim_orphans()
            except QuireError:
                continue  # request state cannot be read now, which the journal tells itself
            except Exception:  # one record that cannot be taken up is no reason to start a router again
                log.exception("looking for orphans failed")
                continue
            if adopted:
                log.info("took up %d background requests that their routers had left", adopted)

    async def _sweep(self) -> None:
        """Rarely while there is nothing to do, so that an idle router is not woken for it."""
        left = False
        while True:
            await asyncio.sleep(SWEEP_PAUSE if left else SWEEP_PERIOD)
            left = self._index.sweep(SWEEP_BLOCKS)


async def _tally() -> None:
    while True:
        await asyncio.sleep(tally.FLUSH_PERIOD)
        tally.flush()


async def _trim() -> None:
    """Gives free memory back to the system whenever the process has grown. Refused gRPC calls are garbage in cycles, of
    which Python sees a few objects and not the megabyte of headers behind each, and the C library keeps what its
    threads have freed in many small parts. So what hostile headers cost would stay, and add up to gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # not glibc, which alone has it
        return
    least = after = _resident()
    patience, idle = TRIM_PERIOD, 0.0
    while True:
        await asyncio.sleep(TRIM_PERIOD)
        idle += TRIM_PERIOD
        before = _resident()
        least = min(least, before)
        if before > after + TRIM_GROWTH or (before > least + TRIM_GROWTH and idle >= patience):
            gc.collect(1)
            await asyncio.to_thread(trim, 0)
            after, idle = _resident(), 0.0
            helped = before - after > TRIM_GROWTH / 4
            patience = TRIM_PERIOD if helped else min(2 * patience, TRIM_PATIENCE)


def _resident() -> int:
    """Bytes of memory that the process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0
