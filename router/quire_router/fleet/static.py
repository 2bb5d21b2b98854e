"""Engines from a list that never changes."""

from collections.abc import AsyncGenerator, Sequence

from quire_router.fleet.endpoint import Endpoint


class StaticDiscovery:
    """Finds the engines it was told, ``host:port`` each."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = tuple(Endpoint(address) for address in dict.fromkeys(addresses))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields the list once."""
        yield self._endpoints
