"""A discovery source whose engines a test announces."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from quire_router.discovery.base import Endpoint


class ScriptedDiscovery:
    """Yields each of ``lists`` that is put there."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[Sequence[Endpoint]] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        while True:
            yield await self.lists.get()

    def publish(self, *endpoints: Endpoint) -> None:
        self.lists.put_nowait(endpoints)
