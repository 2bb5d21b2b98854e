"""Engines of a Kubernetes Service: its EndpointSlices, listed once and watched from then on.

The library's informer has a thread of its own that a quiet watch holds on to at the end, and its watches begin again
without a pause when they are refused. So the loop is ours: list, watch from there, go on from the last word that was
heard, and list again when the API does not know that word any more.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic

from aiohttp import ClientError
from kubernetes.aio.config import ConfigException

from quire_router.fleet.access import Access
from quire_router.fleet.backoff import Backoff
from quire_router.fleet.endpoint import Endpoint
from quire_router.fleet.kube_api import KubeApi, KubeProblem, connect
from quire_router.fleet.slices import Json, Slices
from quire_router.fleet.source import KubernetesService
from quire_router.fleet.standing import Standing

log = logging.getLogger(__name__)
_MOST_PATIENCE = 30.0  # seconds that the API can ask for between two tries
_RESUMABLE = frozenset({401, 403, 429, 500, 503})  # say nothing about the version; 410 and others do
_TRIES_TO_RESUME = 3


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds. A watch is ended by the API after ``watch`` or up to twice that, and opened again, so that a
    connection that died without a word is noticed; ``patience`` is for one answer. Between two tries the wait is
    ``backoff`` up to ``max_backoff``, and again ``backoff`` after a watch that told something or lasted ``steady``,
    which is longer than an answer may take.
    """

    watch: int = 30
    patience: float = 10.0
    backoff: float = 0.05
    max_backoff: float = 5.0
    steady: float = 15.0


class KubernetesDiscovery:
    """Finds the engines of ``service``, ready, not ready and terminating. Raises ``ValueError`` where there is no way
    to the API; that it does not answer is none. ``access`` and ``settings`` have defaults that suit a pod.
    """

    def __init__(
        self, service: KubernetesService, access: Access | None = None, settings: WatchSettings | None = None
    ) -> None:
        self._service = service
        self._access = access or Access.of_environment()
        self._settings = settings or WatchSettings()
        self._slices = Slices(service.port)
        self._lacking: tuple[str, ...] = ()
        self._failures = 0
        self._version: str | None = None  # None: what is known has to be listed
        self._backoff = Backoff(self._settings.backoff, self._settings.max_backoff)
        self._standing = Standing(str(service))

    async def watch(self) -> AsyncIterator[Sequence[Endpoint]]:
        """Yields them when they were listed, and when they change."""
        told: Sequence[Endpoint] | None = None
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                self._tell_ports()
                found = self._slices.endpoints()
                if found != told:
                    told = found
                    yield found

    async def _changes(self) -> AsyncGenerator[None, None]:
        """Yields when the slices may have changed. What was heard stays whatever happens to a connection."""
        while True:
            pause = 0.0
            try:
                async with (
                    connect(self._access, self._service.namespace, self._service.service) as api,
                    aclosing(self._converse(api)) as changes,
                ):
                    async for _ in changes:
                        yield
            except KubeProblem as problem:
                pause = min(problem.retry_after, _MOST_PATIENCE)
                self._fail(str(problem), resumable=problem.code in _RESUMABLE)
            except (ClientError, ConfigException, OSError) as error:  # a time that is over is an OSError
                self._fail(str(error) or type(error).__name__, resumable=True)
            except Exception:  # discovery must outlive whatever one answer was
                log.exception("the endpoints of %s cannot be read", self._service)
                self._fail("an answer that is none", resumable=False)
            await asyncio.sleep(max(pause, self._backoff.next()))

    async def _converse(self, api: KubeApi) -> AsyncGenerator[None, None]:
        """One watch after the other, for as long as the API answers."""
        while True:
            if self._version is None:
                items, version = await api.list_all(self._settings.patience)
                self._slices.replace(items)
                self._version = version
                self._standing.heard()
                yield
            async with aclosing(self._watch(api, self._version)) as batches:
                began = monotonic()
                try:
                    async for events in batches:
                        self._hear(events)
                        if events:
                            yield
                finally:
                    if monotonic() - began >= self._settings.steady:
                        self._works()
            await asyncio.sleep(self._backoff.next())

    def _watch(self, api: KubeApi, version: str) -> AsyncGenerator[list[Json], None]:
        seconds = round(self._settings.watch * random.uniform(1.0, 2.0))  # noqa: S311 - spreads them
        return api.watch(version, seconds, self._settings.patience)

    def _hear(self, events: Sequence[Json]) -> None:
        self._standing.heard()
        for event in events:
            self._take(event["type"], event["object"])
        if events:
            self._works()

    def _works(self) -> None:
        """A watch told something, or lasted. One that is opened and broken again and again is tried less often."""
        self._backoff.reset()
        self._failures = 0

    def _take(self, kind: str, item: Json) -> None:
        if kind in {"ADDED", "MODIFIED"}:
            self._slices.put(item)
        elif kind == "DELETED":
            self._slices.drop(item)
        self._version = item["metadata"]["resourceVersion"]  # all that a BOOKMARK has to say

    def _fail(self, problem: str, *, resumable: bool) -> None:
        self._standing.failed(problem)
        self._failures += 1
        if not resumable or self._failures >= _TRIES_TO_RESUME:
            self._version = None

    def _tell_ports(self) -> None:
        lacking = self._slices.lacking_port
        if lacking and lacking != self._lacking:
            log.warning("%s: no port %r in %s", self._service, self._service.port, ", ".join(lacking))
        self._lacking = lacking
