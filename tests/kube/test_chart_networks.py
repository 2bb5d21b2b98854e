"""What clusters of one kind or another need of the chart: OpenShift, service meshes, Cilium, proxies, claims of
devices, umbrella charts. Rendered and checked against Kubernetes' schemas; what a plugin does with it was not run.
"""

from typing import Any

import pytest
import yaml

from tests.kube.custom_kinds import CUSTOM_KINDS
from tests.kube.helm import CHART, Helm, HelmError, Release
from tests.kube.helm_api import Cluster
from tests.kube.manifests import components, pods
from tests.kube.policies import pods as of_pods
from tests.kube.settings import environment
from tests.kube.values import EVERY_POD, EXAMPLES, example_values, with_values

ISSUER = {"issuerUrl": "https://issuer.example:8443/realm", "clientId": "quire"}


def rendered(helm: Helm, example: str = "cpu-demo", **changes: Any) -> Release:
    release = helm.render(with_values(example_values(example), **changes))
    assert [error for error in helm.validate(release.everything, "1.37") if error] == []
    return release


def policy(release: Release, name: str) -> dict[str, Any]:
    (found,) = [item for item in release.of("NetworkPolicy") if item["metadata"]["name"] == f"quire-{name}"]
    return found["spec"]


def ports_without_peers(rules: list[dict[str, Any]]) -> set[int]:
    return {int(port["port"]) for rule in rules if "to" not in rule for port in rule["ports"]}


def test_dns_may_have_other_ports(helm: Helm) -> None:
    release = rendered(helm, networkPolicy__dnsPorts=[53, 5300])
    for name in ("router", "engine", "test"):
        assert dns_ports(policy(release, name)["egress"][0]) == {53, 5300}


def dns_ports(rule: dict[str, Any]) -> set[int]:
    """The ports of a rule that both protocols may use."""
    udp, tcp = ({each["port"] for each in rule["ports"] if each["protocol"] == name} for name in ("UDP", "TCP"))
    return udp & tcp


@pytest.mark.parametrize(
    "values", [pytest.param(name, marks=() if name in EVERY_POD else pytest.mark.soak) for name in EXAMPLES]
)
def test_openshift_takes_every_pod_by_the_rules_of_restricted_v2(helm: Helm, values: str) -> None:
    release = helm.render(with_values(example_values(values), openshift=True))
    assert [*of_pods.containers_have_no_rights(release), *of_pods.pods_share_nothing_with_the_node(release)] == []
    found = list(pods(release))
    assert {"router", "engine", "test"} <= {pod.component for pod in found}
    for pod in found:
        for context in (pod.spec["securityContext"], *(each["securityContext"] for each in pod.all_containers)):
            assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & context.keys(), pod.name


@pytest.mark.parametrize(
    ("value", "served", "expected"), [("auto", True, True), ("auto", False, False), (False, True, False)]
)
def test_a_cluster_says_that_it_is_openshift(helm: Helm, value: Any, served: bool, expected: bool) -> None:
    kinds = {"security.openshift.io/v1": "SecurityContextConstraints!"} if served else {}
    cluster = helm.cluster(Cluster(custom_kinds={**CUSTOM_KINDS, **kinds}))
    release = cluster.install(with_values(example_values("cpu-demo"), openshift=value))
    assert {"runAsUser" not in pod.spec["securityContext"] for pod in pods(release)} == {expected}
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
    for name in ("router", "engine", "test"):
        rules = [rule for rule in policy(release, name)["egress"] if there in rule.get("to", ())]
        assert [dns_ports(rule) for rule in rules] == [{5353}] * expected


def test_rules_of_a_service_mesh_hold_for_all_pods(helm: Helm) -> None:
    mesh = [{"ports": [{"port": 15008}]}]
    control = [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 15012}]}]
    release = rendered(helm, networkPolicy__extraIngress=mesh, networkPolicy__extraEgress=control)
    everybody = policy(release, "default-deny")
    assert (everybody["ingress"], everybody["egress"]) == (mesh, control)
    selected = everybody["podSelector"]["matchLabels"].items()
    assert all(selected <= pod.labels.items() for pod in pods(release))
    assert not {"ingress", "egress"} & policy(rendered(helm), "default-deny").keys()


def test_the_api_server_may_be_allowed_by_its_ports_alone(helm: Helm) -> None:
    egress = policy(rendered(helm, networkPolicy__apiServerCidrs=[]), "router")["egress"]
    assert {443, 6443} <= ports_without_peers(egress)


@pytest.mark.parametrize("discovery", ["dns", "kubernetes"])
def test_routers_reach_the_issuer_of_tokens_whatever_finds_their_engines(helm: Helm, discovery: str) -> None:
    changes = {"router__auth__oidc": {**ISSUER, "jwksUrl": "https://keys.example/jwks"}, "router__discovery": discovery}
    narrow = rendered(helm, networkPolicy__apiServerCidrs=["10.0.0.1/32"], **changes)
    assert {8443, 443} <= ports_without_peers(policy(narrow, "router")["egress"])
    assert not {8443} & ports_without_peers(policy(rendered(helm, router__discovery=discovery), "router")["egress"])


def test_the_issuers_authority_comes_from_a_secret(helm: Helm) -> None:
    release = rendered(helm, router__auth__oidc={**ISSUER, "caSecret": "company", "caKey": "root.pem"})
    (router,) = components(release, "router")
    file = environment(router.containers[0])["QUIRE_ROUTER_OIDC_CA_FILE"]
    (mount,) = [each for each in router.containers[0]["volumeMounts"] if file.startswith(f"{each['mountPath']}/")]
    (volume,) = [each["secret"] for each in router.volumes if each["name"] == mount["name"]]
    assert (volume["secretName"], volume["items"]) == ("company", [{"key": "root.pem", "path": "ca.crt"}])
    with pytest.raises(HelmError, match="issuerUrl is empty"):
        rendered(helm, router__auth__oidc={"caSecret": "company"})


@pytest.mark.parametrize("endpoint", ["http://otel-collector.monitoring:4317", "https://[fd00::7]:4317"])
def test_the_collector_of_traces_is_not_asked_through_a_proxy(helm: Helm, endpoint: str) -> None:
    host = endpoint.removeprefix("http://").removeprefix("https://").rpartition(":")[0].strip("[]")
    proxy = {"https_proxy": "http://proxy.example:3128"}
    changes = {"router__env": proxy, "models__demo__env": proxy, "networkPolicy__downloadPorts": [443, 3128]}
    release = rendered(helm, telemetry__otlpEndpoint=endpoint, **changes)
    for pod in components(release, "router", "engine"):
        assert host in environment(pod.containers[0])["NO_PROXY"].split(",")


def test_engines_may_claim_devices(helm: Helm) -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    resources = {"claims": [{"name": "gpu"}], "limits": {"memory": "8Gi"}}
    release = rendered(helm, models__demo__resourceClaims=claims, models__demo__resources=resources)
    (engine,) = components(release, "engine")
    assert engine.spec["resourceClaims"] == claims
    assert engine.containers[0]["resources"]["claims"] == [{"name": "gpu"}]


def test_an_umbrella_chart_may_turn_the_chart_on(helm: Helm) -> None:
    named = [
        [(item["kind"], item["metadata"]["name"]) for item in release.manifests]
        for release in (rendered(helm, enabled=True), rendered(helm))
    ]
    assert named[0] == named[1]


def test_values_that_name_no_pods_rules_are_refused(helm: Helm) -> None:
    for name in ("dnsPorts", "downloadCidrs"):
        with pytest.raises(HelmError, match=name):
            rendered(helm, **{f"networkPolicy__{name}": []})
    assert yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["dnsPorts"] == [53]
