"""What operators set besides: each value that is passed on to Kubernetes arrives where it is meant to."""

import shutil
import tarfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from quire_router.api.rest.openapi import openapi

from tests.kube.conftest import Examples
from tests.kube.helm import CHART, Helm, Release
from tests.kube.manifests import Pod, components, pods
from tests.kube.policies import POLICIES
from tests.kube.previous import previous_chart
from tests.kube.settings import environment
from tests.kube.validity import problems
from tests.kube.values import EVERY_POD, VERSIONS, example_values, with_values

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
VOLUME = [{"name": "data", "configMap": {"name": "data"}}]
MOUNT = [{"name": "data", "mountPath": "/data", "readOnly": True}]
FROM = [{"secretRef": {"name": "proxy"}}, {"configMapRef": {"name": "more", "optional": True}}]
DOWNLOAD = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "3Gi", "ephemeral-storage": "1Gi"}}
BOTH = {
    "env": {"HTTPS_PROXY": "http://proxy.example.com:3128"},
    "envFrom": FROM,
    "volumes": VOLUME,
    "volumeMounts": MOUNT,
    "downloadResources": DOWNLOAD,
    "nodeSelector": {"pool": "llm"},
    "tolerations": [{"key": "llm", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "1000",
    "annotations": {"reloader.stakater.com/auto": "true"},
    "podAnnotations": {"n": "on"},
    "podLabels": {"azure.workload.identity/use": "true", "team": "pod"},
}
PLACEMENT = ("nodeSelector", "tolerations", "affinity", "priorityClassName")
SERVICE = {
    "type": "LoadBalancer",
    "loadBalancerClass": "example.com/internal",
    "loadBalancerSourceRanges": ["10.0.0.0/8"],
    "externalTrafficPolicy": "Local",
    "ipFamilyPolicy": "PreferDualStack",
    "nodePorts": {"http": 30080, "grpc": 30081},
    "annotations": {"cloud.example.com/internal": "true"},
}


@pytest.fixture(scope="module")
def full(helm: Helm) -> Release:
    values = with_values(
        example_values("cpu-demo"),
        commonLabels={"team": "all"},
        image__pullSecrets=["123"],
        trust={"configMap": "authorities", "key": "bundle.pem"},
        networkPolicy__downloadPorts=[443, 3128],
        networkPolicy__engineEgress=[{"ports": [{"port": 2049}]}],
        redis__podLabels={"tier": "memory"},
        redis__podAnnotations={"a": "b"},
        router__service=SERVICE,
        router__serviceAccount__annotations={"eks.amazonaws.com/role-arn": "arn:x"},
        router__autoscaling={"enabled": True, "minReplicas": 3, "maxReplicas": 5, "targetCpu": 60},
        autoscaling__mode="keda",
        tls__mode="certManager",
        telemetry__otlpEndpoint="https://collector.example.com:4317",
        monitoring__dashboards={"enabled": True, "annotations": {"grafana_folder": "LLM"}, "labels": {"team": "x"}},
        **{f"router__{name}": value for name, value in BOTH.items()},
        **{f"models__demo__{name}": value for name, value in BOTH.items()},
        models__demo__schedulerName="volcano",
        models__demo__runtimeClassName="nvidia",
        models__demo__temporaryStorage="9Gi",
        models__demo__tensorParallelSize=2,
        models__demo__sharedMemory="1Gi",
        models__demo__source__download__endpoint="http://hub.example.com:8080",
        models__demo__autoscaling={"scaleUpSeconds": 60, "scaleUpPods": 2},
    )
    return helm.render(values)


def test_all_of_it_is_valid_and_breaks_no_policy(helm: Helm, full: Release) -> None:
    for version in (VERSIONS[0], VERSIONS[-1]):
        assert problems(helm, full.everything, version) == {}
    assert [breach for policy in POLICIES for breach in policy(full)] == []


@pytest.mark.parametrize("component", ["router", "engine"])
def test_pods_have_the_configured_fields(full: Release, component: str) -> None:
    (pod,) = components(full, component)
    spec, container = pod.spec, pod.containers[0]
    assert pod.owner["metadata"]["annotations"] == BOTH["annotations"]
    assert pod.annotations == BOTH["podAnnotations"]
    assert dict(pod.labels).items() >= {**BOTH["podLabels"]}.items()
    assert pod.owner["metadata"]["labels"]["team"] == "all"
    assert spec["imagePullSecrets"] == [{"name": "123"}]
    assert MOUNT[0] in container["volumeMounts"]
    assert VOLUME[0] in spec["volumes"]
    for each in pod.all_containers:
        assert each["envFrom"] == FROM
        assert environment(each)["HTTPS_PROXY"] == BOTH["env"]["HTTPS_PROXY"]
        assert ".svc,.cluster.local" in environment(each)["NO_PROXY"], "what is in the cluster needs no proxy"
        assert environment(each)["no_proxy"] == environment(each)["NO_PROXY"]
        _trusts(pod, each)
    assert [each["resources"] for each in spec["initContainers"]] == [DOWNLOAD]


def _trusts(pod: Pod, container: dict[str, Any]) -> None:
    (volume,) = [volume["configMap"] for volume in pod.volumes if volume["name"] == "trust"]
    assert (volume["name"], volume["items"]) == ("authorities", [{"key": "bundle.pem", "path": "ca.crt"}])
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "trust"]
    for name in ("SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_CERTIFICATE"):
        assert environment(container)[name] == f"{mount}/ca.crt"


@pytest.mark.parametrize("values", EVERY_POD)
def test_every_pod_goes_where_values_send_it_and_has_their_resources(helm: Helm, values: str) -> None:
    """Of each component that has a place among the values; a pod of another fails."""
    given = example_values(values)
    places = {name: of for name, of in DEFAULTS.items() if isinstance(of, dict) and "nodeSelector" in of}
    places |= {f"models__{key}": DEFAULTS["modelDefaults"] for key in given["models"]}
    for place, section in places.items():
        with_values(given, **{f"{place}__{name}": BOTH[name] for name in PLACEMENT})
        for name in {"resources", "downloadResources"} & section.keys():
            with_values(given, **{f"{place}__{name}__limits__cpu": "7"})
    for pod in pods(helm.render(given)):
        assert {name: pod.spec.get(name) for name in PLACEMENT} == {name: BOTH[name] for name in PLACEMENT}, pod.name
        assert {each["resources"]["limits"]["cpu"] for each in pod.all_containers} == {"7"}, pod.name


def test_pods_request_of_their_nodes_disk_what_they_may_write(helm: Helm, example: Examples, full: Release) -> None:
    assert requested_disk(full) == {"engine": "11264Mi", "router": "1280Mi", "redis": None, "test": None}
    # A download of unknown size: as much as the memory has.
    assert requested_disk(example("hpa", "1.37"))["engine"] == "8192Mi"
    values = with_values(
        example_values("hpa"),
        redis__persistence__enabled=False,
        models__demo__resources__limits__memory="400Gi",
        models__demo__volumes=[
            {"name": "disk", "emptyDir": {"sizeLimit": "3Gi"}},
            {"name": "memory", "emptyDir": {"sizeLimit": "9Gi", "medium": "Memory"}},
        ],
        models__demo__volumeMounts=[{"name": name, "mountPath": f"/{name}"} for name in ("disk", "memory")],
        router__temporaryStorage="2Gi",
        router__resources__limits={"memory": "1Gi", "ephemeral-storage": "5Gi"},
    )
    release = helm.render(values)
    assert requested_disk(release) == {"engine": "211968Mi", "router": None, "redis": "8192Mi", "test": None}
    (router,) = components(release, "router")
    assert [volume["emptyDir"]["sizeLimit"] for volume in router.volumes if "emptyDir" in volume] == ["2Gi", "256Mi"]


def requested_disk(release: Release) -> dict[str, str | None]:
    """What the pods of each component request of ephemeral-storage."""
    return {pod.component: pod.containers[0]["resources"]["requests"].get("ephemeral-storage") for pod in pods(release)}


def test_engines_have_what_only_they_need(full: Release) -> None:
    (pod,) = components(full, "engine")
    assert (pod.spec["schedulerName"], pod.spec["runtimeClassName"]) == ("volcano", "nvidia")
    sizes = {volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in pod.volumes if "emptyDir" in volume}
    assert sizes == {"tmp": "9Gi", "shared-memory": "1Gi", "model-demo": "2Gi"}
    (scaled,) = full.of("ScaledObject")
    up = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]
    assert up["stabilizationWindowSeconds"] == 60
    assert [policy["value"] for policy in up["policies"] if policy["type"] == "Pods"] == [2]


def test_routers_are_scaled_by_one_only(full: Release) -> None:
    (scaler,) = full.of("HorizontalPodAutoscaler")
    (pod,) = components(full, "router")
    assert scaler["spec"]["scaleTargetRef"]["name"] == pod.owner["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 5)
    assert scaler["spec"]["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 60}
    assert "replicas" not in pod.owner["spec"]


def test_the_service_has_the_configured_fields(full: Release) -> None:
    (service,) = [item for item in full.of("Service") if item["metadata"]["name"] == "quire-router"]
    assert service["metadata"]["annotations"] == SERVICE["annotations"]
    for name in ("type", "loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy", "ipFamilyPolicy"):
        assert service["spec"][name] == SERVICE[name]
    assert {port["name"]: port["nodePort"] for port in service["spec"]["ports"]} == SERVICE["nodePorts"]


def test_downloads_get_through(full: Release) -> None:
    policies = {item["metadata"]["name"]: item["spec"].get("egress", []) for item in full.of("NetworkPolicy")}
    for component in ("router", "engine"):
        ports = {port["port"] for rule in policies[f"quire-{component}"] for port in rule.get("ports", [])}
        assert ports >= {443, 3128, 8080}
    assert {"ports": [{"port": 2049}]} in policies["quire-engine"]


def test_labels_that_are_given_twice_are_there_once(full: Release) -> None:
    (pod,) = components(full, "router")
    assert pod.labels["team"] == "pod"
    dashboards = [item["metadata"] for item in full.of("ConfigMap") if "-dashboard-" in item["metadata"]["name"]]
    assert {(item["labels"]["team"], item["annotations"]["grafana_folder"]) for item in dashboards} == {("x", "LLM")}


def test_variables_of_ones_own_count(helm: Helm) -> None:
    env = {"OMP_NUM_THREADS": "3", "HTTPS_PROXY": "http://proxy:443", "no_proxy": "x"}
    (pod,) = components(helm.render(with_values(example_values("cpu-demo"), models__demo__env=env)), "engine")
    for name, value in env.items():
        assert [entry["value"] for entry in pod.containers[0]["env"] if entry["name"] == name] == [value]
    assert "NO_PROXY" not in environment(pod.containers[0])


@pytest.mark.parametrize(("seconds", "timeout"), [(99_989, "99999s"), (100_000, "28h"), (10**9, "99999h")])
def test_a_gateway_waits_longer_than_the_router(helm: Helm, seconds: int, timeout: str) -> None:
    values = with_values(example_values("gateway"), router__limits__requestTimeout=seconds)
    (route,) = helm.render(values).of("HTTPRoute")
    assert route["spec"]["rules"][0]["timeouts"] == {"request": timeout, "backendRequest": timeout}


def test_grpc_has_an_ingress_of_its_own_for_the_annotations_that_it_needs(helm: Helm) -> None:
    grpc = {"enabled": True, "hosts": ["llm.example.com"], "annotations": {"haproxy.org/server-proto": "h2"}}
    values = with_values(example_values("tls"), ingress__grpc=grpc)
    rest, calls = sorted(helm.render(values).of("Ingress"), key=lambda each: each["metadata"]["name"])
    assert calls["metadata"]["annotations"] == grpc["annotations"]
    assert "annotations" not in rest["metadata"]
    assert calls["spec"]["ingressClassName"] == rest["spec"]["ingressClassName"]
    ((path, port),) = paths(calls)
    assert (path, port) == ("/quire.v1.Inference", "grpc")
    assert {port for _, port in paths(rest)} == {"http"}
    alone = with_values(example_values("tls"), ingress__enabled=False, ingress__grpc={"enabled": True})
    assert [each["metadata"]["name"] for each in helm.render(alone).of("Ingress")] == [calls["metadata"]["name"]]


def test_ingress_and_gateway_lead_to_what_the_router_publishes(helm: Helm) -> None:
    """``/version`` alone stays inside, with health, metrics, the page and its description of the API."""
    (ingress,) = helm.render(example_values("tls")).of("Ingress")
    (route,) = helm.render(example_values("gateway")).of("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    prefixes = [path for path, _ in paths(ingress)]
    assert [each["path"] for each in rule["matches"]] == [{"type": "PathPrefix", "value": each} for each in prefixes]
    found = {path: [each for each in prefixes if f"{path}/".startswith(f"{each}/")] for path in openapi("0")["paths"]}
    assert [path for path, led in found.items() if not led] == ["/version"]
    assert {each for led in found.values() for each in led} == set(prefixes), "a prefix leads to nothing"


def test_grpc_can_be_closed(helm: Helm) -> None:
    release = helm.render(with_values(example_values("cpu-demo"), router__service__grpc=False))
    assert problems(helm, release.everything, "1.37") == {}
    (service,) = [item for item in release.of("Service") if item["metadata"]["name"] == "quire-router"]
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    open_ports = {
        port["port"]
        for policy in release.of("NetworkPolicy")
        if policy["metadata"]["name"] in ("quire-router", "quire-test")
        for rules in (policy["spec"].get("ingress", []), policy["spec"]["egress"])
        for rule in rules
        for port in rule["ports"]
    }
    assert 8000 in open_ports
    assert 8001 not in open_ports
    assert [pod.name for pod in pods(release) if pod.component == "test"] == ["Pod/quire-test-rest"]


def paths(ingress: dict[str, Any]) -> list[tuple[str, str]]:
    """The paths of its one host, with the names of the ports that they lead to."""
    (rule,) = ingress["spec"]["rules"]
    return [(each["path"], each["backend"]["service"]["port"]["name"]) for each in rule["http"]["paths"]]


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with the previous version's defaults: what ``helm upgrade --reuse-values`` makes of it."""
    folder = tmp_path_factory.mktemp("reused")
    shutil.copytree(CHART, folder / "quire")
    with tarfile.open(previous_chart()) as archive:
        archive.extract("quire/values.yaml", folder, filter="data")
    return folder / "quire"


@pytest.mark.parametrize("values", ["external-redis", "gateway", "hpa", "tls", "two-models"])
def test_values_that_are_new_may_be_missing(helm: Helm, example: Examples, reused: Path, values: str) -> None:
    """With ``--reuse-values`` Helm knows only the defaults of the version that was installed."""
    release = helm.render(example_values(values), chart=reused)
    assert without_spread(without_secrets(release)) == without_spread(without_secrets(example(values, "1.37")))


def without_spread(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but how pods are spread: that version's default was another, and is kept."""
    items = deepcopy(items)
    for item in items:
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"].pop("topologySpreadConstraints", None)
    return items


def without_secrets(release: Release) -> list[dict[str, Any]]:
    """What is the same each time."""
    return [item for item in release.everything if item["kind"] not in ("Secret", "APIService")]
