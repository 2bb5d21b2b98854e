"""``external.metrics.k8s.io`` over TLS: byte for byte what the API defines, to the cluster's front proxy and nobody
else.
"""

import asyncio
import json
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import trustme
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from quire_router.api.rest.http_server import ConnectionLimits, HttpServer, listen
from quire_router.autoscale.external_metrics import ExternalMetrics, is_label_value, quantity
from quire_router.autoscale.proxy_auth import (
    FrontProxy,
    ProxyIdentity,
    UnknownProxyError,
    from_cluster,
    from_file,
    parse_proxy_identity,
)
from quire_router.autoscale.scaling_server import ReloadingSslContext, TlsServer
from quire_router.config import label_of, labels_of
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.support.autoscalers import (
    NAMESPACE,
    PROXY_NAME,
    RESOURCE,
    Cluster,
    KnownLoad,
    ask,
    kubeconfig,
    kubectl,
    value,
)
from tests.support.waiting import until

MODELS = ("llama", "qwen/small")


@dataclass
class Stage:
    cluster: Cluster
    load: KnownLoad
    proxy: FrontProxy
    server: TlsServer
    identity: ProxyIdentity | None = None
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.server.port

    async def get(self, path: str = RESOURCE, method: str = "GET", **headers: str) -> httpx.Response:
        return await ask(self.port, self.contexts.setdefault("proxy", self.cluster.proxy()), path, method, **headers)


@asynccontextmanager
async def serving(
    folder: Path, *, names: tuple[str, ...] = (PROXY_NAME,), known: bool = True, connections: int = 16
) -> AsyncIterator[Stage]:
    cluster, load = Cluster(folder), KnownLoad(**dict.fromkeys(MODELS, 0))
    proxy = FrontProxy(from_file(cluster.proxies_ca, names))
    if known:
        await proxy.refresh()
    certificates = ReloadingSslContext(cluster.router, lambda: proxy.authorities)
    app = ExternalMetrics(load, labels_of(MODELS), NAMESPACE, proxy)
    limits = ConnectionLimits(connections=connections, head=0.5)
    server = TlsServer(app, listen("127.0.0.1", 0, "--http-port"), certificates, limits, handshake=0.5)
    server.start()
    try:
        yield Stage(cluster, load, proxy, server)
    finally:
        await server.stop()


# What the API defines


async def test_a_value_is_served_byte_for_byte(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.load.load["llama"] = 37
        before = datetime.now(UTC).replace(microsecond=0)
        protobuf = "application/vnd.kubernetes.protobuf"
        answer = await stage.get(f"{RESOURCE}?labelSelector=model%3Dllama", accept=protobuf)
        time = answer.json()["items"][0]["timestamp"]
        assert answer.content == (
            b'{"kind":"ExternalMetricValueList","apiVersion":"external.metrics.k8s.io/v1beta1","metadata":{},'
            b'"items":[{"metricName":"quire_load","metricLabels":{"model":"llama"},'
            b'"timestamp":"%b","window":0,"value":"37"}]}\n' % time.encode()
        )
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.headers["cache-control"] == "no-cache, private"
        timestamp = datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        assert before <= timestamp <= before + timedelta(minutes=1)


async def test_discovery_is_served_byte_for_byte(tmp_path: Path) -> None:
    group = (
        b'"name":"external.metrics.k8s.io","versions":[{"groupVersion":"external.metrics.k8s.io/v1beta1",'
        b'"version":"v1beta1"}],"preferredVersion":{"groupVersion":"external.metrics.k8s.io/v1beta1",'
        b'"version":"v1beta1"}'
    )
    async with serving(tmp_path) as stage:
        assert (await stage.get("/apis/external.metrics.k8s.io/v1beta1")).content == (
            b'{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"external.metrics.k8s.io/v1beta1",'
            b'"resources":[{"name":"quire_load","singularName":"","namespaced":true,'
            b'"kind":"ExternalMetricValueList","verbs":["get"]}]}\n'
        )
        wanted = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        groups = await stage.get("/apis", accept=wanted)
        assert groups.content == b'{"kind":"APIGroupList","apiVersion":"v1","groups":[{%b}]}\n' % group
        assert groups.headers["content-type"] == "application/json"
        own = await stage.get("/apis/external.metrics.k8s.io")
        assert own.content == b'{"kind":"APIGroup","apiVersion":"v1",%b}\n' % group


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/", 404, "NotFound"),
        ("/openapi/v2", 404, "NotFound"),
        ("/openapi/v3", 404, "NotFound"),
        ("/api", 404, "NotFound"),
        (RESOURCE.replace("quire_load", "other"), 404, "NotFound"),
        (RESOURCE.replace(NAMESPACE, "other"), 404, "NotFound"),
        (f"{RESOURCE}/x", 404, "NotFound"),
        (f"{RESOURCE}?labelSelector=model%3Dnone", 404, "NotFound"),
        (f"{RESOURCE}?labelSelector=model%3D%3D%3Dx", 400, "BadRequest"),
        (f"{RESOURCE}?labelSelector={'a%2C' * 2100}a", 400, "BadRequest"),
        (f"{RESOURCE}?watch=true", 405, "MethodNotAllowed"),
        (f"{RESOURCE}?{'a=1&' * 40}", 400, "BadRequest"),
    ],
)
async def test_an_error_is_a_status(path: str, status: int, reason: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.get(path)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
        assert document.pop("message").endswith(".")
        kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        assert document == {**kind, "reason": reason, "code": status}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_nothing_can_be_changed(method: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.get(RESOURCE, method)
        assert (answer.status_code, answer.json()["reason"]) == (405, "MethodNotAllowed")


async def test_an_idle_model_is_0_and_a_load_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.get()
        assert [(item["metricLabels"], item["value"]) for item in answer.json()["items"]] == [
            ({"model": "llama"}, "0"),
            ({"model": "qwen_small"}, "0"),
        ]
        stage.load.known = False
        answer = await stage.get()
        assert (answer.status_code, answer.json()["reason"]) == (503, "ServiceUnavailable")
        assert "retry-after" not in answer.headers, "an autoscaler's client would wait for that, many times"
        assert (await stage.get("/apis/external.metrics.k8s.io/v1beta1")).status_code == 200


async def test_a_selector_selects_models_by_their_labels(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.load.load |= {"llama": 3, "qwen/small": 4}
        wanted = {"": 7, "model": 7, "model in (qwen_small, x)": 4, "model!=llama": 4, "!other,model=llama": 3}
        for selector, total in wanted.items():
            path = str(httpx.URL(RESOURCE, params={"labelSelector": selector}))
            assert value(await stage.get(path)) == total, selector


@given(st.integers(0, 10**13))
def test_a_quantity_is_the_number_in_its_shortest_form(number: int) -> None:
    text = quantity(number)
    match = re.fullmatch(r"(0|[1-9][0-9]*)([kMG]?)", text)
    assert match is not None
    assert int(match[1]) * {"": 1, "k": 1000, "M": 10**6, "G": 10**9}[match[2]] == number
    assert match[2] == "G" or number == 0 or int(match[1]) % 1000


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", fullmatch=True))
def test_every_model_has_a_label(model: str) -> None:
    label = label_of(model)
    assert label
    assert is_label_value(label)
    assert label == model or not is_label_value(model)


def test_two_models_cannot_have_one_label() -> None:
    with pytest.raises(ValueError, match="'a/b' and 'a_b' would both be 'a_b'"):
        labels_of(["c", "a/b", "a_b"])


# Who is answered


async def test_health_needs_no_certificate_and_all_else_does(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        nobody = stage.cluster.context()
        for path in ("/healthz", "/readyz", "/livez"):
            assert (await ask(stage.port, nobody, path)).status_code == 200
        group = "/apis/external.metrics.k8s.io/v1beta1"
        for path in ("/", "/apis", "/healthz/", group, RESOURCE, f"{RESOURCE}?watch=1"):
            answer = await ask(stage.port, nobody, path, **{"x-remote-user": "system:admin"})
            assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")
        assert stage.load.reads == 0


async def test_only_the_names_that_are_allowed_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await ask(stage.port, stage.cluster.proxy("somebody"))
        assert (answer.status_code, answer.json()["reason"]) == (403, "Forbidden")
        assert (await stage.get()).status_code == 200


async def test_without_allowed_names_every_client_of_the_authority_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage:
        assert (await ask(stage.port, stage.cluster.proxy("somebody"))).status_code == 200


async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        forged = stage.cluster.context(stage.cluster.issue(trustme.CA(), PROXY_NAME))
        for path in (RESOURCE, "/healthz"):
            with pytest.raises(httpx.TransportError):
                await ask(stage.port, forged, path)


async def test_a_server_certificate_is_not_the_proxys(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        with pytest.raises(httpx.TransportError):
            await ask(stage.port, stage.cluster.context(stage.cluster.router))


async def test_no_client_is_answered_until_the_proxy_is_known(tmp_path: Path) -> None:
    async with serving(tmp_path, known=False) as stage:
        nobody = stage.cluster.context()
        assert [(await ask(stage.port, nobody, path)).status_code for path in ("/healthz", "/livez", "/readyz")] == [
            200,
            200,
            503,
        ]
        assert (await stage.get()).status_code == 503
        await stage.proxy.refresh()
        assert (await ask(stage.port, nobody, "/readyz")).status_code == 200
        assert (await stage.get()).status_code == 200


async def test_a_new_authority_counts_at_once_also_on_old_connections(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        url = f"https://127.0.0.1:{stage.port}{RESOURCE}"
        former = trustme.CA.from_pem(
            stage.cluster.proxies.cert_pem.bytes(), stage.cluster.proxies.private_key_pem.bytes()
        )
        async with httpx.AsyncClient(verify=stage.cluster.proxy()) as old:
            assert (await old.get(url)).status_code == 200
            stage.cluster.proxies = trustme.CA()
            stage.cluster.write()
            await stage.proxy.refresh()
            assert (await old.get(url)).status_code == 403, "its connection was vouched for by the former authority"
            stage.cluster.proxies = former
            stage.cluster.write()
            await stage.proxy.refresh()
            assert (await old.get(url)).status_code == 200, "it connects again instead of being refused for ever"
        assert (await ask(stage.port, stage.cluster.proxy())).status_code == 200


async def test_a_client_that_connects_before_the_proxy_is_known_is_answered_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path, known=False) as stage, httpx.AsyncClient(verify=stage.cluster.proxy()) as early:
        url = f"https://127.0.0.1:{stage.port}{RESOURCE}"
        assert (await early.get(f"https://127.0.0.1:{stage.port}/healthz")).status_code == 200
        assert (await early.get(url)).status_code == 503
        assert (await early.get(f"https://127.0.0.1:{stage.port}/healthz")).status_code == 200
        await stage.proxy.refresh()
        assert [(await early.get(url)).status_code for _ in range(2)] == [401, 200], "nobody asked it for a certificate"


async def test_a_certificate_that_has_expired_is_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        late = stage.cluster.issue(stage.cluster.proxies, PROXY_NAME, not_after=datetime.now(UTC) - timedelta(hours=1))
        with pytest.raises(httpx.TransportError):
            await ask(stage.port, stage.cluster.context(late))


async def test_a_new_certificate_is_shown_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as stage:
        shown = await asyncio.to_thread(_shown, stage)
        stage.cluster.router.key.write_text("broken")
        for _ in range(3):
            assert await asyncio.to_thread(_shown, stage) == shown
        assert [record.getMessage() for record in caplog.records if "stay in use" in record.getMessage()] == [
            f"{stage.cluster.router.key} has no private key in PEM format: the previous certificates stay in use"
        ]
        stage.cluster.issue(stage.cluster.servers, "router", "localhost", "127.0.0.1")
        assert await asyncio.to_thread(_shown, stage) != shown
        assert (await stage.get()).status_code == 200


def _shown(stage: Stage) -> str:
    return ssl.get_server_certificate(("127.0.0.1", stage.port), timeout=5)


# What the cluster says


def config_map(**changes: str) -> dict[str, str]:
    authority = trustme.CA().cert_pem.bytes().decode()
    names = json.dumps([PROXY_NAME, "aggregator"])
    return {"requestheader-client-ca-file": authority, "requestheader-allowed-names": names} | changes


def test_the_config_map_names_the_proxy() -> None:
    data = config_map()
    identity = parse_proxy_identity(data)
    assert identity == ProxyIdentity(
        data["requestheader-client-ca-file"].encode(), frozenset({PROXY_NAME, "aggregator"})
    )
    assert parse_proxy_identity({**data, "requestheader-allowed-names": "[]"}).names == frozenset()
    del data["requestheader-allowed-names"]
    assert parse_proxy_identity(data).names == frozenset()


@pytest.mark.parametrize(
    "changes",
    [
        {"requestheader-client-ca-file": ""},
        {"requestheader-client-ca-file": "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n"},
        {"requestheader-client-ca-file": "é"},
        {"requestheader-allowed-names": "front-proxy-client"},
        {"requestheader-allowed-names": '"front-proxy-client"'},
        {"requestheader-allowed-names": "[1]"},
        {"requestheader-allowed-names": "[" * 100_000},
    ],
)
def test_an_invalid_config_map_allows_no_proxy(changes: dict[str, str]) -> None:
    with pytest.raises(UnknownProxyError):
        parse_proxy_identity(config_map(**changes))


async def test_the_last_config_map_counts_while_the_api_server_is_unreachable() -> None:
    answers: list[Callable[[], ProxyIdentity]] = []

    async def source() -> ProxyIdentity:
        return answers.pop(0)()

    def away() -> ProxyIdentity:
        raise UnknownProxyError("it is away")

    known = parse_proxy_identity(config_map())
    answers += [away, lambda: known, away]
    proxy = FrontProxy(source)
    await proxy.refresh()
    assert not proxy.is_known
    for _ in range(2):
        await proxy.refresh()
        assert proxy.is_known
        assert proxy.authorities == known.authorities


async def test_the_config_map_is_read_from_the_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, asked = config_map(), []

    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((scope["method"], scope["path"]))
        config = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "x"}, "data": data}
        answer = Response(json.dumps(config if data else {}), 200 if data else 403, media_type="application/json")
        await answer(scope, receive, send)

    server = HttpServer(api, listen("127.0.0.1", 0, "--http-port"))
    serving = asyncio.create_task(server.run_until_stopped())
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(kubeconfig({"server": f"http://127.0.0.1:{server.port}"}, {})))
    monkeypatch.setenv("KUBECONFIG", str(file))
    source = from_cluster()
    assert await source() == parse_proxy_identity(data)
    path = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
    assert asked == [("GET", path)]
    data.clear()
    with pytest.raises(UnknownProxyError, match="kube-system/extension-apiserver-authentication cannot be read"):
        await source()
    server.should_exit = True
    await serving
    with pytest.raises(UnknownProxyError):
        await source()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UnknownProxyError):
        await source()


# What some clients do to others


async def test_connections_are_bounded_before_their_handshake_and_released(tmp_path: Path) -> None:
    async with serving(tmp_path, connections=4) as stage:
        silent = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(8)]
        try:
            with pytest.raises(httpx.TransportError):
                await stage.get()
            for each in silent:
                each.setblocking(False)
            await until(lambda: all(map(_ended, silent)))
            assert (await stage.get()).status_code == 200, "the time of a handshake is over"
        finally:
            for each in silent:
                each.close()


def _ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_a_client_that_speaks_neither_tls_nor_http_is_disconnected(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        assert not (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP")
        writer.close()
        secure = await asyncio.open_connection("127.0.0.1", stage.port, ssl=stage.cluster.context())
        secure[1].write(b"\0 nonsense\r\n\r\n")
        assert (await asyncio.wait_for(secure[0].read(), 10)).startswith(b"HTTP/1.1 400")
        secure[1].close()
        assert (await stage.get()).status_code == 200


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = stage.cluster.context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await asyncio.wait_for(reader.read(65536), 10))
        tls.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        writer.write(outgoing.read())
        answer = b""
        while not answer:
            incoming.write(await asyncio.wait_for(reader.read(65536), 10))
            with suppress(ssl.SSLWantReadError):
                answer = tls.read(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


def test_it_serves_on_the_loop_that_routers_run_on(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        async with serving(tmp_path) as stage:
            return [(await stage.get()).status_code for _ in range(20)]

    assert uvloop.run(scenario()) == [200] * 20


# As kubectl asks


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_reads_a_metric(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.load.load["llama"] = 1500
        file = stage.cluster.kubeconfig(stage.port)
        raw = await asyncio.to_thread(kubectl, file, "get", "--raw", f"{RESOURCE}?labelSelector=model%3Dllama")
        assert raw.returncode == 0, raw.stderr
        assert json.loads(raw.stdout)["items"][0]["value"] == "1500"
        listed = await asyncio.to_thread(kubectl, file, "api-resources", "--api-group=external.metrics.k8s.io")
        row = r"^quire_load +external.metrics.k8s.io/v1beta1 +true +ExternalMetricValueList$"
        assert re.search(row, listed.stdout, re.MULTILINE)
        stage.load.known = False
        raw = await asyncio.to_thread(kubectl, file, "get", "--raw", RESOURCE)
        assert raw.returncode == 1
        assert "Redis does not answer" in raw.stderr
