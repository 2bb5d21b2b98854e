"""A small Kubernetes API server for EndpointSlices: lists in pages, watches, versions, and what goes wrong there."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
SERVICE = "kubernetes.io/service-name"
PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


class Conflict(Exception):  # noqa: N818 - as the API calls it
    """The version that was to be changed is not the one that there is."""


def endpoint(address: str, *, zone: str | None = None, pod: str | None = None, **conditions: bool | None) -> Json:
    target = {"targetRef": {"kind": "Pod", "namespace": "default", "name": pod}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **({"zone": zone} if zone else {}), **target}


def slice_of(
    name: str,
    endpoints: Iterable[Json],
    *,
    service: str = "engines",
    family: str = "IPv4",
    ports: Iterable[tuple[str | None, int | None]] = (("grpc", 9000),),
    namespace: str = "default",
) -> Json:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {SERVICE: service}},
        "addressType": family,
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
        "endpoints": list(endpoints),
    }


class KubeApiServer:
    """Holds slices and what happened to them. ``token`` is what clients must send, if anything. With ``tls`` it speaks
    HTTPS. ``requests`` are the queries that came, lists and watches.
    """

    def __init__(self, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.slices: dict[str, Json] = {}
        self.version = 100
        self.token = token
        self.requests: list[dict[str, str]] = []
        self.gone_as_event = False
        self.delay = 0.0
        self.breaks_after: int | None = None
        self.tls = tls
        self._oldest = self.version
        self._events: list[tuple[int, str, Json]] = []
        self._refusals: list[tuple[int, dict[str, str]]] = []
        self._snapshots: dict[str, tuple[list[Json], int]] = {}
        self._news = asyncio.Event()
        self._watches: set[_Watch] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # What the controller does

    def put(self, item: Json, *, version: int | None = None) -> int:
        """Makes or changes a slice, and says its version. Raises ``Conflict`` where ``version`` is not the last."""
        name = item["metadata"]["name"]
        before = self.slices.get(name)
        if version is not None and (before is None or before["metadata"]["resourceVersion"] != str(version)):
            raise Conflict(name)
        self.version += 1
        item = deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        self.slices[name] = item
        self._happened("MODIFIED" if before else "ADDED", item)
        return self.version

    def delete(self, name: str) -> None:
        item = self.slices.pop(name, None)
        if item is not None:
            self.version += 1
            item = deepcopy(item)
            item["metadata"]["resourceVersion"] = str(self.version)
            self._happened("DELETED", item)

    def bookmark(self) -> None:
        for watch in self._watches:
            watch.bookmarks += 1
        self._wake()

    # What goes wrong

    def compact(self) -> None:
        """Forgets what happened: older versions are 410 Gone, as a status or, ``gone_as_event``, as an event; so are
        lists that go on. Watches that are behind are broken off.
        """
        for watch in self._watches:
            if watch.since < self.version:
                watch.abort()
        self._wake()
        self._events.clear()
        self._oldest = self.version
        self._snapshots.clear()

    def refuse(self, status: int, times: int = 1, **headers: str) -> None:
        """The next requests get this status."""
        self._refusals += [(status, headers)] * times

    def fail_watches(self, code: int, reason: str) -> None:
        """All watches get an ERROR event and end."""
        for watch in self._watches:
            watch.error = {"kind": "Status", "code": code, "reason": reason, "message": reason}
        self._wake()

    def disconnect(self) -> None:
        """All connections break at once."""
        for watch in self._watches:
            watch.abort()
        self._wake()

    @property
    def watching(self) -> int:
        return len(self._watches)

    async def start(self) -> None:
        """Listens, at the same port after every start."""
        application = web.Application()
        application.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Nobody listens any more, and all connections are broken."""
        self.disconnect()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path, namespace: str | None = None) -> str:
        """The path of a file with which the server is reached."""
        context = {"cluster": "fake", "user": "fake", **({"namespace": namespace} if namespace else {})}
        path = folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "fake", "user": {"token": self.token} if self.token else {}}],
                    "contexts": [{"name": "fake", "context": context}],
                }
            )
        )
        return str(path)

    # What clients get

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        await asyncio.sleep(self.delay)
        if self._refusals:
            status, headers = self._refusals.pop(0)
            return _status(status, "Refused", headers)
        if self.token is not None and request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
            return _status(401, "Unauthorized")
        if "watch" in request.query and request.query["watch"].lower() == "true":
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.StreamResponse:
        token, limit = request.query.get("continue"), int(request.query.get("limit", 0))
        if token is not None and token not in self._snapshots:
            return _status(410, "Expired")
        chosen = [item for item in self.slices.values() if _selects(request, item)]
        items, version = self._snapshots.pop(token) if token else (deepcopy(chosen), self.version)
        page, rest = (items[:limit], items[limit:]) if limit else (items, [])
        metadata = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"after-{page[-1]['metadata']['name']}-{version}-{len(rest)}"
            self._snapshots[metadata["continue"]] = (rest, version)
        kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        return web.json_response({**kind, "metadata": metadata, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since > self.version:
            return _status(504, "Timeout")
        if since < self._oldest and not self.gone_as_event:
            return _status(410, "Expired")
        watch = _Watch(request, since)
        await watch.response.prepare(request)
        if since < self._oldest:
            await watch.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            return watch.response
        self._watches.add(watch)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 300))):
                await self._tell(watch)
        except TimeoutError:
            with suppress(ConnectionError):
                await watch.send("BOOKMARK", _bookmark(watch.since))
        except ConnectionError:
            pass
        finally:
            self._watches.discard(watch)
        return watch.response

    async def _tell(self, watch: "_Watch") -> None:
        while True:
            news = self._news
            for version, kind, item in list(self._events):
                if version > watch.since and _selects(watch.request, item):
                    await self._send(watch, kind, item)
                watch.since = max(watch.since, version)
            for _ in range(watch.bookmarks):
                await watch.send("BOOKMARK", _bookmark(watch.since))
            watch.bookmarks = 0
            if watch.error is not None:
                await watch.send("ERROR", watch.error)
                return
            if watch.aborted:
                return
            await news.wait()

    async def _send(self, watch: "_Watch", kind: str, item: Json) -> None:
        if self.breaks_after is not None:
            bytes_of_it, self.breaks_after = self.breaks_after, None
            await watch.send(kind, item, only=bytes_of_it)
            watch.abort()
            raise ConnectionResetError
        await watch.send(kind, item)

    def _happened(self, kind: str, item: Json) -> None:
        self._events.append((self.version, kind, item))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class _Watch:
    def __init__(self, request: web.Request, since: int) -> None:
        self.request = request
        self.since = since
        self.bookmarks = 0
        self.aborted = False
        self.error: Json | None = None
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})

    async def send(self, kind: str, item: Json, only: int | None = None) -> None:
        """``only`` so many bytes of it."""
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        await self.response.write(line[:only])

    def abort(self) -> None:
        self.aborted = True
        if self.request.transport is not None:
            self.request.transport.abort()


def _selects(request: web.Request, item: Json) -> bool:
    key, _, value = request.query.get("labelSelector", "").partition("=")
    labels = item["metadata"]["labels"]
    return item["metadata"]["namespace"] == request.match_info["namespace"] and labels.get(key) == value


def _bookmark(version: int) -> Json:
    return {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(version)}}


def _status(code: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return web.json_response(body, status=code, headers=headers)


@asynccontextmanager
async def kube_api(**options: Any) -> AsyncIterator[KubeApiServer]:
    """A server for the length of a block."""
    server = KubeApiServer(**options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
