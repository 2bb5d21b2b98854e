"""Engines of several sources, each found in its own way, as one list."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import chain

from quire_router import metrics
from quire_router.fleet.discovery import Discovery
from quire_router.fleet.endpoint import Endpoint, merged
from quire_router.fleet.source import Address, DnsName, KubernetesService, Source, parse_source
from quire_router.fleet.static import StaticDiscovery

log = logging.getLogger(__name__)
STATIC = "static"
_STATES = ("ready", "not_ready", "terminating")


class CombinedDiscovery:
    """Finds what any of ``sources`` finds, by the name that each has in metrics. Engines that two of them find are one
    (see ``merged``). A source that has said nothing yet adds nothing.
    """

    def __init__(self, sources: Mapping[str, Discovery]) -> None:
        self._sources = dict(sources)
        self._views: dict[str, Sequence[Endpoint]] = {}
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[Sequence[Endpoint]]:
        """Yields when one of them did; what comes at the same time is yielded once."""
        tasks = [
            asyncio.create_task(self._follow(name, source), name=f"engines of {name}")
            for name, source in self._sources.items()
        ]
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                yield merged(chain.from_iterable(self._views.get(name, ()) for name in self._sources))
        finally:
            await _ended(tasks)

    async def _follow(self, name: str, source: Discovery) -> None:
        try:
            async for view in source.watch():
                self._views[name] = view
                _count(name, view)
                self._changed.set()
        except Exception:  # its last view stands, and the others go on
            log.exception("%s finds no more engines", name)


def discovery_of(entries: Iterable[str], *, dns_period: float) -> CombinedDiscovery:
    """What finds the engines that ``--engine`` names. Raises ``ValueError`` for what cannot be asked from here."""
    parsed = list(dict.fromkeys(parse_source(entry) for entry in entries))
    addresses = [source.address for source in parsed if isinstance(source, Address)]
    sources: dict[str, Discovery] = {STATIC: StaticDiscovery(addresses)} if addresses else {}
    sources |= {str(source): _asking(source, dns_period) for source in parsed if not isinstance(source, Address)}
    return CombinedDiscovery(sources)


def _asking(source: Source, dns_period: float) -> Discovery:
    """Libraries are loaded for what is used only: the one for Kubernetes takes half a second and 20 MB."""
    if isinstance(source, DnsName):
        from quire_router.fleet.dns import DnsDiscovery

        return DnsDiscovery(source, period=dns_period)
    assert isinstance(source, KubernetesService)
    from quire_router.fleet.kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(source)


def _count(name: str, view: Sequence[Endpoint]) -> None:
    counts = Counter(_state(endpoint) for endpoint in view)
    for state in _STATES:
        metrics.DISCOVERY_ENGINES.labels(name, state).set(counts[state])


def _state(endpoint: Endpoint) -> str:
    if endpoint.terminating:
        return "terminating"
    return "ready" if endpoint.ready else "not_ready"


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Libraries can lose a cancellation that comes with an answer: ``asyncio.wait_for`` does in Python 3.11."""
    for task in tasks:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
