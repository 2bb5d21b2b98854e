"""``helm test``, by Helm's own library: its pods run as processes against a router and an engine, and get what the
release gives them.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kube.helm import ROOT, Helm, HelmError, Releases
from tests.kube.helm_api import Cluster, Key
from tests.kube.pod_player import PodPlayer, secret
from tests.kube.values import example_values, with_values
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Router

MODEL = ROOT / "demo" / "model"
NAME = "quire-demo"
SMALL = ("--kv-cache-memory", str(64 << 20))
KEYS = Key("Secret", "default", "quire-api-keys")


@dataclass
class Served:
    """A release, and a router with its key in the place of its Pods."""

    cluster: Cluster
    release: Releases
    router: Router

    def test(self) -> dict[str, str]:
        """What the pods of ``helm test`` have said."""
        host = "quire-router.default.svc"
        addresses = {f"{host}:8000": f"127.0.0.1:{self.router.http_port}", f"{host}:8001": self.router.grpc_address}
        pods = PodPlayer(self.cluster, addresses)
        self.cluster.play = pods
        try:
            self.release.test()
        except HelmError as error:
            pods.outputs["helm"] = str(error)
        return pods.outputs


@pytest.fixture(scope="module")
def served(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cluster, folder = Cluster(), tmp_path_factory.mktemp("served")
    release = helm.cluster(cluster)
    release.install(with_values(example_values("cpu-demo"), models__demo__servedName=NAME))
    key = secret(cluster, KEYS.name)["api-keys"]
    engine = ForkedEngine(MODEL, folder, *SMALL)
    router = ForkedRouter(MODEL, [engine.address], folder, QUIRE_ROUTER_API_KEY=key)
    try:
        engine.wait_ready()
        router.wait_ready()
        yield Served(cluster, release, router)
    finally:
        codes = [process.stop() for process in (router, engine)]
    assert codes == [0, 0], (router.text, engine.text)


def test_helm_test_passes_where_both_apis_answer(served: Served) -> None:
    outputs = served.test()
    assert set(outputs) == {"quire-test-rest", "quire-test-grpc"}, outputs
    assert all("answered over" in output for output in outputs.values()), outputs


def test_helm_test_fails_with_a_key_that_is_not_the_routers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    other = base64.b64encode(b"of-another-release-" + 32 * b"x").decode()
    monkeypatch.setitem(served.cluster.objects[KEYS], "data", {"api-keys": other})
    outputs = served.test()
    assert "quire-test-grpc failed" in outputs["helm"]
    assert set(outputs) == {"helm", "quire-test-grpc"}, "the first that fails ends it"


def test_helm_test_fails_without_its_key(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(served.cluster.objects, KEYS)
    outputs = served.test()
    assert "failed" in outputs["helm"]
    assert KEYS.name in outputs["quire-test-grpc"]
