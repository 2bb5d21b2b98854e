"""What a router does beside its requests, again and again: looks for orphans, tidies the index, counts tokens."""

import asyncio
import logging
from collections.abc import Callable

from quire_proto.errors import QuireError

from quire_router import tally
from quire_router.lifecycle import Lifecycle
from quire_router.placement.index import PrefixIndex

log = logging.getLogger("quire.router")
ADOPTION_PERIOD = 1.0  # seconds
SWEEP_PERIOD, SWEEP_PAUSE = 1.0, 0.02  # seconds between looks, and between parts while there is something to sweep
SWEEP_BLOCKS = 2_000  # a millisecond or so of work at once


class Upkeep:
    """Runs until it is cancelled; what fails is tried again the next time."""

    def __init__(self, lifecycle: Lifecycle, index: PrefixIndex) -> None:
        self._lifecycle = lifecycle
        self._index = index

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._adopt())
            tasks.create_task(self._sweep())
            tasks.create_task(_every(tally.FLUSH_PERIOD, tally.flush))

    async def _adopt(self) -> None:
        while True:
            await asyncio.sleep(ADOPTION_PERIOD)
            try:
                adopted = await self._lifecycle.adopt()
            except QuireError:
                continue  # request state cannot be read now, which the journal tells itself
            except Exception:
                log.exception("looking for orphans failed")
                continue
            if adopted:
                log.info("took up %d background requests that their routers had left", adopted)

    async def _sweep(self) -> None:
        """Rarely while there is nothing to do, so that an idle router is not woken for it."""
        left = False
        while True:
            await asyncio.sleep(SWEEP_PAUSE if left else SWEEP_PERIOD)
            try:
                left = self._index.sweep(SWEEP_BLOCKS)
            except Exception:
                log.exception("tidying the index failed")


async def _every(period: float, work: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            work()
        except Exception:  # one part that fails may not end the others
            log.exception("upkeep failed")
