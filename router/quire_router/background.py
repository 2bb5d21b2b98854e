"""Answers that run on without a listener."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire_proto.errors import ErrorCode, QuireError

from quire_router import metrics
from quire_router.generation import Delta

log = logging.getLogger(__name__)

RETRY_AFTER = 5.0  # seconds
MAX_ORPHANS = 256  # answers beyond which no more are to be taken up that others left
MAX_ORPHAN_TOKENS = 16_777_216  # of all that was taken up and runs, prompts and answers so far: 64 MiB


class BackgroundRequests:
    """Reads answers to their ends, whatever these are: at most ``limit`` of them at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    @property
    def has_orphan_capacity(self) -> bool:
        """Whether there are so few, and so little, that what others left is to be taken up as well: after a router died
        all that it had comes at once.
        """
        return len(self._tasks) < min(MAX_ORPHANS, self._limit) and self._tokens < MAX_ORPHAN_TOKENS

    def check_capacity(self) -> None:
        """Raises ``QuireError`` OVERLOADED when there are as many as there may be."""
        if len(self._tasks) >= self._limit:
            metrics.REJECTIONS.labels(ErrorCode.OVERLOADED.name.lower()).inc()
            message = f"{self._limit} requests run in the background, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=RETRY_AFTER, reason="background_full")

    def run(self, answer: AsyncGenerator[Delta], tokens: int = 0) -> None:
        """Begins to read an answer, which was taken up with so many ``tokens`` where others left it."""
        task = asyncio.create_task(_read_to_end(answer), name="background request")
        self._tasks.add(task)
        self._tokens += tokens

        def ended(_: object) -> None:
            self._tasks.discard(task)
            self._tokens -= tokens

        task.add_done_callback(ended)

    async def wait(self) -> None:
        """Until all of them have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _read_to_end(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)
