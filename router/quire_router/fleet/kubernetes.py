"""Engines of a Kubernetes Service: its EndpointSlices, listed once and watched from then on.

The library's informer has a thread of its own that a quiet watch holds on to at the end, and its watches begin again
without a pause when they are refused. So the loop is ours: list, watch from there, go on from the last word that was
heard, and list again when the API does not know that word any more.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from time import monotonic, thread_time

from aiohttp import ClientError
from kubernetes.aio.config import ConfigException

from quire_router.fleet.backoff import Backoff
from quire_router.fleet.endpoint import Endpoint
from quire_router.fleet.kube_api import KubeApi, KubeProblem, connect
from quire_router.fleet.paced import pause_after
from quire_router.fleet.slices import Json, Slices
from quire_router.fleet.source import KubernetesService
from quire_router.fleet.standing import Standing
from quire_router.kube_access import KubeAccess

log = logging.getLogger(__name__)
_MOST_PATIENCE = 30.0  # seconds that the API can ask for between two tries
_RESUMABLE = frozenset({401, 403, 429, 500, 503})  # say nothing about the version; 410 and others do
_TRIES_TO_RESUME = 3
_NAMED = 3  # slices in a warning


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds. A watch is ended by the API after ``watch`` or up to twice that, and opened again, so that a
    connection that died without a word is noticed; ``patience`` is for one answer. Between two tries the wait is
    ``backoff`` up to ``max_backoff``, and again ``backoff`` after a watch that was open for ``steady``: not after one
    that told something and broke, because that can be so each time.
    """

    watch: int = 30
    patience: float = 10.0
    backoff: float = 0.05
    max_backoff: float = 5.0
    steady: float = 1.0


class KubernetesDiscovery:
    """Finds the engines of ``service``, ready, not ready and terminating. Raises ``ValueError`` where there is no way
    to the API; that it does not answer is none. ``access`` and ``settings`` have defaults that suit a pod.
    """

    def __init__(
        self, service: KubernetesService, access: KubeAccess | None = None, settings: WatchSettings | None = None
    ) -> None:
        self._service = service
        self._access = access or KubeAccess.of_environment()
        self._settings = settings or WatchSettings()
        self._slices = Slices(service.port)
        self._lacking: tuple[str, ...] = ()
        self._failures = 0  # since the version was of use
        self._version: str | None = None  # None: what is known has to be listed
        self._backoff = Backoff(self._settings.backoff, self._settings.max_backoff)
        self._standing = Standing(str(service))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields them when they were listed, and when they change; of changes that come while it rests, the outcome."""
        told: Sequence[Endpoint] | None = None
        self._version = None
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                began = thread_time()
                self._tell_ports()
                found = self._slices.endpoints()
                if found != told:
                    told = found
                    yield found
                await asyncio.sleep(pause_after(thread_time() - began))

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
            except Exception as error:  # discovery must outlive whatever one answer was
                log.debug("%s: what cannot be understood", self._service, exc_info=True)
                self._fail(f"what cannot be understood ({type(error).__name__}: {error})", resumable=False)
            await asyncio.sleep(pause + self._backoff.next())

    async def _converse(self, api: KubeApi) -> AsyncGenerator[None, None]:
        """One watch after the other, for as long as the API answers."""
        while True:
            if self._version is None:
                items, version = await api.list_all(self._settings.patience)
                self._slices.replace(items)
                self._version = version
                self._standing.heard()
                yield
            async with aclosing(self._listen(api, self._version)) as changes:
                async for _ in changes:
                    yield
            await asyncio.sleep(self._backoff.next())

    async def _listen(self, api: KubeApi, version: str) -> AsyncGenerator[None, None]:
        """One watch. Raises ``ConnectionError`` where it ends as soon as it was open."""
        seconds = round(self._settings.watch * random.uniform(1.0, 2.0))  # noqa: S311 - spreads them
        opened = inf
        try:
            async with aclosing(api.watch(version, seconds, self._settings.patience)) as batches:
                async for events in batches:
                    opened = min(opened, monotonic())
                    self._hear(events)
                    if events:
                        yield
        finally:
            lasted = monotonic() - opened >= self._settings.steady
            if lasted:
                self._works()
        if not lasted:
            raise ConnectionError("the watch ended at once")

    def _hear(self, events: Sequence[Json]) -> None:
        self._standing.heard()
        for event in events:
            self._take(event["type"], event["object"])
            self._failures = 0

    def _works(self) -> None:
        self._backoff.reset()
        self._failures = 0
        self._standing.lasted()

    def _take(self, kind: str, item: Json) -> None:
        """Nothing that is older than what is known is taken: where events came in another order than they happened, or
        the server forgot what it knew, a list says what is.
        """
        version = item["metadata"]["resourceVersion"]
        if self._version is not None and _is_older(version, self._version):
            raise ValueError(f"version {version} came after {self._version}")
        if kind in {"ADDED", "MODIFIED"}:
            self._slices.put(item)
        elif kind == "DELETED":
            self._slices.drop(item)
        self._version = version  # all that a BOOKMARK has to say

    def _fail(self, problem: str, *, resumable: bool) -> None:
        self._standing.failed(problem)
        self._failures += 1
        if not resumable or self._failures >= _TRIES_TO_RESUME:
            self._version = None

    def _tell_ports(self) -> None:
        lacking = self._slices.lacking_port
        if lacking and lacking != self._lacking:
            others = f" and {len(lacking) - _NAMED} more" if lacking[_NAMED:] else ""
            told = ", ".join(lacking[:_NAMED])
            log.warning("%s: no port %r in %s%s", self._service, self._service.port, told, others)
        self._lacking = lacking


def _is_older(version: str, than: str) -> bool:
    """Versions of the API are decimal numbers that grow. Others are nobody's to compare."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)
