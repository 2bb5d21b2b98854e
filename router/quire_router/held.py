"""A delta stream that owns resources before it is first read, and releases them even if it never is."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from quire_router.generation import Delta
from quire_router.shortcut import DeltaStream, DirectPath


class OwnedDeltaStream(DeltaStream):
    """``answer``, which lets go of what it holds on every way out. Closing it before its first piece was asked for
    calls ``let_go`` instead, because a generator that was never started runs none of its ends.
    """

    def __init__(
        self,
        answer: AsyncGenerator[Delta, None],
        let_go: Callable[[], Awaitable[None]],
        shortcut: DirectPath | None = None,
    ) -> None:
        super().__init__(answer, shortcut or DirectPath())
        self._release: Callable[[], Awaitable[None]] | None = let_go

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        self._release = None
        return super().asend(value)

    async def athrow(self, error: Any, *older: Any) -> Delta:
        """See ``AsyncGenerator``."""
        await self._release_once()
        return await super().athrow(error, *older)

    async def aclose(self) -> None:
        """See ``AsyncGenerator``."""
        await self._release_once()
        await super().aclose()

    async def _release_once(self) -> None:
        let_go, self._release = self._release, None
        if let_go is not None:
            await let_go()
