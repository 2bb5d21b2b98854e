"""Engines behind a name: all its addresses, asked for again and again."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdatatype import AAAA, A, RdataType
from dns.resolver import NXDOMAIN, NoAnswer

from quire_router.discovery.base import DnsName, Endpoint, SourceHealth, format_address

_TIMEOUT = 2.0  # seconds for one answer, of whichever server
_MISSES_UNTIL_GONE = 5
"""Looks in a row without it after which an address has left. The servers behind one address are several, and each keeps
answers for some seconds: until all have heard of a change their answers alternate, and links would come and go.
"""
_SECONDS_EACH = 0.001  # between two looks, for each address: to read it takes a thirtieth of that
_DATAGRAM = 1232  # bytes that pass everywhere; longer answers come over TCP


def system_resolver() -> Resolver:
    """Asks the servers of ``/etc/resolv.conf``, with its search list. Raises ``DNSException`` where it names none."""
    resolver = Resolver()
    resolver.use_search_by_default = True
    resolver.timeout, resolver.lifetime = _TIMEOUT / 2, _TIMEOUT
    resolver.use_edns(0, 0, _DATAGRAM)
    return resolver


class DnsDiscovery:
    """Finds an engine at every address of a name, such as a headless Service's, which lists pods that are ready.

    It is asked for about every ``period`` seconds, or less often where there are thousands. IPv6 addresses count where
    there is no IPv4 address. That the name does not have an address any more is believed when answers say so
    ``_MISSES_UNTIL_GONE`` times in a row; no answer says nothing. ``resolver`` makes one anew after each failure, in
    case that the servers have changed.
    """

    def __init__(
        self, source: DnsName, *, period: float = 1.0, resolver: Callable[[], Resolver] = system_resolver
    ) -> None:
        self._source = source
        self._period = period
        self._make_resolver = resolver
        self._resolver: Resolver | None = None
        self._remaining: dict[str, int] = {}  # that an address is still believed for
        self._health = SourceHealth(str(source))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields them when the name was resolved, and when that has another outcome than before."""
        told: Sequence[Endpoint] | None = None
        while True:
            if await self._refresh():
                found = tuple(Endpoint(address) for address in sorted(self._remaining))
                if found != told:
                    told = found
                    yield found
            period = max(self._period, _SECONDS_EACH * len(self._remaining))
            await asyncio.sleep(period * random.uniform(0.5, 1.0))  # noqa: S311 - spreads questions

    async def _refresh(self) -> bool:
        """Whether there was an answer."""
        again = self._resolver is not None  # none is left by a failure
        try:
            addresses = await self._resolve()
        except (DNSException, OSError) as error:
            self._resolver = None
            self._health.on_failure(str(error))
            return False
        self._remaining = {address: left - 1 for address, left in self._remaining.items() if left > 1}
        self._remaining |= dict.fromkeys(addresses, _MISSES_UNTIL_GONE)
        self._health.on_response()
        if again:
            self._health.on_stable()
        return True

    async def _resolve(self) -> list[str]:
        self._resolver = self._resolver or self._make_resolver()
        for kind in (A, AAAA):
            if found := await _query(self._resolver, self._source.name, kind):
                return [format_address(each, self._source.port, six=kind is AAAA) for each in found]
        return []


async def _query(resolver: Resolver, name: str, kind: RdataType) -> list[str]:
    """None where a server says that there are none."""
    try:
        answer = await resolver.resolve(name, kind)
    except (NXDOMAIN, NoAnswer):
        return []
    return [record.address for record in answer]
