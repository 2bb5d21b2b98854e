"""What a router does beside its requests, again and again: looks for orphans, tidies the index, counts tokens."""

import asyncio
import logging

from quire_proto.errors import QuireError

from quire_router import tally
from quire_router.lifecycle import Lifecycle
from quire_router.placement.index import PrefixIndex
from quire_router.supervise import SupervisedTask, supervise

log = logging.getLogger("quire.router")
ADOPTION_PERIOD = 1.0  # seconds
SWEEP_PERIOD, SWEEP_PAUSE = 1.0, 0.02  # seconds between looks, and between parts while there is something to sweep
SWEEP_BLOCKS = 2_000  # a millisecond or so of work at once


class Upkeep:
    """From ``start`` to ``stop``; what fails is tried again the next time."""

    def __init__(self, lifecycle: Lifecycle, index: PrefixIndex) -> None:
        self._lifecycle = lifecycle
        self._index = index
        self._tasks: list[SupervisedTask] = []

    def start(self) -> None:
        """Begins; never waits."""
        self._tasks = [
            supervise("orphans", self._adopt),
            supervise("prefix index", self._sweep),
            supervise("tally", _tally),
        ]

    async def stop(self) -> None:
        """Ends what was begun."""
        await asyncio.gather(*(task.stop() for task in self._tasks))

    async def _adopt(self) -> None:
        while True:
            await asyncio.sleep(ADOPTION_PERIOD)
            try:
                adopted = await self._lifecycle.adopt()
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
