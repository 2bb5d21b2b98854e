"""Engines from a list that never changes."""

from collections.abc import AsyncIterator, Sequence


class StaticDiscovery:
    """Finds the engines it was told, ``host:port`` each."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))

    async def watch(self) -> AsyncIterator[Sequence[str]]:
        """Yields the list once."""
        yield self._addresses
