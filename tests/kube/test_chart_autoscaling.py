"""The autoscaler objects of the chart match the metrics API of the routers of the same release."""

from collections.abc import Mapping
from typing import Any

import pytest
from quire.keda.externalscaler_pb2 import GetMetricsRequest, ScaledObjectRef
from quire_router.autoscale.keda import Scaler
from quire_router.autoscale.local_load import METRIC
from quire_router.config import labels_of

from tests.kube.conftest import Examples
from tests.kube.helm import Helm, HelmError, Manifest, Release
from tests.kube.manifests import components
from tests.kube.policies.access import roles_allow_only_what_is_listed
from tests.kube.settings import Reader, environment
from tests.kube.values import example_values, with_values

TRICKY = [
    "org/model",
    "Org/Model-7B.v1_2",
    "a" * 70,
    "b" * 62 + "/c",
    "x" * 62 + "./-y",
    "9",
    "trailing-",
    "t/.-_",
    "a//b",
]
"""Names of models that are no labels as they are, or nearly none."""


def served(release: Release) -> dict[str, str]:
    """The name that clients know a model by, by the name of its Deployment."""
    return {
        pod.owner["metadata"]["name"]: environment(pod.containers[0])["QUIRE_ENGINE_SERVED_MODEL_NAME"]
        for pod in components(release, "engine")
    }


def scalers(release: Release, kind: str) -> Mapping[str, Manifest]:
    """What scales a model, by the name that clients know it by."""
    names = served(release)
    return {names[item["spec"]["scaleTargetRef"]["name"]]: item for item in release.of(kind)}


def test_every_autoscaler_selects_its_model(helm: Helm) -> None:
    models = {f"m{number}": {"servedName": name, "source": {"path": "/x"}} for number, name in enumerate(TRICKY)}
    release = helm.render({**example_values("hpa"), "models": models})
    found = scalers(release, "HorizontalPodAutoscaler")
    assert sorted(found) == sorted(TRICKY)
    for model, label in labels_of(TRICKY).items():
        (metric,) = found[model]["spec"]["metrics"]
        assert metric["external"]["metric"] == {"name": METRIC, "selector": {"matchLabels": {"model": label}}}


def test_the_api_server_is_sent_to_the_routers(example: Examples) -> None:
    release = example("hpa", "1.37")
    (api_service,) = release.of("APIService")
    assert api_service["metadata"]["name"] == "v1beta1.external.metrics.k8s.io"
    assert (api_service["spec"]["group"], api_service["spec"]["version"]) == ("external.metrics.k8s.io", "v1beta1")
    wanted = api_service["spec"]["service"]
    (service,) = [item for item in release.of("Service") if item["metadata"]["name"] == wanted["name"]]
    (port,) = [entry for entry in service["spec"]["ports"] if entry["port"] == wanted["port"]]
    assert port["targetPort"] == "scaling"
    assert components(release, "router")[0].ports["scaling"] == 8003


def test_the_horizontal_pod_autoscaler_may_read_the_metrics(example: Examples) -> None:
    release = example("hpa", "1.37")
    (role,) = release.of("ClusterRole")
    (binding,) = release.of("ClusterRoleBinding")
    assert role["rules"][0]["apiGroups"] == ["external.metrics.k8s.io"]
    subject = {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}
    assert binding["subjects"] == [subject]
    reader = [item for item in release.of("RoleBinding") if item["metadata"].get("namespace") == "kube-system"]
    assert [item["roleRef"]["name"] for item in reader] == ["extension-apiserver-authentication-reader"]


def test_routers_mark_pods_only_where_that_is_turned_on(helm: Helm, example: Examples, reader: Reader) -> None:
    assert not example("hpa", "1.37").of("Lease")
    release = helm.render(with_values(example_values("hpa"), autoscaling__podDeletionCost=True))
    assert not list(roles_allow_only_what_is_listed(release))
    (lease,) = release.of("Lease")
    (role,) = [role for role in release.of("Role") if role["metadata"]["name"].endswith("-router")]
    rights = [(rule["resources"], rule["verbs"], rule.get("resourceNames")) for rule in role["rules"][1:]]
    name = lease["metadata"]["name"]
    assert rights == [(["pods"], ["patch"], None), (["leases"], ["get", "patch"], [name])]
    assert reader.read(release, components(release, "router")[0]).pod_deletion_cost_lease == name
    without = with_values(example_values("hpa"), autoscaling__podDeletionCost=True, router__discovery="dns")
    with pytest.raises(HelmError, match=r"podDeletionCost is true and router\.discovery is dns"):
        helm.render(without)


class Known:
    """A load that is known."""

    def __init__(self, load: dict[str, int]) -> None:
        self._load = load

    async def read(self) -> dict[str, int]:
        return self._load


@pytest.mark.parametrize("values", ["keda"])
async def test_kedas_trigger_is_accepted_by_the_routers(example: Examples, values: str) -> None:
    release = example(values, "1.37")
    names = list(served(release).values())
    load = {name: number for number, name in enumerate(names, 5)}
    router = Scaler(Known(load), labels_of(names))
    found = scalers(release, "ScaledObject")
    assert set(found) < set(names), "one model of the example is not scaled"
    for model, scaled in found.items():
        (trigger,) = scaled["spec"]["triggers"]
        ask = ScaledObjectRef(name="x", namespace="default", scalerMetadata=trigger["metadata"])
        context: Any = None  # it is for errors only
        (spec,) = (await router.GetMetricSpec(ask, context)).metricSpecs
        assert spec.targetSizeFloat == wanted_load(release, model)
        question = GetMetricsRequest(scaledObjectRef=ask, metricName=spec.metricName)
        (value,) = (await router.GetMetrics(question, context)).metricValues
        assert value.metricValueFloat == load[model]


def wanted_load(release: Release, model: str) -> float:
    """The load of each engine that the values ask for."""
    for key, entry in release.values["models"].items():
        if entry.get("servedName", key) == model:
            return float(entry["autoscaling"].get("targetLoad", 16))
    raise LookupError(model)


def test_keda_finds_the_routers(example: Examples) -> None:
    release = example("keda", "1.37")
    addresses = {item["spec"]["triggers"][0]["metadata"]["scalerAddress"] for item in release.of("ScaledObject")}
    (address,) = addresses
    host, _, port = address.partition(":")
    (service,) = [item for item in release.of("Service") if host.startswith(f"{item['metadata']['name']}.default.")]
    assert int(port) in [entry["port"] for entry in service["spec"]["ports"]]
