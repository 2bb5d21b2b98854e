"""The InferencePool of the chart names what there is, and its routers pick as the values say."""

from typing import Any

import pytest

from tests.kube.conftest import Examples
from tests.kube.helm import Helm, HelmError
from tests.kube.manifests import components
from tests.kube.policies.network import End, accepts, opens
from tests.kube.settings import Reader
from tests.kube.values import example_values, with_values


def test_the_pool_leads_to_the_port_on_which_routers_answer_gateways(example: Examples, reader: Reader) -> None:
    release = example("endpoint-picker", "1.37")
    (pool,) = release.of("InferencePool")
    spec = pool["spec"]
    assert (spec["selector"]["matchLabels"], spec["targetPorts"]) == ({"app": "vllm-llama"}, [{"number": 8000}])
    wanted = spec["endpointPickerRef"]
    assert wanted["failureMode"] == "FailOpen"
    (service,) = [item for item in release.of("Service") if item["metadata"]["name"] == wanted["name"]]
    (port,) = [entry for entry in service["spec"]["ports"] if entry["port"] == wanted["port"]["number"]]
    router = components(release, "router")[0]
    settings = reader.read(release, router)
    assert router.ports[port["targetPort"]] == settings.picker_port
    assert settings.picker_secure_serving
    assert settings.picker_fallbacks == 0


def test_what_is_said_of_the_picker_reaches_the_router(helm: Helm, reader: Reader) -> None:
    values = with_values(
        example_values("endpoint-picker"), router__picker__secureServing=False, router__picker__fallbacks=2
    )
    release = helm.render(values)
    settings = reader.read(release, components(release, "router")[0])
    assert (settings.picker_secure_serving, settings.picker_fallbacks) == (False, 2)


def test_gateways_show_a_certificate_unless_the_values_say_otherwise(helm: Helm, reader: Reader) -> None:
    values = with_values(
        example_values("endpoint-picker"),
        router__picker__insecure=False,
        router__picker__tlsSecret="gateways",
        router__picker__forward=["POST /tokenize", "GET /version"],
    )
    release = helm.render(values)
    (router,) = components(release, "router")
    settings = reader.read(release, router)
    assert (settings.picker_insecure, settings.picker_forward) == (False, ["POST /tokenize", "GET /version"])
    assert settings.picker_tls.client_ca == settings.picker_client_ca
    assert settings.picker_client_ca.name == "ca.crt"
    assert "gateways" in {volume.get("secret", {}).get("secretName") for volume in router.spec["volumes"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router__picker__insecure": False}, "router.picker.tlsSecret is empty and router.picker.insecure is false"),
        ({"router__picker__insecure": None}, "router.picker.tlsSecret is empty and router.picker.insecure is false"),
        ({"router__picker__tlsSecret": "gateways"}, "router.picker.tlsSecret is set"),
    ],
)
def test_an_insecure_picker_is_marked_insecure(helm: Helm, values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError, match=said):
        helm.render(with_values(example_values("endpoint-picker"), **values))


def test_gateways_are_let_in_and_nobody_else(example: Examples) -> None:
    release = example("endpoint-picker", "1.37")
    (router,) = components(release, "router")
    port = router.ports["picker"]
    assert accepts(release, router, End({"app": "envoy"}, "gateways"), port)
    assert not accepts(release, router, End({"app": "envoy"}, "default"), port, blocks=True)
    assert opens(release, router, End({"app": "vllm-llama"}), 8000)


def test_a_release_without_it_has_neither_pool_nor_port(example: Examples) -> None:
    release = example("cpu-demo", "1.37")
    assert not release.of("InferencePool")
    assert "picker" not in components(release, "router")[0].ports
