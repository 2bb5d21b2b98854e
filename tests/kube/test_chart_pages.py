"""The values that pages show are values that the chart takes."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.helm import CHART, ROOT, Helm, Release
from tests.kube.validity import problems
from tests.kube.values import example_values, over

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
    named = re.findall(r"(?:existingSecret|apiKeySecret)': '([a-z-]+)", str(example_values("eks-production")))
    assert sorted(created) == sorted(named)


@pytest.mark.parametrize("example", ["eight-gpu", "tensor-parallel"])
def test_the_values_for_clouds_go_with_the_examples_of_eight_gpus(helm: Helm, example: str) -> None:
    shown = [block[0] for block in blocks_of(CLOUDS)]
    assert len(shown) == 5
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


def test_production_needs_neither_a_redis_of_the_cloud_nor_the_prometheus_operator(helm: Helm) -> None:
    """As the comments of its values say."""
    values = example_values("eks-production")
    text = (CHART / "ci" / "eks-production-values.yaml").read_text()
    (instead,) = re.findall(r"write `(redis: .*?)` instead", text)
    del values["monitoring"]
    release = helm.render({**values, **yaml.safe_load(instead)})
    assert problems(helm, release.everything, "1.37") == {}
    assert not {each["kind"] for each in release.everything} & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    (claim,) = release.of("StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    classes = [each["metadata"]["name"] for each in STORAGE if each["kind"] == "StorageClass"]
    assert [claim["spec"]["storageClassName"]] == classes


def test_production_mounts_the_claim_that_the_page_for_clouds_creates() -> None:
    source = example_values("eks-production")["models"]["chat"]["source"]["pvc"]["claimName"]
    volume, claim = STORAGE[:2]
    bound = {"namespace": claim["metadata"]["namespace"], "name": claim["metadata"]["name"]}
    assert source == bound["name"]
    assert volume["spec"]["claimRef"] == bound
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]


def test_the_job_of_the_page_for_clouds_fills_the_claim_of_its_values() -> None:
    edit = re.findall(r"^sed .*?(?=\s*\\?\n? *\| kubectl)", CLOUDS.read_text(), re.MULTILINE | re.DOTALL)
    edited = f"REGISTRY=registry.example.com; {edit[0]}"
    done = subprocess.run(["bash", "-c", edited], cwd=ROOT, check=True, capture_output=True, text=True)
    claim, _, job = yaml.safe_load_all(done.stdout)
    assert claim["spec"]["storageClassName"] == "CLASS"
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


def blocks_of(page: Path) -> Iterator[list[Any]]:
    """The documents of each block of YAML."""
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield list(yaml.safe_load_all(block))


def deployments(release: Release) -> list[str]:
    """The names of the Deployments of a release."""
    return [manifest["metadata"]["name"] for manifest in release.of("Deployment")]
