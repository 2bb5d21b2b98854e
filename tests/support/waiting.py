"""Waiting for what happens somewhere else, without a guess of how long it takes."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds; raises ``TimeoutError`` when that takes absurdly long."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for everything
            await asyncio.sleep(0.002)
