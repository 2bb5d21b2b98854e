"""Helm's own library installs, upgrades and uninstalls the chart on a server that refuses what Kubernetes refuses."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.helm import CHART, Helm, HelmError, Release
from tests.kube.helm_api import CUSTOM_KINDS, Cluster, Key, at
from tests.kube.values import EXAMPLES, example_values, with_values

Objects = dict[Key, Any]
Lives = Callable[[str], "Life"]
NEEDS = {
    "gateway": ["gateway.networking.k8s.io/v1", "cert-manager.io/v1"],
    "keda": ["keda.sh/v1alpha1"],
    "two-models": ["monitoring.coreos.com/v1"],
}
"""The API versions that an example needs besides those that every cluster has."""
STAYS = {
    "Secret": ["data"],
    "APIService": ["spec.caBundle"],
    "Deployment": ["spec.selector"],
    "StatefulSet": ["spec.selector", "spec.serviceName", "spec.volumeClaimTemplates", "spec.podManagementPolicy"],
    "Service": ["spec.selector", "spec.clusterIP"],
}


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as its next version: nothing is different but the numbers."""
    folder = tmp_path_factory.mktemp("next") / "quire"
    shutil.copytree(CHART, folder)
    description = yaml.safe_load((folder / "Chart.yaml").read_text())
    description.update(version="9.9.9", appVersion="9.9.9")
    (folder / "Chart.yaml").write_text(yaml.safe_dump(description))
    return folder


@dataclass
class Life:
    """What a cluster held at each stage of a release."""

    made: Release
    installed: Objects
    upgraded: Objects
    upgraded_again: Objects
    uninstalled: Objects


@pytest.fixture(scope="module")
def lives(helm: Helm, next_chart: Path) -> Callable[[str], Life]:
    @cache
    def live(values: str) -> Life:
        cluster = Cluster()
        release = helm.cluster(cluster)
        made = release.install(example_values(values))
        stages = [contents(cluster)]
        for _ in range(2):
            release.upgrade(example_values(values), next_chart)
            stages.append(contents(cluster))
        release.uninstall()
        return Life(made, *stages, dict(cluster.added))

    return live


@pytest.mark.parametrize("values", EXAMPLES)
def test_a_release_is_all_there_and_leaves_nothing_behind(lives: Lives, values: str) -> None:
    life = lives(values)
    wanted = {(item["kind"], item["metadata"]["name"]) for item in life.made.manifests}
    assert wanted <= {(key.kind, key.name) for key in life.installed}
    assert sorted(life.uninstalled) == []


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_upgrade_changes_nothing_that_must_stay(lives: Lives, values: str) -> None:
    life = lives(values)
    for key, before in life.installed.items():
        after = life.upgraded[key]
        assert before["metadata"]["uid"] == after["metadata"]["uid"], f"{key} was made anew"
        for path in STAYS.get(key.kind, []):
            assert at(before, path) == at(after, path), f"{key}: {path}"


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_upgrade_to_the_same_changes_nothing(lives: Lives, values: str) -> None:
    life = lives(values)
    assert life.upgraded_again == life.upgraded


def test_from_every_example_to_every_other(helm: Helm, next_chart: Path) -> None:
    cluster = Cluster()
    release = helm.cluster(cluster)
    release.install(example_values(EXAMPLES[0]))
    for values in EXAMPLES[1:]:
        wanted = release.upgrade(example_values(values), next_chart)
        there = {(key.kind, key.name) for key in contents(cluster) if key.kind != "PersistentVolumeClaim"}
        assert there == {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted.manifests}
    release.uninstall()
    assert sorted(cluster.added) == []


def test_two_releases_share_a_namespace(helm: Helm) -> None:
    cluster = Cluster()
    first, second = helm.cluster(cluster, "one"), helm.cluster(cluster, "two")
    first.install(example_values(EXAMPLES[0]))
    alone = contents(cluster)
    second.install(example_values(EXAMPLES[0]))
    second.uninstall()
    assert contents(cluster) == alone


def test_a_selector_that_changes_is_refused(helm: Helm) -> None:
    release = helm.cluster(Cluster())
    release.install(example_values("cpu-demo"))
    with pytest.raises(HelmError, match=r"spec\.selector: immutable"):
        release.upgrade(with_values(example_values("cpu-demo"), nameOverride="other", fullnameOverride="quire"))


def test_another_owners_external_metrics_are_not_taken(helm: Helm) -> None:
    cluster = Cluster()
    name = "v1beta1.external.metrics.k8s.io"
    theirs = {"metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "keda-operator"}}, "spec": {}}
    cluster.create(cluster.kind("apiregistration.k8s.io/v1", "APIService"), "", theirs)
    with pytest.raises(HelmError, match=r"autoscaling\.mode"):
        helm.cluster(cluster).install(example_values("hpa"))
    assert [key for key in cluster.added if key.kind != "APIService"] == []


@pytest.mark.parametrize("values", EXAMPLES)
def test_nothing_else_needs_to_be_installed_than_what_the_example_is_about(helm: Helm, values: str) -> None:
    needed = {group: kinds for group, kinds in CUSTOM_KINDS.items() if group in NEEDS.get(values, ())}
    assert helm.cluster(Cluster(custom_kinds=needed)).install(example_values(values)).manifests


def contents(cluster: Cluster) -> Objects:
    """What a release has made, but for Helm's own records and the numbers of versions."""
    return {
        key: {**value, "metadata": {**value["metadata"], "resourceVersion": None}}
        for key, value in cluster.added.items()
        if not key.name.startswith("sh.helm.release.")
    }
