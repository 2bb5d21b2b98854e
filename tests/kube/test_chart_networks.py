"""What clusters of one kind or another need of the chart: OpenShift, service meshes, Cilium, proxies, claims of
devices, umbrella charts. Rendered and checked against Kubernetes' schemas; what a plugin does with it was not run.
"""

from typing import Any

import pytest
import yaml

from tests.kube.helm import CHART, Helm, HelmError, Release
from tests.kube.manifests import components, pods
from tests.kube.settings import environment
from tests.kube.values import example_values, with_values

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


def test_dns_may_have_other_ports_as_on_openshift(helm: Helm) -> None:
    release = rendered(helm, networkPolicy__dnsPorts=[53, 5353])
    for name in ("router", "engine", "test"):
        dns = policy(release, name)["egress"][0]["ports"]
        assert {(each["port"], each["protocol"]) for each in dns} == {
            (port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")
        }


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


def test_the_pods_of_helm_test_go_where_they_are_sent(helm: Helm) -> None:
    taint = [{"key": "team", "operator": "Exists"}]
    limits = {"requests": {"cpu": "50m"}, "limits": {"cpu": "200m", "memory": "256Mi"}}
    changes = {"nodeSelector": {"pool": "small"}, "tolerations": taint, "resources": limits}
    release = rendered(helm, **{f"tests__{name}": value for name, value in changes.items()})
    tests = [pod for pod in pods(release) if pod.component == "test"]
    assert len(tests) == 2
    for pod in tests:
        assert (pod.spec["nodeSelector"], pod.spec["tolerations"]) == ({"pool": "small"}, taint)
        assert pod.containers[0]["resources"]["limits"]["cpu"] == "200m"


def test_values_that_name_no_pods_rules_are_refused(helm: Helm) -> None:
    for name in ("dnsPorts", "downloadCidrs"):
        with pytest.raises(HelmError, match=name):
            rendered(helm, **{f"networkPolicy__{name}": []})
    assert yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["dnsPorts"] == [53]
