"""The values that pages show are values that the chart takes."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.helm import CHART, ROOT, Helm, Release
from tests.kube.validity import problems
from tests.kube.values import example_values, over, with_values

PAGES = (CHART / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "gateways.md")
CLOUDS = ROOT / "docs" / "cloud.md"
STORAGE = list(yaml.safe_load_all((ROOT / "k8s" / "eks.yaml").read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_values_that_a_page_shows_can_be_installed(helm: Helm, page: Path) -> None:
    shown = list(values_of(page))
    assert shown
    for values in shown:
        assert set(values["models"]) <= {
            name.removeprefix("quire-engine-") for name in deployments(helm.render(values))
        }


def test_the_secrets_that_the_operations_guide_creates_are_those_that_its_values_name() -> None:
    text = PAGES[1].read_text()
    created = set(re.findall(r"create secret generic (\S+)", text))
    (values,) = values_of(PAGES[1])
    named = re.findall(r"(?:tokenSecret|existingSecret|apiKeySecret)': '([a-z-]+)", str(values))
    assert created == set(named)


def test_the_page_for_clouds_creates_the_secrets_of_its_values_for_production() -> None:
    _, _, section = CLOUDS.read_text().partition("\n## EKS\n")
    created = re.findall(r"create secret generic (\S+)", section.partition("\n## ")[0])
    values = over(example_values("eks-production"), shown_as("more.yaml"))
    named = re.findall(r"(?:existingSecret|apiKeySecret)': '([a-z-]+)", str(values))
    assert sorted(created) == sorted(named)


def test_the_first_commands_for_eks_write_a_readers_names_wherever_a_file_says_change(tmp_path: Path) -> None:
    (edit,) = re.findall(r"^sed -i .*?(?=^```)", CLOUDS.read_text(), re.MULTILINE | re.DOTALL)
    files = edit.split()[-3:]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    names = {"ACCOUNT": "999", "AWS_REGION": "eu-west-1", "BUCKET": "ours", "DOMAIN": "llm.ours.org"}
    subprocess.run(["bash", "-c", edit], cwd=tmp_path, env={**os.environ, **names}, check=True)
    for file in files:
        lines = zip((ROOT / file).read_text().splitlines(), (tmp_path / file).read_text().splitlines(), strict=True)
        assert [before for before, after in lines if ("# CHANGE" in before) != (before != after)] == []
    cluster, storage, values = ((tmp_path / file).read_text() for file in files)
    assert "region: eu-west-1 " in cluster
    assert [f'"arn:aws:s3:::{path}"' in cluster for path in ("ours", "ours/*")] == [True, True]
    assert "bucketName: ours}" in storage
    assert "region eu-west-1]" in storage
    assert "registry: 999.dkr.ecr.eu-west-1.amazonaws.com/quire " in values
    assert "hosts: [llm.ours.org]" in values


def test_the_cluster_for_eks_has_what_the_values_and_the_storage_need() -> None:
    (cluster,) = yaml.safe_load_all((ROOT / "k8s" / "eks-cluster.yaml").read_text())
    drivers = {"ebs.csi.aws.com": "aws-ebs-csi-driver", "s3.csi.aws.com": "aws-mountpoint-s3-csi-driver"}
    needed = {drivers[each.get("provisioner") or each["spec"]["csi"]["driver"]] for each in (STORAGE[0], STORAGE[2])}
    assert needed < {each["name"] for each in cluster["addons"]}
    (account,) = (each["metadata"]["name"] for each in cluster["iam"]["serviceAccounts"])
    text = CLOUDS.read_text()
    assert (
        f"clusterName={cluster['metadata']['name']},serviceAccount.create=false,serviceAccount.name={account}" in text
    )


def test_on_eks_only_engines_run_on_the_gpus_which_cost_nothing_before_the_page_asks_for_them(helm: Helm) -> None:
    (cluster,) = yaml.safe_load_all((ROOT / "k8s" / "eks-cluster.yaml").read_text())
    gpus, _ = cluster["managedNodeGroups"]
    assert (gpus["minSize"], gpus["desiredCapacity"]) == (0, 0)
    assert f"--cluster {cluster['metadata']['name']} --name {gpus['name']} --nodes 1" in CLOUDS.read_text()
    (taint,) = gpus["taints"]
    drivers = {each["name"]: each.get("configurationValues") for each in cluster["addons"]}
    assert yaml.safe_load(drivers["aws-mountpoint-s3-csi-driver"]) == {"node": {"tolerateAllTaints": True}}
    for values in (example_values("eks-production"), example_values("tensor-parallel")):
        workloads = helm.render(values).of("Deployment", "StatefulSet")
        tolerated = {
            each["metadata"]["name"]
            for each in workloads
            for toleration in each["spec"]["template"]["spec"].get("tolerations", ())
            if (toleration["key"], toleration["effect"]) == (taint["key"], taint["effect"])
        }
        assert tolerated == {"quire-engine-chat"}


def test_the_model_that_the_page_sets_for_eks_is_served_from_the_folder_that_it_fills(helm: Helm) -> None:
    _, _, section = CLOUDS.read_text().partition("\n## EKS\n")
    sets = re.findall(r"--set (models\.\S+\$\S+)", section)
    assert len(sets) == 2
    for each in sets:
        paths = dict(pair.split("=") for pair in each.split(","))
        filled = {"$MODEL": "org/A-1", "${MODEL##*/}": "A-1"}
        changes = {path.replace(".", "__"): filled[value] for path, value in paths.items()}
        release = helm.render(with_values(example_values("eks-production"), **changes))
        (engine,) = (each for each in release.of("Deployment") if each["metadata"]["name"] == "quire-engine-chat")
        shown = str(engine["spec"]["template"]["spec"]["containers"])
        assert "'org/A-1'" in shown
        assert "/A-1'" in shown
    kept = with_values(example_values("eks-production"), models__chat__autoscaling__minReplicas=8)
    assert "--set models.chat.autoscaling.minReplicas=8" in section
    assert helm.render(kept).of("HorizontalPodAutoscaler")[0]["spec"]["minReplicas"] == 8


def test_production_is_tested_once_and_the_page_says_so(helm: Helm) -> None:
    (test,) = helm.render(example_values("eks-production")).of("Pod")
    assert test["metadata"]["name"] == "quire-test-rest"
    assert re.findall(r"^helm test .*# (.*)", CLOUDS.read_text(), re.MULTILINE)[0] == "Phase: Succeeded"


def test_a_file_of_the_page_keeps_production_inside_of_the_network(helm: Helm) -> None:
    release = helm.render(over(example_values("eks-production"), shown_as("internal.yaml")))
    assert problems(helm, release.everything, "1.37") == {}
    annotations = release.of("Ingress")[0]["metadata"]["annotations"]
    assert annotations["alb.ingress.kubernetes.io/scheme"] == "internal"
    assert "HTTPS" in annotations["alb.ingress.kubernetes.io/listen-ports"]


@pytest.mark.parametrize("example", ["eight-gpu", "tensor-parallel"])
def test_the_values_for_clouds_go_with_the_examples_of_eight_gpus(helm: Helm, example: str) -> None:
    shown = [block[0] for block in blocks_of(CLOUDS)]
    assert len(shown) == 6
    for values in shown:
        assert problems(helm, helm.render(over(example_values(example), values)).everything, "1.37") == {}


def test_one_engine_on_eight_gpus_takes_the_place_of_eight_in_production(helm: Helm) -> None:
    values = over(example_values("eks-production"), example_values("tensor-parallel"))
    release = helm.render(values)
    assert problems(helm, release.everything, "1.37") == {}
    (engine,) = (each for each in release.of("Deployment") if each["metadata"]["name"] == "quire-engine-chat")
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (scaler,) = release.of("HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (1, 1)


def test_production_keeps_redis_on_a_volume_of_the_class_that_the_page_for_clouds_creates(helm: Helm) -> None:
    release = helm.render(example_values("eks-production"))
    (claim,) = release.of("StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    classes = [each["metadata"]["name"] for each in STORAGE if each["kind"] == "StorageClass"]
    assert [claim["spec"]["storageClassName"]] == classes


def test_production_gets_a_redis_of_the_cloud_and_alerts_from_the_file_of_the_page(helm: Helm) -> None:
    monitors = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    plain = helm.render(example_values("eks-production"))
    assert not {each["kind"] for each in plain.everything} & monitors
    release = helm.render(over(example_values("eks-production"), shown_as("more.yaml")))
    assert problems(helm, release.everything, "1.37") == {}
    assert {each["kind"] for each in release.everything} >= monitors
    assert not release.of("StatefulSet")


def test_production_mounts_the_claim_that_the_page_for_clouds_creates() -> None:
    source = example_values("eks-production")["models"]["chat"]["source"]["pvc"]["claimName"]
    volume, claim = STORAGE[:2]
    bound = {"namespace": claim["metadata"]["namespace"], "name": claim["metadata"]["name"]}
    assert source == bound["name"]
    assert volume["spec"]["claimRef"] == bound
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]


def test_the_job_of_the_page_for_clouds_fills_the_claim_of_its_values() -> None:
    edit = re.findall(r"^sed -e .*?(?=\s*\\?\n? *\| kubectl)", CLOUDS.read_text(), re.MULTILINE | re.DOTALL)
    edited = f"REGISTRY=registry.example.com CLASS=shared; {edit[0]}"
    done = subprocess.run(["bash", "-c", edited], cwd=ROOT, check=True, capture_output=True, text=True)
    claim, _, job = yaml.safe_load_all(done.stdout)
    assert claim["spec"]["storageClassName"] == "shared"
    model = example_values("eight-gpu")["models"]["chat"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/quire-engine:0.1.0-cuda"
    assert model["servedName"] in container["command"]
    assert f"/models/{model['source']['pvc']['folder']}" in container["command"]
    assert claim["metadata"]["name"] == model["source"]["pvc"]["claimName"]


def values_of(page: Path) -> Iterator[dict[str, Any]]:
    """The examples of whole values, which name models."""
    for block in blocks_of(page):
        if isinstance(block[0], dict) and "models" in block[0]:
            yield block[0]


def shown_as(file: str) -> dict[str, Any]:
    """The values that the page for clouds shows under the name of a file."""
    (text,) = re.findall(rf"^```yaml\n# {file}\n(.*?)^```", CLOUDS.read_text(), re.MULTILINE | re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def blocks_of(page: Path) -> Iterator[list[Any]]:
    """The documents of each block of YAML."""
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield list(yaml.safe_load_all(block))


def deployments(release: Release) -> list[str]:
    """The names of the Deployments of a release."""
    return [manifest["metadata"]["name"] for manifest in release.of("Deployment")]
