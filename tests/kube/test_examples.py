"""What k8s/ shows is valid, fits the chart, and its walkthrough names what there is."""

import re
from pathlib import Path

import pytest
import yaml
from quire_router.api.rpc.grpc_server import MAX_METADATA_BYTES

from tests.kube.helm import Helm
from tests.kube.validity import problems
from tests.kube.values import example_values
from tests.support import queries
from tests.support.pages import ROOT

FOLDER = ROOT / "k8s"
WALKTHROUGH = (FOLDER / "README.md").read_text()
# Manifests for kubectl; the others are for the collector, eksctl, kind and helm.
MANIFESTS = [
    "gateway.yaml",
    "eks.yaml",
    "endpoint-picker.yaml",
    "envoy.yaml",
    "keda.yaml",
    "keda-prometheus.yaml",
    "otel-collector-deployment.yaml",
    "kind/model.yaml",
    "shared-model.yaml",
]
OTHERS = [
    "eks-cluster.yaml",
    "otel-collector.yaml",
    "kind/cluster.yaml",
    "kind/values.yaml",
    "shared-model-values.yaml",
]


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_every_file_is_looked_at():
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")} == {*MANIFESTS, *OTHERS}


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_a_manifest(helm: Helm, name: str):
    for version in ("1.29", "1.37"):
        assert problems(helm, documents(name), version) == {}


def test_engines_mount_the_claims_of_the_shared_model_and_nothing_is_downloaded(helm: Helm):
    (values,) = documents("shared-model-values.yaml")
    release = helm.render(values)
    assert problems(helm, release.everything, "1.37") == {}
    claims = {each["metadata"]["name"] for each in documents("shared-model.yaml") if each["kind"].endswith("Claim")}
    engines = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in release.of("Deployment")}
    pods = [pod for name, pod in engines.items() if "engine" in name]
    assert len(pods) == len(values["models"])
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    assert {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each} == claims
    assert [each["image"]["reference"] for each in volumes if "image" in each] == [
        values["models"]["imaged"]["source"]["image"]["reference"]
    ]
    assert not any(pod.get("initContainers") for pod in engines.values())


def test_the_chart_takes_the_values_of_the_walkthrough_and_has_what_it_names(helm: Helm):
    (values,) = documents("kind/values.yaml")
    release = helm.render(values)
    assert problems(helm, release.everything, "1.37") == {}
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in release.everything}
    for kind, name in re.findall(r"(service|secret)[ /](quire-[a-z-]+)", WALKTHROUGH):
        assert f"{kind}/{name}" in names
    (claim,) = {each["metadata"]["name"] for each in documents("kind/model.yaml")}
    assert values["models"]["demo"]["source"]["pvc"]["claimName"] == claim
    assert f'"model": "{values["models"]["demo"]["servedName"]}"' in WALKTHROUGH
    for node in documents("kind/cluster.yaml")[0]["nodes"]:
        for mount in node.get("extraMounts", ()):
            assert (ROOT / mount["hostPath"] / "config.json").is_file()
            assert documents("kind/model.yaml")[0]["spec"]["hostPath"]["path"] == mount["containerPath"]


def test_the_route_of_the_endpoint_picker_leads_to_the_charts_pool(helm: Helm):
    deployment, service, route = documents("endpoint-picker.yaml")
    values = example_values("endpoint-picker")
    (pool,) = helm.render(values).of("InferencePool")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": service["spec"]["ports"][0]["port"]}]
    assert values["router"]["engines"] == [f"vllm+kubernetes://{service['metadata']['name']}:8000"]


def test_the_proxy_before_grpc_reaches_the_router_and_bounds_headers_as_the_router_does(helm: Helm):
    config, deployment, _ = documents("envoy.yaml")
    envoy = yaml.safe_load(config["data"]["envoy.yaml"])
    (listener,), (cluster,) = envoy["static_resources"]["listeners"], envoy["static_resources"]["clusters"]
    (chain,) = listener["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    assert manager["max_request_headers_kb"] * 1024 == MAX_METADATA_BYTES
    assert {
        manager["stream_idle_timeout"],
        manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["timeout"],
    } == {"0s"}
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    there = endpoint["endpoint"]["address"]["socket_address"]
    services = [each for each in helm.render(documents("kind/values.yaml")[0]).everything if each["kind"] == "Service"]
    ports = {each["metadata"]["name"]: {port["port"] for port in each["spec"]["ports"]} for each in services}
    assert there["port_value"] in ports[there["address"]]
    heap = envoy["overload_manager"]["resource_monitors"][0]["typed_config"]["max_heap_size_bytes"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {
        "memory": f"{heap * 4 // 3 >> 20}Mi"
    }


def test_the_autoscalers_query_uses_existing_metrics():
    (scaled,) = documents("keda-prometheus.yaml")
    for trigger in scaled["spec"]["triggers"]:
        assert not list(queries.complaints(trigger["metadata"]["query"]))


@pytest.mark.parametrize("page", [FOLDER / "README.md", ROOT / "docker" / "README.md", ROOT / "docs" / "operations.md"])
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9_-]", "", text.lower().replace(" ", "-")) for text in headings}, target
