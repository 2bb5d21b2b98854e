"""Several sources of engines as one, fixed addresses among them; ``create_discovery`` makes it from ``--engine``."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import chain
from time import thread_time

from quire_router.clients.kube_client import require_library
from quire_router.core import metrics
from quire_router.core.retry import pause_after, supervise
from quire_router.discovery.base import (
    Address,
    Discovery,
    DnsName,
    Endpoint,
    KubernetesService,
    merge_endpoints,
    parse_source,
)

log = logging.getLogger(__name__)

STATIC = "static"
MAX_ENGINES = 10_000
"""Far more than one router can serve: guards against a name that resolves to all pods of a large cluster."""

_STATES = ("ready", "not_ready", "terminating")


class CombinedDiscovery:
    """Finds what any of ``sources`` finds, which are given by their names in metrics. An engine that two of them find
    is one (see ``merge_endpoints``). A source that has not answered yet adds nothing. Of more than ``MAX_ENGINES`` the
    first are used.
    """

    def __init__(self, sources: Mapping[str, Discovery]) -> None:
        self._sources = dict(sources)
        self._views: dict[str, Sequence[Endpoint]] = {}
        self._changed = asyncio.Event()
        self._too_many = False

    def is_complete(self) -> bool:
        """Whether each source has answered: before that there may be engines that no view has."""
        return self._views.keys() == self._sources.keys()

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields when one of them did, and then pauses in proportion to the CPU time that this took, here and in the
        consumer: engines whose readiness flaps would keep a router of a large fleet busy. Changes that come meanwhile
        are yielded at once.
        """
        tasks = [
            # Not vital: what it found stays valid, and a router that is restarted would have to find it anew.
            supervise("engine source", partial(self._follow, name, source), of=name, vital=False)
            for name, source in self._sources.items()
        ]
        if self._views:  # from an earlier watch
            self._changed.set()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                began = thread_time()
                yield self._found()
                await asyncio.sleep(pause_after(thread_time() - began))
        finally:
            await asyncio.gather(*(task.stop() for task in tasks))

    async def _follow(self, name: str, source: Discovery) -> None:
        """Copies what one source yields. Its last view stays valid while it fails, and the others go on."""
        try:
            async with aclosing(source.watch()) as views:
                async for view in views:
                    self._views[name] = view
                    self._changed.set()
        except BaseException:
            metrics.DISCOVERY_CONNECTED.labels(name).set(0)  # no watch is open now
            raise

    def _found(self) -> Sequence[Endpoint]:
        for name, view in self._views.items():
            _count(name, view)
        found = merge_endpoints(chain.from_iterable(self._views.get(name, ()) for name in self._sources))
        if len(found) > MAX_ENGINES and not self._too_many:
            log.error("%d engines are named; connecting to the first %d only", len(found), MAX_ENGINES)
        self._too_many = len(found) > MAX_ENGINES
        return found[:MAX_ENGINES]


class StaticDiscovery:
    """Finds the engines of a fixed list of addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = tuple(Endpoint(address) for address in dict.fromkeys(addresses))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields the list once."""
        yield self._endpoints


class ExternalDiscovery:
    """Finds servers that are not Quire's where ``source`` finds addresses: of the ``kind``, over HTTP."""

    def __init__(self, source: Discovery, kind: str) -> None:
        self._source = source
        self._kind = kind

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields what the source does."""
        async with aclosing(self._source.watch()) as views:
            async for view in views:
                yield [replace(endpoint, address=f"{self._kind}+http://{endpoint.address}") for endpoint in view]


def create_discovery(entries: Iterable[str], *, dns_period: float) -> CombinedDiscovery:
    """The discovery of the engines that ``--engine`` names. Raises ``ValueError`` for a source that cannot be used
    here.
    """
    parsed = list(dict.fromkeys(parse_source(entry) for entry in entries))
    addresses = [source.address for source in parsed if isinstance(source, Address)]
    sources: dict[str, Discovery] = {STATIC: StaticDiscovery(addresses)} if addresses else {}
    sources |= {str(source): _create(source, dns_period) for source in parsed if not isinstance(source, Address)}
    return CombinedDiscovery(sources)


def _create(source: DnsName | KubernetesService, dns_period: float) -> Discovery:
    """Raises ``ValueError``."""
    discovery = _create_source(source, dns_period)
    return ExternalDiscovery(discovery, source.kind) if source.kind else discovery


def _create_source(source: DnsName | KubernetesService, dns_period: float) -> Discovery:
    """Imports only what is used: the library for Kubernetes takes half a second and 20 MB. Raises ``ValueError``."""
    if isinstance(source, DnsName):
        from quire_router.discovery.dns import DnsDiscovery

        return DnsDiscovery(source, period=dns_period)
    require_library(str(source))
    from quire_router.discovery.kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(source)


def _count(name: str, view: Sequence[Endpoint]) -> None:
    counts = Counter(_state(endpoint) for endpoint in view)
    for state in _STATES:
        metrics.DISCOVERY_ENGINES.labels(name, state).set(counts[state])


def _state(endpoint: Endpoint) -> str:
    if endpoint.terminating:
        return "terminating"
    return "ready" if endpoint.ready else "not_ready"
