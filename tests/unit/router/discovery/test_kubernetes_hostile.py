"""Discovery by the Kubernetes API, whatever it answers: what is known stands, the trouble is told of once, tries are
far apart, and all is well again when the answers are.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from quire_router.clients.kube_client import KubeAccess
from quire_router.discovery import kubernetes
from quire_router.discovery.base import SourceHealth
from quire_router.discovery.kubernetes import EndpointSlices, KubernetesDiscovery, WatchSettings

from tests.support.kube_api import Json, KubeApiServer, endpoint, slice_of
from tests.support.waiting import until
from tests.unit.router.discovery.test_kubernetes import QUICK, SERVICE, Seen, engines, metric, seen_by

KNOWN = ["10.0.0.1:9000"]


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads all that the system believes in for each connection, over HTTP too."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)


class HostileServer(KubeApiServer):
    """Answers with ``listed`` and ``watched`` where they are set. With ``cut`` a watch ends in the middle, else it is
    ended as it should be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listed: bytes | None = None
        self.watched: bytes | None = None
        self.cut = False

    def _list(self, request: web.Request) -> web.StreamResponse:
        return super()._list(request) if self.listed is None else web.Response(body=self.listed)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.watched is None:
            return await super()._watch(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.watched)
        if self.cut and request.transport is not None:
            request.transport.abort()
        return response

    def answer_well(self) -> None:
        self.listed = self.watched = None


class Stage:
    """A hostile server, and discovery that saw it while it was none."""

    def __init__(self, folder: Path, how: WatchSettings = QUICK) -> None:
        self.server = HostileServer()
        self._folder, self._how = folder, how

    async def __aenter__(self) -> tuple[HostileServer, Seen]:
        await self.server.start()
        self.server.put(slice_of("a", engines("10.0.0.1")))
        discovery = KubernetesDiscovery(SERVICE, KubeAccess(self.server.kubeconfig(self._folder)), self._how)
        self._seen = seen_by(discovery)
        seen = await self._seen.__aenter__()
        await until(lambda: seen.addresses == KNOWN and self.server.watching > 0)
        return self.server, seen

    async def __aexit__(self, *_: object) -> None:
        await self._seen.__aexit__(None, None, None)
        await self.server.stop()


def line(kind: object, item: object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def changed(**fields: Any) -> Json:
    """A new version of slice ``a`` with another engine, in which something is different."""
    item = slice_of("a", engines("10.6.6.6"))
    item["metadata"]["resourceVersion"] = "200"
    return {**item, **fields}


def entry(**fields: Any) -> Json:
    return changed(endpoints=[endpoint("10.6.6.6"), {**endpoint("10.6.6.7"), **fields}])


NO_SLICES = {
    "no mapping": [],
    "no metadata": changed(metadata=None),
    "a name that is a number": changed(metadata={"name": 7, "resourceVersion": "200"}),
    "a name that is a list": changed(metadata={"name": [], "resourceVersion": "200"}),
    "endpoints that are text": changed(endpoints="10.0.0.1"),
    "an endpoint that is none": changed(endpoints=[None]),
    "addresses that are text": entry(addresses="10.0.0.1"),
    "another kind of address": entry(addresses=["unix:/run/engine.sock"]),
    "an address with more behind it": entry(addresses=["10.6.6.7:1/"]),
    "an address of the other family": entry(addresses=["fd00::1"]),
    "conditions that are a list": entry(conditions=["ready"]),
    "a zone that is none": entry(zone={"a": "b"}),
    "a port that is too large": changed(ports=[{"name": "grpc", "port": 70000}]),
    "a port that is text": changed(ports=[{"name": "grpc", "port": "9000"}]),
    "a port that is true": changed(ports=[{"name": "grpc", "port": True}]),
    "ports that are a number": changed(ports=5),
}
EVENTS = {
    "no JSON": b"<html>\n",
    "half an event": line("MODIFIED", changed())[:100] + b"\n",
    "no mapping": b"[]\n",
    "nothing in it": b"{}\n",
    "no object": b'{"type":"ADDED"}\n',
    "nested too deep": b"[" * 100_000 + b"\n",
    "no version": line("MODIFIED", changed(metadata={"name": "a"})),
    "a version that is a number": line("MODIFIED", changed(metadata={"name": "a", "resourceVersion": 200})),
    "a version that goes back": line("MODIFIED", changed(metadata={"name": "a", "resourceVersion": "50"})),
    "an error without a status": line("ERROR", None),
    "an error with a code that is a list": line("ERROR", {"code": [410], "reason": "x"}),
    "an error with a code beyond numbers": b'{"type":"ERROR","object":{"code":1e999}}\n',
    "an internal error": line("ERROR", {"code": 500, "reason": "InternalError"}),
    "nothing at all": b"",
}
LISTS = {
    "no JSON": b"not json at all",
    "no slice": b'{"items": [{}], "metadata": {"resourceVersion": "1"}}',
    "no end": b'{"items": [], "metadata": {"resourceVersion": "1", "continue": "more"}}',
    "no list": b'{"items": 7, "metadata": {"resourceVersion": "1"}}',
    "no version": b'{"items": [], "metadata": {}}',
    "too much": b'{"items": [], "metadata": {"resourceVersion": "1"}}' + b" " * 5000,
}


@pytest.mark.parametrize("item", NO_SLICES.values(), ids=NO_SLICES)
def test_a_malformed_slice_is_ignored_as_a_whole(item: Any) -> None:
    slices = EndpointSlices("grpc")
    slices.put(slice_of("a", engines("10.0.0.1")))
    for take in (slices.put, lambda item: slices.replace([slice_of("b", engines("10.0.0.2")), item])):
        with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
            take(item)
        assert [each.address for each in slices.endpoints()] == KNOWN


async def test_no_malformed_watch_event_corrupts_the_view(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Stage(tmp_path) as (server, seen):
        for what, server.watched in EVENTS.items():
            server.disconnect()
            await asked_again(server)
            assert seen.addresses == KNOWN, what
        (told,) = [record.getMessage() for record in caplog.records]
        assert "keeps breaking off: " in told
        server.answer_well()
        server.put(slice_of("a", engines("10.0.0.2")))
        await until(lambda: seen.addresses == ["10.0.0.2:9000"])


async def test_no_malformed_list_corrupts_the_view(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_MAX_PAGES", 5)
    monkeypatch.setattr(kubernetes, "_MAX_LIST", 4096)
    async with Stage(tmp_path) as (server, seen):
        server.fail_watches(410, "Expired")
        for what, server.listed in LISTS.items():
            await asked_again(server)
            assert seen.addresses == KNOWN, what
        await until(lambda: "keeping the engines that are known" in caplog.text)
        assert metric("connected") == 0
        server.answer_well()
        server.put(slice_of("a", engines("10.0.0.2")))
        await until(lambda: seen.addresses == ["10.0.0.2:9000"])
        assert len(caplog.records) == 1
        assert 5 * "c" not in "".join("c" if "continue" in request else "." for request in server.requests)


async def asked_again(server: HostileServer) -> None:
    """Returns once what it answers now was taken, and more was asked for."""
    before = len(server.requests)
    await until(lambda: len(server.requests) >= before + 3)


async def test_an_endless_event_is_aborted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_MAX_EVENT", 4096)
    async with Stage(tmp_path) as (server, seen):
        server.watched = b"x" * 5000
        server.disconnect()
        await until(lambda: "an event without an end" in caplog.text)
        assert seen.addresses == KNOWN


async def test_events_out_of_order_end_in_the_current_state(tmp_path: Path) -> None:
    async with Stage(tmp_path) as (server, seen):
        newer, older = (
            line("MODIFIED", changed(metadata={"name": "a", "resourceVersion": version})) for version in ("900", "800")
        )
        server.watched = newer + older
        server.disconnect()
        before = len(server.requests)
        await until(lambda: any("watch" not in request for request in server.requests[before:]))
        server.answer_well()
        await until(lambda: server.watching > 0)
        assert seen.addresses == KNOWN


@pytest.mark.parametrize("cut", [True, False])
async def test_a_server_that_disconnects_after_each_event_is_retried_with_backoff(cut: bool, tmp_path: Path) -> None:
    how = WatchSettings(backoff=0.001, max_backoff=600, steady=600)
    async with Stage(tmp_path, how) as (server, seen):
        server.watched, server.cut = line("MODIFIED", changed()), cut
        server.disconnect()
        await until(lambda: seen.addresses == ["10.6.6.6:9000"])
        await asyncio.sleep(0.5)
        assert len(server.requests) < 15


async def test_a_watch_that_is_forbidden_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Stage(tmp_path) as (server, seen):

        async def forbidden(request: web.Request) -> web.StreamResponse:
            return web.Response(status=403)

        server._watch = forbidden  # type: ignore[method-assign]
        server.disconnect()
        await until(lambda: "keeps breaking off: 403 Forbidden" in caplog.text)
        server.put(slice_of("a", engines("10.0.0.2")))  # so that it can only list, now and then
        await until(lambda: seen.addresses == ["10.0.0.2:9000"])


def test_what_is_logged_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    health = SourceHealth("source")
    for _ in range(2):
        health.on_failure(5000 * "long\n")
    (told,) = [record.getMessage() for record in caplog.records]
    assert "long long" in told
    assert len(told) < 300


async def test_watches_that_all_end_at_once_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Stage(tmp_path) as (server, _):
        server.watched = b""
        server.disconnect()
        await until(lambda: "keeps breaking off: the watch ended at once" in caplog.text)


@pytest.mark.parametrize("wait", ["Fri, 31 Dec 1999 23:59:59 GMT", "-5", "\u00b2", ""])
async def test_a_retry_after_that_is_no_number_is_ignored(wait: str, tmp_path: Path) -> None:
    async with Stage(tmp_path) as (server, seen):
        server.refuse(429, **{"Retry-After": wait})
        server.disconnect()
        server.put(slice_of("a", engines("10.0.0.2")))
        await until(lambda: seen.addresses == ["10.0.0.2:9000"])
        assert sum("watch" not in request for request in server.requests) == 1
