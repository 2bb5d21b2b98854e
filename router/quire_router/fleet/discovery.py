"""Where engines are found. Implementations: ``static``."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol


class Discovery(Protocol):
    """A source of engine addresses."""

    def watch(self) -> AsyncIterator[Sequence[str]]:
        """Yields all addresses (``host:port``), the first time at once, and again whenever the list changes."""
        ...
