"""Engines behind a DNS name: all its addresses, which are polled."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdatatype import AAAA, A, RdataType
from dns.resolver import NXDOMAIN, NoAnswer
from quire_proto.supervise import jittered

from quire_router.discovery.base import DnsName, Endpoint, SourceHealth, format_address

_TIMEOUT = 2.0  # seconds for one response, of whichever server
_MISSES_UNTIL_GONE = 5
"""Responses in a row without an address after which it is gone. There are several servers behind one address, and each
caches answers for some seconds: until all know of a change their answers alternate, and connections would come and go.
"""
_PERIOD_PER_ADDRESS = 0.001  # seconds between two queries: reading an address takes a thirtieth of that
_DATAGRAM = 1232  # bytes that every network passes; longer answers come over TCP


def system_resolver() -> Resolver:
    """A resolver with the servers and search list of ``/etc/resolv.conf``. Raises ``DNSException`` if it names none."""
    resolver = Resolver()
    resolver.use_search_by_default = True
    resolver.timeout, resolver.lifetime = _TIMEOUT / 2, _TIMEOUT
    resolver.use_edns(0, 0, _DATAGRAM)
    return resolver


class DnsDiscovery:
    """Finds an engine at every address of a name, such as a headless Service's, which lists pods that are ready.

    The name is resolved about every ``period`` seconds, or less often if it has thousands of addresses. IPv6 addresses
    count if there is no IPv4 address. An address is gone when ``_MISSES_UNTIL_GONE`` responses in a row lack it; a
    query without a response changes nothing. ``resolver`` is called again after each failure, in case that the servers
    have changed.
    """

    def __init__(
        self, source: DnsName, *, period: float = 1.0, resolver: Callable[[], Resolver] = system_resolver
    ) -> None:
        self._source = source
        self._period = period
        self._create_resolver = resolver
        self._resolver: Resolver | None = None
        self._remaining: dict[str, int] = {}  # responses without an address until it is gone
        self._health = SourceHealth(str(source))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields the engines when the name was resolved, and when the addresses have changed."""
        last: Sequence[Endpoint] | None = None
        while True:
            if await self._refresh():
                found = tuple(Endpoint(address) for address in sorted(self._remaining))
                if found != last:
                    last = found
                    yield found
            period = max(self._period, _PERIOD_PER_ADDRESS * len(self._remaining))
            await asyncio.sleep(jittered(period))

    async def _refresh(self) -> bool:
        """Resolves the name; False if there was no response."""
        is_stable = self._resolver is not None  # a failure leaves none
        try:
            addresses = await self._resolve()
        except (DNSException, OSError) as error:
            self._resolver = None
            self._health.on_failure(str(error))
            return False
        self._remaining = {address: left - 1 for address, left in self._remaining.items() if left > 1}
        self._remaining |= dict.fromkeys(addresses, _MISSES_UNTIL_GONE)
        self._health.on_response()
        if is_stable:
            self._health.on_stable()
        return True

    async def _resolve(self) -> list[str]:
        self._resolver = self._resolver or self._create_resolver()
        for kind in (A, AAAA):
            if found := await _query(self._resolver, self._source.name, kind):
                return [format_address(each, self._source.port, six=kind is AAAA) for each in found]
        return []


async def _query(resolver: Resolver, name: str, kind: RdataType) -> list[str]:
    """The addresses of one kind; empty if a server says that there are none."""
    try:
        answer = await resolver.resolve(name, kind)
    except (NXDOMAIN, NoAnswer):
        return []
    return [record.address for record in answer]
