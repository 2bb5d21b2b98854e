"""Answers that run on without a listener."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire_proto.errors import ErrorCode, QuireError

from quire_router import metrics
from quire_router.generation import Delta

log = logging.getLogger(__name__)

RETRY_FULL = 5.0  # seconds
MAX_ORPHANS = 256  # answers beyond which no more are to be taken up that others left


class Background:
    """Reads answers to their ends, whatever these are: at most ``limit`` of them at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def wants_more(self) -> bool:
        """Whether there are so few that what others left is to be taken up as well."""
        return len(self._tasks) < min(MAX_ORPHANS, self._limit)

    def check_room(self) -> None:
        """Raises ``QuireError`` OVERLOADED when there are as many as there may be."""
        if len(self._tasks) >= self._limit:
            metrics.REJECTIONS.labels(ErrorCode.OVERLOADED.name.lower()).inc()
            message = f"{self._limit} requests run in the background, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_FULL, reason="background_full")

    def run(self, answer: AsyncGenerator[Delta]) -> None:
        """Begins to read an answer."""
        task = asyncio.create_task(_exhaust(answer), name="background request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Until all of them have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _exhaust(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)
