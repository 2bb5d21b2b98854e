"""Engines behind a name: all its addresses, asked for again and again."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdatatype import AAAA, A, RdataType
from dns.resolver import NXDOMAIN, NoAnswer

from quire_router.fleet.endpoint import Endpoint
from quire_router.fleet.source import DnsName
from quire_router.fleet.standing import Standing

_PATIENCE = 2.0  # seconds for one answer, of whichever server
_DATAGRAM = 1232  # bytes that pass everywhere; longer answers come over TCP


def system_resolver() -> Resolver:
    """Asks the servers of ``/etc/resolv.conf``, with its search list. Raises ``DNSException`` where it names none."""
    resolver = Resolver()
    resolver.use_search_by_default = True
    resolver.timeout, resolver.lifetime = _PATIENCE / 2, _PATIENCE
    resolver.use_edns(0, 0, _DATAGRAM)
    return resolver


class DnsDiscovery:
    """Finds an engine at every address of a name, such as a headless Service's, which lists pods that are ready.

    It is asked for about every ``period`` seconds, at most. IPv6 addresses count where there is no IPv4 address. That
    the name has no address is believed only of a server that says so; with no answer the last ones stay. ``resolver``
    makes one anew after each failure, in case that the servers have changed.
    """

    def __init__(
        self, source: DnsName, *, period: float = 1.0, resolver: Callable[[], Resolver] = system_resolver
    ) -> None:
        self._source = source
        self._period = period
        self._make_resolver = resolver
        self._resolver: Resolver | None = None
        self._standing = Standing(str(source))

    async def watch(self) -> AsyncIterator[Sequence[Endpoint]]:
        """Yields them when the name was resolved, and when that has another outcome than before."""
        told: Sequence[Endpoint] | None = None
        while True:
            found = await self._look()
            if found is not None and found != told:
                told = found
                yield found
            await asyncio.sleep(self._period * random.uniform(0.5, 1.0))  # noqa: S311 - spreads questions

    async def _look(self) -> Sequence[Endpoint] | None:
        try:
            found = await self._resolve()
        except (DNSException, OSError) as error:
            self._resolver = None
            self._standing.failed(str(error))
            return None
        self._standing.heard()
        return found

    async def _resolve(self) -> Sequence[Endpoint]:
        self._resolver = self._resolver or self._make_resolver()
        addresses = await _addresses(self._resolver, self._source.name, A)
        if not addresses:
            addresses = [f"[{each}]" for each in await _addresses(self._resolver, self._source.name, AAAA)]
        # Servers turn the order round and round, which changes nothing.
        return tuple(Endpoint(f"{address}:{self._source.port}") for address in sorted(set(addresses)))


async def _addresses(resolver: Resolver, name: str, kind: RdataType) -> list[str]:
    """None where a server says that there are none."""
    try:
        answer = await resolver.resolve(name, kind)
    except (NXDOMAIN, NoAnswer):
        return []
    return [record.address for record in answer]
