"""An answer whose record is held before anybody reads it, so that it must be let go of even if nobody ever does."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from quire_router.generation import Delta
from quire_router.shortcut import Live, Shortcut


class Held(Live):
    """``answer`` as it is; closing it before its first piece was asked for calls ``let_go`` instead, because a
    generator that was never started runs none of its ends.
    """

    def __init__(self, answer: AsyncGenerator[Delta, None], shortcut: Shortcut, let_go: Callable[[], None]) -> None:
        super().__init__(answer, shortcut)
        self._let_go = let_go
        self._begun = False

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        self._begun = True
        return super().asend(value)

    def athrow(self, error: Any, *older: Any) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        self._leave()
        return super().athrow(error, *older)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """See ``AsyncGenerator``."""
        self._leave()
        return super().aclose()

    def _leave(self) -> None:
        if not self._begun:
            self._begun = True
            self._let_go()
