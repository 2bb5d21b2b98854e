"""Engines of a Kubernetes Service: its EndpointSlices, listed once and watched from then on.

The library's informer has a thread of its own that a quiet watch keeps alive at shutdown, and it opens refused watches
again without a pause. So the loop is ours: list, watch from the list's resource version, resume from the last version
that an event had, and list again when the API does not have that version any more.

A Role with ``get``, ``list`` and ``watch`` on ``endpointslices`` (group ``discovery.k8s.io``) of the namespace is
enough. Slices stay the JSON they are: making the library's models of a thousand endpoints takes far longer than reading
what is needed.
"""

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf
from time import monotonic, thread_time
from typing import Any

from aiohttp import ClientError, ClientResponse
from kubernetes.aio.client import DiscoveryV1Api
from kubernetes.aio.config import ConfigException
from quire_proto.supervise import Backoff

from quire_router.clients.kube_client import KubeAccess, kube_client, own_namespace
from quire_router.core.retry import pause_after
from quire_router.discovery.base import Endpoint, KubernetesService, SourceHealth, format_address, merge_endpoints

log = logging.getLogger(__name__)

Json = Mapping[str, Any]
_FAMILIES = ("IPv4", "IPv6")
SERVICE_LABEL = "kubernetes.io/service-name"
# An object of the API has 3 MB at most; an endless response is cut off before it fills the memory.
_MAX_EVENT = 8 * 2**20
_MAX_LIST = 64 * 2**20
_PAGE = 100  # slices, of a hundred endpoints each by default
_MAX_PAGES = 200
_MAX_RETRY_AFTER = 30.0  # seconds that the API can ask for between two tries
_RESUMABLE = frozenset({401, 403, 429, 500, 503})  # say nothing about the version; 410 and others do
_TRIES_TO_RESUME = 3
_NAMED = 3  # slices in a warning


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds. The API ends a watch after ``watch`` or up to twice that, and it is opened again, so that a
    dead connection is noticed; ``timeout`` is for one response. Between two tries the pause is ``backoff``, growing up
    to ``max_backoff``, and ``backoff`` again after a watch that was open for ``steady``: not after one that brought an
    event and broke, because each one may do that.
    """

    watch: int = 30
    timeout: float = 10.0
    backoff: float = 0.05
    max_backoff: float = 5.0
    steady: float = 1.0


class KubernetesDiscovery:
    """Finds the engines of ``service``, ready, not ready and terminating. Raises ``ValueError`` if there is no
    configuration for the API; an API that does not answer is no error. The defaults of ``access`` and ``settings`` suit
    a pod.
    """

    def __init__(
        self, service: KubernetesService, access: KubeAccess | None = None, settings: WatchSettings | None = None
    ) -> None:
        self._service = service
        self._access = access or KubeAccess.of_environment()
        self._settings = settings or WatchSettings()
        self._slices = EndpointSlices(service.port)
        self._missing_port: tuple[str, ...] = ()
        self._failures = 0  # since the version was last usable
        self._version: str | None = None  # None: the slices have to be listed
        self._backoff = Backoff(self._settings.backoff, self._settings.max_backoff)
        self._health = SourceHealth(str(service))

    async def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields the engines when they were listed, and when they change; after a pause, only the outcome."""
        last: Sequence[Endpoint] | None = None
        self._version = None
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                began = thread_time()
                self._warn_missing_ports()
                found = self._slices.endpoints()
                if found != last:
                    last = found
                    yield found
                await asyncio.sleep(pause_after(thread_time() - began))

    async def _changes(self) -> AsyncGenerator[None, None]:
        """Yields when the slices may have changed. What is known outlives every connection."""
        while True:
            pause = 0.0
            try:
                async with (
                    connect(self._access, self._service.namespace, self._service.service) as api,
                    aclosing(self._list_and_watch(api)) as changes,
                ):
                    async for _ in changes:
                        yield
            except KubeApiError as problem:
                pause = min(problem.retry_after, _MAX_RETRY_AFTER)
                self._on_failure(str(problem), resumable=problem.code in _RESUMABLE)
            except (ClientError, ConfigException, OSError) as error:  # TimeoutError is an OSError
                self._on_failure(str(error) or type(error).__name__, resumable=True)
            except Exception as error:  # discovery must survive any response
                log.debug("%s: an invalid answer", self._service, exc_info=True)
                self._on_failure(f"what cannot be understood ({type(error).__name__}: {error})", resumable=False)
            await asyncio.sleep(pause + self._backoff.next())

    async def _list_and_watch(self, api: "KubeApi") -> AsyncGenerator[None, None]:
        """Lists if need be, and opens one watch after the other, for as long as the API answers."""
        while True:
            if self._version is None:
                items, version = await api.list_all(self._settings.timeout)
                self._slices.replace(items)
                self._version = version
                self._health.on_response()
                yield
            async with aclosing(self._watch_once(api, self._version)) as changes:
                async for _ in changes:
                    yield
            await asyncio.sleep(self._backoff.next())

    async def _watch_once(self, api: "KubeApi", version: str) -> AsyncGenerator[None, None]:
        """One watch. Raises ``ConnectionError`` if it ends as soon as it was open."""
        seconds = round(self._settings.watch * random.uniform(1.0, 2.0))  # noqa: S311 - spreads them
        opened = inf
        try:
            async with aclosing(api.watch(version, seconds, self._settings.timeout)) as batches:
                async for events in batches:
                    opened = min(opened, monotonic())
                    self._apply_events(events)
                    if events:
                        yield
        finally:
            is_stable = monotonic() - opened >= self._settings.steady
            if is_stable:
                self._on_stable()
        if not is_stable:
            raise ConnectionError("the watch ended at once")

    def _apply_events(self, events: Sequence[Json]) -> None:
        self._health.on_response()
        for event in events:
            self._apply_event(event["type"], event["object"])
            self._failures = 0

    def _on_stable(self) -> None:
        self._backoff.reset()
        self._failures = 0
        self._health.on_stable()

    def _apply_event(self, kind: str, item: Json) -> None:
        """Raises ``ValueError`` for an event that is older than what is known: if events come out of order, or the
        server lost its data, the slices have to be listed again.
        """
        version = item["metadata"]["resourceVersion"]
        if self._version is not None and _is_older(version, self._version):
            raise ValueError(f"version {version} came after {self._version}")
        if kind in {"ADDED", "MODIFIED"}:
            self._slices.put(item)
        elif kind == "DELETED":
            self._slices.drop(item)
        self._version = version  # a BOOKMARK has nothing else

    def _on_failure(self, problem: str, *, resumable: bool) -> None:
        self._health.on_failure(problem)
        self._failures += 1
        if not resumable or self._failures >= _TRIES_TO_RESUME:
            self._version = None

    def _warn_missing_ports(self) -> None:
        missing = self._slices.slices_without_port
        if missing and missing != self._missing_port:
            others = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
            named = ", ".join(missing[:_NAMED])
            log.warning("%s: no port %r in %s%s", self._service, self._service.port, named, others)
        self._missing_port = missing


def _is_older(version: str, than: str) -> bool:
    """Resource versions of the API are decimal numbers that grow. Others cannot be compared: False."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


@dataclass(frozen=True, slots=True)
class _Slice:
    family: str
    endpoints: tuple[Endpoint, ...]
    has_port: bool


class EndpointSlices:
    """The EndpointSlices of one Service by their names, and the engines in them. ``port`` is its name or number.

    What is passed may be anything: it is applied as a whole, or raises some ``Exception`` and changes nothing.
    """

    def __init__(self, port: str | int) -> None:
        self._port = port
        self._slices: dict[str, _Slice] = {}

    def replace(self, items: Iterable[Json]) -> None:
        """Replaces all slices."""
        self._slices = {_name(item): self._read(item) for item in items}

    def put(self, item: Json) -> None:
        """Adds or replaces one slice."""
        self._slices[_name(item)] = self._read(item)

    def drop(self, item: Json) -> None:
        """Removes a slice, if it is there."""
        self._slices.pop(_name(item), None)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All engines, each once, in the order of the slices' names.

        A pod of a Service with both families is in a slice of each, and would be two engines. So one family counts:
        IPv4 if there is such a slice, even an empty one, so that it does not change while pods come and go.
        """
        slices = [self._slices[name] for name in sorted(self._slices)]
        family = next((name for name in _FAMILIES if any(each.family == name for each in slices)), None)
        return merge_endpoints(chain.from_iterable(each.endpoints for each in slices if each.family == family))

    @property
    def slices_without_port(self) -> tuple[str, ...]:
        """The slices that do not have the port, so that their pods cannot be reached."""
        return tuple(sorted(name for name, each in self._slices.items() if not each.has_port))

    def _read(self, item: Json) -> _Slice:
        port, family = self._port_of(item), item.get("addressType") or ""
        listed = item.get("endpoints") or ()
        endpoints: tuple[Endpoint, ...] = ()
        if port is not None and family in _FAMILIES:
            endpoints = tuple(_endpoints(listed, port, family))
        return _Slice(family, endpoints, port is not None or not listed)

    def _port_of(self, item: Json) -> int | None:
        if isinstance(self._port, int):
            return self._port
        ports = item.get("ports") or ()
        port = next((each.get("port") for each in ports if each.get("name") == self._port), None)
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise ValueError(f"{port!r} is not a port")
        return port


def _name(item: Json) -> str:
    return _text(item["metadata"]["name"])


def _endpoints(listed: Iterable[Json], port: int, family: str) -> Iterator[Endpoint]:
    for entry in listed:
        addresses = entry.get("addresses") or ()
        if addresses:  # any would do; all clients use the first
            yield _endpoint(entry, format_address(_text(addresses[0]), port, six=family == "IPv6"))


def _endpoint(entry: Json, address: str) -> Endpoint:
    """``serving`` is the pod's own readiness; ``ready`` is the same only until it terminates, and not if the Service
    publishes addresses that are not ready. A missing condition means ready, and not terminating.
    """
    conditions, zone = entry.get("conditions") or {}, entry.get("zone")
    ready = conditions.get("serving")
    if ready is None:
        ready = conditions.get("ready")
    terminating = conditions.get("terminating") is True
    return Endpoint(address, ready is not False, terminating, None if zone is None else _text(zone), _pod(entry))


def _pod(entry: Json) -> str | None:
    target = entry.get("targetRef") or {}
    if target.get("kind") != "Pod":
        return None
    return f"{_text(target['namespace'])}/{_text(target['name'])}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where there has to be text")
    return value


class KubeApiError(Exception):
    """The API refused. ``code`` is the HTTP status, ``retry_after`` the seconds to wait (0.0: it does not say)."""

    def __init__(self, code: int, text: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.retry_after = retry_after


@asynccontextmanager
async def connect(access: KubeAccess, namespace: str | None, service: str) -> AsyncIterator["KubeApi"]:
    """A client for one Service; ``namespace`` None is the client's own. Raises as ``kube_client`` does."""
    async with kube_client(access) as client:
        yield KubeApi(DiscoveryV1Api(client), namespace or own_namespace(access), service)


class KubeApi:
    """Lists and watches the EndpointSlices of a Service. All calls raise ``KubeApiError``, ``aiohttp.ClientError`` or
    ``TimeoutError``, and any ``Exception`` for a malformed response.
    """

    def __init__(self, api: DiscoveryV1Api, namespace: str, service: str) -> None:
        self._api = api
        self._which = {"namespace": namespace, "label_selector": f"{SERVICE_LABEL}={service}"}

    async def list_all(self, max_wait: float) -> tuple[list[Json], str]:
        """All slices, and the resource version from which to watch; within ``max_wait`` seconds."""
        items: list[Json] = []
        more: str | None = None
        left = _MAX_LIST
        async with asyncio.timeout(max_wait):
            for _ in range(_MAX_PAGES):
                body = await self._page(more, left)
                left -= len(body)
                page: Json = json.loads(body)
                items += page.get("items") or ()
                more = page["metadata"].get("continue")
                if not more:
                    return items, page["metadata"]["resourceVersion"]
        raise ValueError("a list without an end")

    async def _page(self, token: str | None, most: int) -> bytes:
        call = self._api.list_namespaced_endpoint_slice_without_preload_content
        response = await call(**self._which, limit=_PAGE, _continue=token)
        async with response:
            await _check(response)
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise ValueError("a list without an end")
            return bytes(body)

    async def watch(self, version: str, seconds: int, max_wait: float) -> AsyncGenerator[list[Json], None]:
        """Events after ``version``, in lists as they come; the first list is empty and says that the watch is open.
        The API ends the watch after ``seconds``, and it counts as broken if that takes ``max_wait`` longer.
        """
        call = self._api.list_namespaced_endpoint_slice_without_preload_content
        async with asyncio.timeout(max_wait):
            response = await call(
                **self._which,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=seconds,
                _request_timeout=seconds + max_wait,
            )
        async with response:
            await _check(response)
            yield []
            async for lines in _lines(response):
                yield [_event(line) for line in lines if line]


async def _check(response: ClientResponse) -> None:
    if response.status != 200:
        after = response.headers.get("Retry-After", "")
        seconds = float(after) if after.isascii() and after.isdigit() else 0.0
        raise KubeApiError(response.status, response.reason or "", seconds)


async def _lines(response: ClientResponse) -> AsyncIterator[list[bytes]]:
    """Complete lines, in lists as they come. A last line that is cut off is left out."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        end = chunk.rfind(b"\n")
        rest += chunk[: end + 1] or chunk
        if end >= 0:
            *lines, _ = bytes(rest).split(b"\n")
            rest = bytearray(chunk[end + 1 :])
            yield lines
        if len(rest) > _MAX_EVENT:
            raise ValueError("an event without an end")


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        raise KubeApiError(int(status.get("code") or 0), str(status.get("reason") or "an error of the watch"))
    return event
