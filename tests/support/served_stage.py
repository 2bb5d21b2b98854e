"""A scripted API that is served by a thread, for tests whose clients wait in their own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.scripted_api import Stage, open_stage


@contextmanager
def served_stage(**settings: Any) -> Iterator[Stage]:
    """Serves until the block ends."""
    loop, ready, stages = asyncio.new_event_loop(), threading.Event(), list[Stage]()
    ended = asyncio.Event()

    async def serve() -> None:
        async with open_stage(**settings) as stage:
            stages.append(stage)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield stages[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
