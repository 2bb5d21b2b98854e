"""Releases are installed, tested, upgraded, rolled back and taken away, several beside each other."""

import copy
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, ClusterError, Release, eventually
from tests.cluster.conftest import CHART, Releases, Values
from tests.cluster.load import undisturbed
from tests.cluster.rows import Row
from tests.kube.previous import known_values, previous_chart
from tests.kube.values import with_values

LEFT = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,pvc,hpa"
"""What a release could leave behind in its namespace."""
EVERYWHERE = "clusterroles,clusterrolebindings,apiservices"
"""What one could leave behind outside of it."""
ONE = {"models__demo__replicas": 1, "router__replicas": 1}
Namespaces = Callable[[], str]


def left(cluster: Cluster, namespace: str, name: str) -> set[str]:
    """What there is in a namespace, and of a release anywhere."""
    own = f"app.kubernetes.io/instance={name}"
    inside = cluster.kubectl("--namespace", namespace, "get", LEFT, "--output", "name")
    outside = cluster.kubectl("get", EVERYWHERE, "--selector", own, "--output", "name")
    return {*inside.split(), *outside.split()} - {"serviceaccount/default", "configmap/kube-root-ca.crt"}


@pytest.mark.row("`helm install --wait`, and `helm uninstall` leaves nothing")
def test_nothing_is_left(
    row: Row, cluster: Cluster, releases: Releases, namespaces: Namespaces, values: Values
) -> None:
    release = releases(namespaces(), "quire")
    before = left(cluster, release.namespace, release.name)
    with row.timed():
        release.set(CHART, values)
    release.uninstall()
    eventually("all is gone", lambda: left(cluster, release.namespace, release.name) == before)


@pytest.mark.row("`helm test`")
def test_helm_test(row: Row, release: Release) -> None:
    with row.timed():
        said = release.test()
    assert said.count("Phase:          Succeeded") == 2


@pytest.mark.row("install and `helm test` under a quota on `limits.cpu`")
def test_a_quota_on_limits(
    row: Row, cluster: Cluster, releases: Releases, namespaces: Namespaces, values: Values
) -> None:
    release = releases(namespaces(), "quire")
    metadata = {"name": "limits", "namespace": release.namespace}
    spec = {"hard": {"limits.cpu": "16", "limits.memory": "24Gi"}}
    cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec})
    limited = with_values(
        copy.deepcopy(values),
        **{f"{name}__resources__limits__cpu": "2" for name in ("models__demo", "router", "redis", "tests")},
    )
    try:
        with row.timed():
            release.set(CHART, limited)
            said = release.test()
        assert said.count("Phase:          Succeeded") == 2
    finally:
        release.uninstall()


@pytest.mark.row("upgrade from the previous version of the chart, and `helm rollback` to it")
def test_upgraded_and_rolled_back(
    row: Row, releases: Releases, namespaces: Namespaces, values: Values, tmp_path: Path
) -> None:
    release = releases(namespaces(), "quire")
    release.set(previous_for_these_images(tmp_path), known_values(values))
    try:
        with row.client(release):
            release.set(CHART, values)
            release.settled()
            release.helm("rollback", release.name, "--wait", "--timeout", "300s")
            release.settled()
    finally:
        release.uninstall()


def previous_for_these_images(folder: Path) -> Path:
    """The previous chart with this version's images, whose engines listen for others only with a token, which that
    chart does not make, or with this variable.
    """
    with tarfile.open(previous_chart()) as archive:
        archive.extractall(folder, filter="data")
    engine = folder / "quire" / "templates" / "engine" / "deployment.yaml"
    before, env, after = engine.read_text().partition("          env:\n")
    assert env
    engine.write_text(f'{before}{env}            - {{name: QUIRE_ENGINE_INSECURE, value: "true"}}\n{after}')
    return folder / "quire"


@pytest.mark.row("two releases in one namespace: one is taken away")
def test_two_in_one_namespace(row: Row, release: Release, releases: Releases, values: Values) -> None:
    side_by_side(row, release, releases(release.namespace, "other"), values)


@pytest.mark.row("two releases of one name in two namespaces: one is taken away")
def test_two_in_two_namespaces(
    row: Row, release: Release, releases: Releases, namespaces: Namespaces, values: Values
) -> None:
    side_by_side(row, release, releases(namespaces(), release.name), values)


def side_by_side(row: Row, release: Release, other: Release, values: Values) -> None:
    """Each answers its own clients; ``other`` goes while ``release`` has some."""
    release.settled()
    other.set(CHART, with_values(copy.deepcopy(values), **ONE))
    with ExitStack() as stack:
        stack.enter_context(row.client(release))
        with row.client(other):
            pass
        other.uninstall()


@pytest.mark.row("two models, of which one is drained for good: the other's client, and its own until then")
def test_a_model_is_taken_out(row: Row, releases: Releases, namespaces: Namespaces, values: Values) -> None:
    release = releases(namespaces(), "quire")
    both = with_values(copy.deepcopy(values), **ONE)
    both["models"]["second"] = {**both["models"]["demo"], "servedName": "quire-second"}
    release.set(CHART, both)
    try:
        with row.client(release, more=0), row.client(release, "quire-second", more=0) as load:
            load.answers(2)
        with row.client(release):
            one = copy.deepcopy(both)
            del one["models"]["second"]
            release.set(CHART, one)
            release.settled()
            eventually("its engines are gone", lambda: not release.pods("engine", "second"))
        with pytest.raises(ClusterError, match=r"404: .*quire-second"):
            undisturbed(release, row.node, "quire-second")
    finally:
        release.uninstall()
