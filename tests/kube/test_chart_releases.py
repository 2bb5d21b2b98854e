"""Helm's own library installs, upgrades and uninstalls the chart on a server that refuses what Kubernetes refuses."""

import shutil
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from quire_proto.engine_token import Tokens, read_tokens

from tests.kube.custom_kinds import CUSTOM_KINDS
from tests.kube.helm import CHART, Helm, HelmError, Release
from tests.kube.helm_api import Cluster, Key, at
from tests.kube.previous import known_values, previous_chart
from tests.kube.values import EXAMPLES, NEEDS, NEW, example_values, with_values

Objects = dict[Key, Any]
Lives = Callable[[str], "Life"]
STAYS = {
    "Secret": ["data"],
    "APIService": ["spec.caBundle"],
    "Deployment": ["spec.selector"],
    "StatefulSet": ["spec.selector", "spec.serviceName", "spec.volumeClaimTemplates", "spec.podManagementPolicy"],
    "Service": ["spec.selector", "spec.clusterIP"],
}
"""What an upgrade must leave as it is; of data, what was there before."""
NEVER_GONE = ("Deployment", "StatefulSet", "Service", "Secret", "PersistentVolumeClaim", "APIService", "Certificate")
GENERATED = {"quire-api-keys": "api-keys", "quire-redis": "redis-password"}


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as a later version: nothing is different but the numbers."""
    folder = tmp_path_factory.mktemp("next") / "quire"
    shutil.copytree(CHART, folder)
    description = yaml.safe_load((folder / "Chart.yaml").read_text())
    description.update(version="9.9.9", appVersion="9.9.9")
    (folder / "Chart.yaml").write_text(yaml.safe_dump(description))
    return folder


@dataclass
class Life:
    """What a cluster held at each stage of a release that began with the previous version."""

    made: Release
    installed: Objects
    upgraded: Objects
    upgraded_again: Objects
    uninstalled: Objects


@pytest.fixture(scope="module")
def lives(helm: Helm) -> Callable[[str], Life]:
    @cache
    def live(values: str) -> Life:
        # Nothing else is there than what the example is about.
        cluster = Cluster(custom_kinds={version: CUSTOM_KINDS[version] for version in NEEDS.get(values, ())})
        release = helm.cluster(cluster)
        if values in NEW:
            release.install(example_values(values))
        else:
            release.install(known_values(example_values(values)), previous_chart())
        installed = contents(cluster)
        made = release.upgrade(example_values(values))
        upgraded = contents(cluster)
        release.upgrade(example_values(values))
        upgraded_again = contents(cluster)
        release.uninstall()
        return Life(made, installed, upgraded, upgraded_again, dict(cluster.added))

    return live


def test_the_previous_version_is_another() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert previous_chart().name != f"{chart['name']}-{chart['version']}.tgz"


@pytest.mark.parametrize("values", EXAMPLES)
def test_a_release_is_all_there_and_leaves_nothing_behind(lives: Lives, values: str) -> None:
    life = lives(values)
    wanted = {(item["kind"], item["metadata"]["name"]) for item in life.made.manifests}
    there = {(key.kind, key.name) for key in life.upgraded}
    assert wanted <= there
    assert {kind for kind, _ in there - wanted} <= {"PersistentVolumeClaim"}, "what the previous version made has gone"
    assert sorted(life.uninstalled) == []


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_upgrade_from_the_previous_version_changes_nothing_that_must_stay(lives: Lives, values: str) -> None:
    life = lives(values)
    for key, before in life.installed.items():
        if key.kind not in NEVER_GONE and key not in life.upgraded:
            continue
        after = life.upgraded[key]
        assert before["metadata"]["uid"] == after["metadata"]["uid"], f"{key} was made anew"
        for path in STAYS.get(key.kind, []):
            there = at(after, path)
            kept = {name: there.get(name) for name in before["data"]} if path == "data" else there
            assert at(before, path) == kept, f"{key}: {path}"


@pytest.mark.parametrize("values", EXAMPLES)
def test_generated_secrets_survive(lives: Lives, values: str) -> None:
    life = lives(values)
    for stage in (life.upgraded, life.upgraded_again):
        for name, key in GENERATED.items():
            secrets = [each["data"] for where, each in stage.items() if (where.kind, where.name) == ("Secret", name)]
            earlier = [
                each["data"] for where, each in life.installed.items() if (where.kind, where.name) == ("Secret", name)
            ]
            assert [data[key] for data in secrets] == [data[key] for data in earlier]


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_upgrade_to_the_same_changes_nothing(lives: Lives, values: str) -> None:
    life = lives(values)
    assert life.upgraded_again == life.upgraded


def test_engines_let_routers_of_the_former_release_in_for_a_time(helm: Helm, tmp_path: Path) -> None:
    """The old routers have no token. Those of a first install do, and nobody is let in without."""

    def tokens(cluster: Cluster) -> Tokens:
        (secret,) = [each for where, each in contents(cluster).items() if where.name == "quire-engine-token"]
        (tmp_path / "tokens").write_bytes(b64decode(secret["data"]["tokens"]))
        return read_tokens(tmp_path / "tokens")

    values, fresh, upgraded = example_values("cpu-demo"), Cluster(), Cluster()
    helm.cluster(fresh).install(values)
    assert tokens(fresh).optional_until is None
    release = helm.cluster(upgraded)
    release.install(known_values(values), previous_chart())
    release.upgrade(with_values(values, engineToken={"upgradeSeconds": 600}))
    until = tokens(upgraded).optional_until
    assert until is not None
    assert abs((until - datetime.now(UTC)).total_seconds() - 600) < 300
    before = tokens(upgraded)
    release.upgrade(values)
    assert tokens(upgraded) == before
    assert len({tokens(each).values for each in (fresh, upgraded)}) == 2


@pytest.mark.parametrize("values", ["cpu-demo", "tls"])
def test_the_way_back_to_the_previous_version_leaves_nothing_of_this_one(helm: Helm, values: str) -> None:
    cluster = Cluster()
    release = helm.cluster(cluster)
    release.install(known_values(example_values(values)), previous_chart())
    before = contents(cluster)
    release.upgrade(example_values(values))
    assert contents(cluster) != before
    release.upgrade(known_values(example_values(values)), previous_chart())
    assert contents(cluster) == before


def test_from_every_example_to_every_other(helm: Helm, next_chart: Path) -> None:
    """All with one storage class, as no upgrade changes that of a volume."""
    cluster = Cluster()
    release = helm.cluster(cluster)
    release.install(example_values(EXAMPLES[0]))
    for values in EXAMPLES[1:]:
        one_class = with_values(example_values(values), redis__persistence__storageClass="")
        wanted = release.upgrade(one_class, next_chart)
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


@pytest.mark.parametrize(
    ("values", "version", "kind"),
    [("hpa", "autoscaling/v2", "HorizontalPodAutoscaler"), ("keda", "keda.sh/v1alpha1", "ScaledObject")],
)
def test_a_second_autoscaler_of_the_same_engines_is_refused(helm: Helm, values: str, version: str, kind: str) -> None:
    cluster = Cluster()
    made = helm.cluster(cluster).install(example_values(values))
    helm.cluster(cluster).upgrade(example_values(values))  # its own are no second ones
    own = next(manifest for manifest in made.manifests if manifest["kind"] == kind)
    theirs = {"metadata": {"name": "theirs", "namespace": "default"}, "spec": own["spec"]}
    cluster.create(cluster.kind(version, kind), "default", theirs)
    with pytest.raises(HelmError, match=rf"{kind} theirs scales the Deployment .*autoscaling\.enabled to false"):
        helm.cluster(cluster).upgrade(example_values(values))


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_example_needs_its_documented_prerequisites(lives: Lives, values: str) -> None:
    used = {manifest["apiVersion"] for manifest in lives(values).made.manifests}
    assert used & set(CUSTOM_KINDS) == set(NEEDS.get(values, ()))


def contents(cluster: Cluster) -> Objects:
    """What a release has made, but for Helm's own records and the numbers of versions."""
    return {
        key: {**value, "metadata": {**value["metadata"], "resourceVersion": None}}
        for key, value in cluster.added.items()
        if not key.name.startswith("sh.helm.release.")
    }
