"""The same release on every cluster and with every helm that there is here: installed, upgraded, tested, taken away.

Where a cluster or a helm is missing, a test of that name is skipped and says why; the tests' own API server, as a
process of its own behind TLS, and a helm command that leads to Helm's library, are always there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.cluster import CLUSTERS, CONSENT, OWN, RealCluster, missing, open_cluster
from tests.kube.custom_kinds import CUSTOM_KINDS
from tests.kube.helm import CHART, Helm, HelmError, Releases, Tool, documents
from tests.kube.helm_binary import HelmBinary, found, stand_in
from tests.kube.previous import known_values, previous_chart
from tests.kube.values import EXAMPLES, NEEDS, example_values, with_values

NO_HELM = "no helm is on the PATH"
WHOLE_CLUSTER = {"hpa"}
"""Examples that register an API for all of a cluster: not on a person's."""


def cases() -> Iterator[Any]:
    """Each cluster with the examples that it is for. The tests' own has had them all in test_chart_releases.py."""
    for cluster in CLUSTERS:
        if why := missing(cluster):
            yield pytest.param(cluster, "", id=cluster, marks=pytest.mark.skip(reason=why))
            continue
        for values in ("keda",) if cluster == OWN else EXAMPLES:
            yield pytest.param(cluster, values, id=f"{cluster}-{values}")


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RealCluster]]:
    """The cluster of a name, opened when a test first asks for it."""
    with ExitStack() as stack:

        @cache
        def opened(name: str) -> RealCluster:
            return stack.enter_context(open_cluster(name, tmp_path_factory.mktemp("cluster")))

        yield opened


@pytest.fixture(params=["library", "command", "stand-in"])
def tool(request: pytest.FixtureRequest, helm: Helm, tmp_path: Path) -> Iterator[Tool]:
    if request.param == "library":
        yield helm
        return
    program = found() if request.param == "command" else stand_in(tmp_path)
    if program is None:
        pytest.skip(NO_HELM)
    with HelmBinary(program) as binary:
        yield binary


def prepare(cluster: RealCluster, values: str) -> None:
    """Has the custom kinds of an example served, or skips."""
    for api_version in NEEDS.get(values, ()):
        if cluster.serves(api_version):
            continue
        if not cluster.own:
            pytest.skip(f"the cluster does not serve {api_version}")
        cluster.define(api_version)
    if values in WHOLE_CLUSTER and not cluster.own:
        pytest.skip(f"{values} registers an API for the whole cluster")


@pytest.mark.parametrize(("name", "values"), list(cases()))
def test_a_release_lives_and_leaves_nothing_behind(
    clusters: Callable[[str], RealCluster], tool: Tool, name: str, values: str
) -> None:
    cluster = clusters(name)
    prepare(cluster, values)
    with cluster.namespace() as namespace:
        release = Releases(tool, cluster.kubeconfig, namespace, namespace)
        before = cluster.contents(namespace, namespace)
        try:
            live(cluster, release, values)
        except BaseException:
            with suppress(HelmError):
                release.uninstall()
            raise
        release.uninstall()
        assert cluster.contents(namespace, namespace) == before


def live(cluster: RealCluster, release: Releases, values: str) -> None:
    """From the previous version to this one, and its tests where Pods run."""
    release.install(known_values(example_values(values)), previous_chart())
    keys = cluster.secret(release.namespace, f"{release.release}-api-keys")
    made = release.upgrade(example_values(values))
    there = cluster.contents(release.namespace, release.release)
    assert {f"{item['kind']}/{item['metadata']['name']}" for item in made.manifests} <= there
    assert cluster.secret(release.namespace, f"{release.release}-api-keys") == keys
    if cluster.plays:
        release.test()


def test_the_command_reports_what_is_wrong(clusters: Callable[[str], RealCluster], helm: Helm, tmp_path: Path) -> None:
    cluster = clusters(OWN)
    with HelmBinary(found() or stand_in(tmp_path)) as binary, cluster.namespace() as namespace:
        release = Releases(binary, cluster.kubeconfig, "quire", namespace)
        with pytest.raises(HelmError, match="router"):
            release.install(with_values(example_values("cpu-demo"), router__replicas="many"))
        assert cluster.contents(namespace, "quire") == set()


@pytest.mark.skipif(found() is None, reason=NO_HELM)
@pytest.mark.parametrize("values", EXAMPLES)
def test_the_command_renders_what_the_library_does(helm: Helm, values: str) -> None:
    program = found()
    assert program is not None
    groups = [version for version in CUSTOM_KINDS if version in NEEDS.get(values, ())]
    with HelmBinary(program) as binary:
        text = binary.template("quire", CHART, example_values(values), "1.37", groups)
    ours = helm.render(example_values(values)).everything
    assert {(item["kind"], item["metadata"]["name"]) for item in documents(text)} == {
        (item["kind"], item["metadata"]["name"]) for item in ours
    }


def test_a_persons_cluster_gets_a_namespace_for_a_while_and_nothing_else(
    clusters: Callable[[str], RealCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(clusters(OWN).kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with open_cluster("KUBECONFIG", tmp_path) as cluster:
        with cluster.namespace() as namespace:
            assert cluster.request("GET", f"/api/v1/namespaces/{namespace}") is not None
            assert cluster.contents(namespace, namespace) == set()
        assert cluster.request("GET", f"/api/v1/namespaces/{namespace}") is None
        with pytest.raises(AssertionError, match="no definitions"):
            cluster.define("monitoring.coreos.com/v1")
        for values, why in (("two-models", "does not serve monitoring"), ("hpa", "the whole cluster")):
            with pytest.raises(pytest.skip.Exception, match=why):
                prepare(cluster, values)


def test_no_cluster_is_touched_without_consent(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump({}))
    assert CONSENT in (missing("KUBECONFIG", {"KUBECONFIG": str(file)}) or "")
    assert CONSENT in (missing("KUBECONFIG", {"KUBECONFIG": str(file), CONSENT: "yes"}) or "")
    assert missing("KUBECONFIG", {"KUBECONFIG": str(file), CONSENT: "1"}) is None
    assert "not set" in (missing("KUBECONFIG", {CONSENT: "1"}) or "")
    assert "no etcd and no kube-apiserver" in (
        missing("KUBEBUILDER_ASSETS", {"KUBEBUILDER_ASSETS": str(tmp_path)}) or ""
    )
