"""Discovery by the Kubernetes API agrees with the API server's state, whatever happened to the server meanwhile."""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from quire_router.clients.kube_client import KubeAccess
from quire_router.discovery.base import Endpoint, KubernetesService
from quire_router.discovery.combined import CombinedDiscovery, StaticDiscovery, create_discovery
from quire_router.discovery.kubernetes import KubernetesDiscovery, WatchSettings

from tests.support.certificates import Authority
from tests.support.kube_api import Conflict, Json, KubeApiServer, endpoint, kube_api, slice_of
from tests.support.waiting import until

QUICK = WatchSettings(watch=30, timeout=5, backoff=0.001, max_backoff=0.01)
SERVICE = KubernetesService(None, "engines")


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads all that the system believes in for each connection, over HTTP too."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)


class Seen:
    """What a discovery said last."""

    def __init__(self) -> None:
        self.view: Sequence[Endpoint] | None = None
        self.times = 0

    async def follow(self, discovery: Any) -> None:
        async for view in discovery.watch():
            self.view, self.times = view, self.times + 1

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self.view or ()]


@asynccontextmanager
async def seen_by(discovery: Any) -> AsyncIterator[Seen]:
    seen = Seen()
    task = asyncio.create_task(seen.follow(discovery))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def watched(
    server: KubeApiServer, folder: Path, service: KubernetesService = SERVICE, how: WatchSettings = QUICK
) -> AsyncIterator[Seen]:
    """What discovery sees of the server, from its first list on."""
    access = KubeAccess(server.kubeconfig(folder))
    async with seen_by(KubernetesDiscovery(service, access, how)) as seen:
        await until(lambda: seen.view is not None and server.watching > 0)
        yield seen


def engines(*addresses: str, **conditions: bool) -> list[Json]:
    return [endpoint(address, **conditions) for address in addresses]


def metric(name: str, service: KubernetesService = SERVICE, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"quire_discovery_{name}", {"source": str(service), **labels})


async def test_engines_come_change_and_go_with_what_is_known_of_each(tmp_path: Path) -> None:
    async with kube_api() as server:
        first = endpoint("10.0.0.1", ready=True, zone="z1", pod="engine-0")
        server.put(slice_of("a", [first, endpoint("10.0.0.2", ready=False)]))
        async with watched(server, tmp_path) as seen:
            known = Endpoint("10.0.0.1:9000", zone="z1", pod="default/engine-0")
            assert seen.view == (known, Endpoint("10.0.0.2:9000", ready=False))
            server.put(slice_of("b", [endpoint("10.0.0.3", ready=False, serving=True, terminating=True)]))
            await until(lambda: Endpoint("10.0.0.3:9000", terminating=True) in (seen.view or ()))
            server.delete("a")
            await until(lambda: seen.addresses == ["10.0.0.3:9000"])
            server.delete("b")
            await until(lambda: seen.view == ())


async def test_other_services_and_namespaces_are_ignored(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1")))
        async with watched(server, tmp_path) as seen:
            server.put(slice_of("x", engines("10.9.0.1"), service="others"))
            server.put(slice_of("y", engines("10.9.0.2"), namespace="elsewhere"))
            server.put(slice_of("b", engines("10.0.0.2")))
            await until(lambda: seen.addresses == ["10.0.0.1:9000", "10.0.0.2:9000"])
            assert seen.times == 2


@pytest.mark.parametrize(
    ("configured", "own", "asked"), [("given", "own", "given"), (None, "own", "own"), (None, None, "default")]
)
async def test_the_namespace_is_the_one_given_else_its_own(
    configured: str | None, own: str | None, asked: str, tmp_path: Path
) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1"), namespace=asked))
        server.put(slice_of("b", engines("10.0.0.2"), namespace="wrong"))
        access = KubeAccess(server.kubeconfig(tmp_path, own))
        async with seen_by(KubernetesDiscovery(KubernetesService(configured, "engines"), access, QUICK)) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])


async def test_a_list_of_many_pages_is_one_list(tmp_path: Path) -> None:
    async with kube_api() as server:
        for number in range(230):
            server.put(slice_of(f"s{number:03}", engines(f"10.0.{number}.1")))
        async with watched(server, tmp_path) as seen:
            assert seen.addresses == [f"10.0.{number}.1:9000" for number in range(230)]
        lists = [request for request in server.requests if "watch" not in request]
        assert len(lists) == 3


async def test_after_a_disconnect_it_watches_from_the_last_resource_version_without_a_list(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1")))
        async with watched(server, tmp_path) as seen:
            for number in range(2, 6):
                server.disconnect()
                server.put(slice_of("a", engines(f"10.0.0.{number}")))
                await until(lambda number=number: seen.addresses == [f"10.0.0.{number}:9000"])
                await until(lambda: server.watching > 0)
        assert [request for request in server.requests if "watch" not in request] == server.requests[:1]


async def test_a_watch_that_lasted_is_opened_again_as_soon_as_the_first_time(tmp_path: Path) -> None:
    how = WatchSettings(watch=30, timeout=5, backoff=0.03, max_backoff=600, steady=0)
    async with kube_api() as server:
        async with watched(server, tmp_path, how=how):
            for _ in range(10):
                before = len(server.requests)
                server.disconnect()
                await until(lambda before=before: len(server.requests) > before and server.watching > 0)
        assert len([request for request in server.requests if "watch" not in request]) == 1


async def test_an_event_that_breaks_in_the_middle_is_received_again(tmp_path: Path) -> None:
    async with kube_api() as server, watched(server, tmp_path) as seen:
        for breaks_after in (0, 1, 60, 150):
            server.breaks_after = breaks_after
            server.put(slice_of("a", engines(f"10.0.1.{breaks_after}")))
            await until(lambda said=breaks_after: seen.addresses == [f"10.0.1.{said}:9000"])
            await until(lambda: server.watching > 0)


@pytest.mark.parametrize("as_event", [False, True])
async def test_an_expired_resource_version_leads_to_a_new_list(
    as_event: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kube_api() as server:
        server.gone_as_event = as_event
        server.put(slice_of("a", engines("10.0.0.1")))
        server.put(slice_of("b", engines("10.0.0.2")))
        async with watched(server, tmp_path) as seen:
            await server.stop()
            server.delete("a")
            server.put(slice_of("c", engines("10.0.0.3")))
            server.compact()
            await server.start()
            await until(lambda: seen.addresses == ["10.0.0.2:9000", "10.0.0.3:9000"])
        assert "cannot be read" not in caplog.text


async def test_an_event_of_a_megabyte_comes_in_parts_and_is_one(tmp_path: Path) -> None:
    many = [f"10.0.{number // 250}.{number % 250}" for number in range(1000)]
    async with kube_api() as server, watched(server, tmp_path) as seen:
        for known in (many, many[:999], many[1:]):
            server.put(slice_of("a", [{**each, "nodeName": 1000 * "n"} for each in engines(*known)]))
            await until(lambda known=known: seen.addresses == [f"{address}:9000" for address in known])
        assert len([request for request in server.requests if "watch" not in request]) == 1


async def test_bookmarks_keep_a_quiet_watch_from_having_to_list_again(tmp_path: Path) -> None:
    async with kube_api() as server:
        async with watched(server, tmp_path) as seen:
            server.put(slice_of("a", engines("10.0.0.1")))
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])
            before = time.time()
            server.put(slice_of("x", engines("10.9.0.1"), service="others"))
            server.bookmark()
            await until(lambda: (metric("heard_timestamp_seconds") or 0) > before)
            server.disconnect()
            server.compact()
            server.put(slice_of("a", engines("10.0.0.2")))
            await until(lambda: seen.addresses == ["10.0.0.2:9000"])
        assert len([request for request in server.requests if "watch" not in request]) == 1
        assert all(request["allowWatchBookmarks"].lower() == "true" for request in server.requests[1:])


async def test_a_watch_that_the_server_ends_is_opened_again(tmp_path: Path) -> None:
    async with kube_api() as server:
        async with watched(server, tmp_path, how=WatchSettings(1, 5, 0.001, 0.01)) as seen:
            await until(lambda: len(server.requests) >= 3)
            server.put(slice_of("a", engines("10.0.0.1")))
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])
        assert {request.get("timeoutSeconds") for request in server.requests[1:]} <= {"1", "2"}


async def test_a_lost_server_leaves_the_last_view_valid_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1")))
        async with watched(server, tmp_path) as seen:
            assert metric("connected") == 1
            await server.stop()
            stopped = time.time()
            await until(lambda: metric("connected") == 0 and "cannot query" in caplog.text)
            assert seen.addresses == ["10.0.0.1:9000"]
            assert (metric("heard_timestamp_seconds") or 0) <= stopped
            await server.start()
            await until(lambda: metric("connected") == 1)
            assert "answers again" in caplog.text
            assert caplog.text.count("cannot query") == 1
            assert seen.times == 1


async def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1")))
        access = KubeAccess(server.kubeconfig(tmp_path))
        await server.stop()
        async with seen_by(KubernetesDiscovery(SERVICE, access, QUICK)) as seen:
            await until(lambda: metric("connected") == 0)
            await asyncio.sleep(0.05)
            assert seen.view is None  # unknown is not nothing
            await server.start()
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])


async def test_it_waits_as_long_as_retry_after_says(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.refuse(429, **{"Retry-After": "20"})
        access = KubeAccess(server.kubeconfig(tmp_path))
        async with seen_by(KubernetesDiscovery(SERVICE, access, QUICK)):
            await until(lambda: len(server.requests) == 1)
            await asyncio.sleep(0.2)
            assert len(server.requests) == 1


@pytest.mark.parametrize("conditions", [{"ready": None}, {}, {"serving": True}, {"ready": False, "serving": True}])
async def test_missing_conditions_mean_ready(conditions: dict[str, bool], tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", [endpoint("10.0.0.1", **conditions)]))
        async with watched(server, tmp_path) as seen:
            assert seen.view == (Endpoint("10.0.0.1:9000"),)


async def test_an_engine_in_two_slices_is_one_and_the_live_entry_counts(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1", ready=False, terminating=True)))
        server.put(slice_of("b", engines("10.0.0.1", ready=False)))
        server.put(slice_of("c", [endpoint("10.0.0.1", ready=True, zone="z")]))
        async with watched(server, tmp_path) as seen:
            assert seen.view == (Endpoint("10.0.0.1:9000", zone="z"),)
            server.delete("c")
            await until(lambda: seen.view == (Endpoint("10.0.0.1:9000", ready=False),))
            server.delete("b")
            await until(lambda: seen.view == (Endpoint("10.0.0.1:9000", ready=False, terminating=True),))


async def test_of_two_families_ipv4_counts_even_while_it_is_empty(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("six", engines("fd00::1", "fd00::2"), family="IPv6"))
        async with watched(server, tmp_path) as seen:
            assert seen.addresses == ["[fd00::1]:9000", "[fd00::2]:9000"]
            server.put(slice_of("four", [], family="IPv4"))
            await until(lambda: seen.view == ())
            server.put(slice_of("four", engines("10.0.0.1"), family="IPv4"))
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])


@pytest.mark.parametrize(("port", "told"), [("rpc", "7000"), ("grpc", "9000"), (1234, "1234")])
async def test_the_port_is_that_of_a_name_or_a_number(port: str | int, told: str, tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1"), ports=[("grpc", 9000), ("rpc", 7000), (None, 1)]))
        async with watched(server, tmp_path, KubernetesService(None, "engines", port)) as seen:
            assert seen.addresses == [f"10.0.0.1:{told}"]


async def test_a_slice_without_the_port_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1"), ports=[("http", 80)]))
        async with watched(server, tmp_path) as seen:
            server.put(slice_of("b", engines("10.0.0.2")))
            await until(lambda: seen.addresses == ["10.0.0.2:9000"])
        assert caplog.text.count("no port 'grpc' in a") == 1


async def test_a_pod_uses_its_service_account_and_reads_a_rotated_token_and_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = tmp_path / "account"
    account.mkdir()
    (account / "namespace").write_text("prod\n")
    context = spoken_by(Authority(tmp_path), account)
    (account / "token").write_text("first")
    async with kube_api(token="first", tls=context) as server:
        server.put(slice_of("a", engines("10.0.0.1"), namespace="prod"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        async with seen_by(KubernetesDiscovery(SERVICE, KubeAccess(account=account), QUICK)) as seen:
            await until(lambda: seen.addresses == ["10.0.0.1:9000"])
            server.token = "second"
            server.disconnect()
            server.put(slice_of("a", engines("10.0.0.2"), namespace="prod"))
            await until(lambda: metric("connected") == 0)
            (account / "token").write_text("second")
            await until(lambda: seen.addresses == ["10.0.0.2:9000"])
            (tmp_path / "new").mkdir()
            server.tls = spoken_by(Authority(tmp_path / "new", "new"), tmp_path / "new")
            await server.stop()
            server.put(slice_of("a", engines("10.0.0.3"), namespace="prod"))
            await server.start()
            await until(lambda: metric("connected") == 0)
            (account / "ca.crt").write_bytes((tmp_path / "new" / "ca.crt").read_bytes())
            await until(lambda: seen.addresses == ["10.0.0.3:9000"])


def spoken_by(authority: Authority, account: Path) -> ssl.SSLContext:
    """A server's side of TLS, which who has the files of ``account`` believes."""
    identity = authority.issue("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(identity.certificate, identity.key)
    (account / "ca.crt").write_bytes(authority.ca.read_bytes())
    return context


def test_outside_of_a_pod_there_has_to_be_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="KUBECONFIG"):
        create_discovery(["kubernetes://engines"], dns_period=1)


async def test_several_sources_are_one_list_in_which_each_engine_is_once(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", [*engines("10.0.0.1", terminating=True), *engines("10.0.0.2")]))
        access = KubeAccess(server.kubeconfig(tmp_path))
        sources = {
            "static": StaticDiscovery(["10.0.0.2:9000", "10.0.0.9:9000", "10.0.0.9:9000"]),
            str(SERVICE): KubernetesDiscovery(SERVICE, access, QUICK),
        }
        async with seen_by(CombinedDiscovery(sources)) as seen:
            await until(lambda: seen.addresses == ["10.0.0.2:9000", "10.0.0.9:9000", "10.0.0.1:9000"])
        assert metric("engines", state="terminating") == 1
        assert metric("engines", state="ready") == 1
        assert REGISTRY.get_sample_value("quire_discovery_engines", {"source": "static", "state": "ready"}) == 2


# Whatever happens

NAMES = st.sampled_from(["a", "b", "c"])
ENDPOINTS = st.lists(
    st.builds(
        endpoint,
        st.sampled_from([f"10.0.0.{number}" for number in range(6)]),
        ready=st.booleans(),
        terminating=st.booleans(),
        zone=st.sampled_from([None, "z"]),
    ),
    max_size=4,
)
ACTIONS = st.one_of(
    st.tuples(st.just("put"), NAMES, ENDPOINTS),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(st.just("conflict"), NAMES),
    st.tuples(st.sampled_from(["disconnect", "compact", "bookmark", "stop", "start", "others", "pass"])),
    st.tuples(st.just("refuse"), st.sampled_from([401, 403, 404, 409, 410, 429, 500, 503, 504])),
    st.tuples(st.just("fail"), st.sampled_from([410, 500, 409])),
    st.tuples(st.just("breaks_after"), st.integers(0, 400)),
    st.tuples(st.just("gone_as_event"), st.booleans()),
    st.tuples(st.just("delay"), st.sampled_from([0.0, 0.02])),
)


class Storm:
    """What a list of actions does to a server."""

    def __init__(self, server: KubeApiServer) -> None:
        self.server = server
        self.up = True

    async def do(self, action: tuple[Any, ...]) -> None:
        kind, *values = action
        server = self.server
        match kind:
            case "put":
                server.put(slice_of(values[0], values[1]))
            case "conflict":  # a controller that knew an older version, and writes nothing
                with pytest.raises(Conflict):
                    server.put(slice_of(values[0], []), version=1)
            case "refuse":
                server.refuse(values[0])
            case "fail":
                server.fail_watches(values[0], "Failed")
            case "breaks_after" | "gone_as_event" | "delay":
                setattr(server, kind, values[0])
            case "others":
                server.put(slice_of("x", engines("10.9.0.1"), service="others"))
            case "pass":
                await asyncio.sleep(0.01)
            case "start" | "stop":
                await self.switch(kind == "start")
            case _:
                getattr(server, kind)(*values)
        await asyncio.sleep(0)

    async def switch(self, up: bool) -> None:
        if up != self.up:
            await (self.server.start() if up else self.server.stop())
            self.up = up


def truth(server: KubeApiServer) -> set[Endpoint]:
    """The server's state as it should be seen, worked out from what was put there."""
    best: dict[str, Endpoint] = {}
    for item in server.slices.values():
        for each in item["endpoints"] if item["metadata"]["labels"]["kubernetes.io/service-name"] == "engines" else ():
            said = Endpoint(
                each["addresses"][0] + ":9000",
                each["conditions"]["ready"],
                each["conditions"]["terminating"],
                each.get("zone"),
            )
            options = [said, best.get(said.address, said)]
            best[said.address] = max(options, key=lambda e: (not e.terminating, e.ready, e.zone or ""))
    return set(best.values())


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, max_size=25))
def test_whatever_happens_to_the_server_discovery_agrees_with_it_in_the_end(
    actions: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def story() -> None:
        folder = tmp_path_factory.mktemp("kube")
        async with kube_api() as server:
            storm = Storm(server)
            async with watched(server, folder) as seen:
                for action in actions:
                    await storm.do(action)
                await storm.switch(True)
                await until(lambda: seen.view is not None and set(seen.view) == truth(server))
                assert len(seen.addresses) == len(set(seen.addresses))
                server.put(slice_of("last", engines("10.1.0.1", ready=True, terminating=False)))
                await until(lambda: "10.1.0.1:9000" in seen.addresses and set(seen.view or ()) == truth(server))

    asyncio.run(story())


async def test_a_restarted_watch_yields_the_current_engines_although_nothing_changed(tmp_path: Path) -> None:
    async with kube_api() as server:
        server.put(slice_of("a", engines("10.0.0.1")))
        discovery = KubernetesDiscovery(SERVICE, KubeAccess(server.kubeconfig(tmp_path)), QUICK)
        for _ in range(2):
            async with seen_by(discovery) as seen:
                await until(lambda seen=seen: seen.addresses == ["10.0.0.1:9000"])
