"""The settings that the chart renders are valid: the services' own settings classes read the manifests."""

import copy

import pytest

from tests.kube.conftest import Examples
from tests.kube.helm import Helm
from tests.kube.manifests import components, matches
from tests.kube.settings import Reader, environment
from tests.kube.values import EXAMPLES, example_values, with_values

PORTS = {
    "router": {
        "http": "http_port",
        "grpc": "grpc_port",
        "metrics": "metrics_port",
        "scaling": "scaling_port",
        "keda": "keda_port",
        "picker": "picker_port",
    },
    "engine": {"grpc": "port", "metrics": "metrics_port"},
}


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_services_take_every_setting(example: Examples, reader: Reader, values: str) -> None:
    release = example(values, "1.37")
    pods = components(release, "router", "engine")
    assert {pod.component for pod in pods} == {"router", "engine"}
    for pod in pods:
        settings = reader.read(release, pod)
        assert str(settings.host) in ("0.0.0.0", "::"), "nobody else would reach it"
        for port, setting in PORTS[pod.component].items():
            assert getattr(settings, setting) == pod.ports.get(port), f"{pod.name}: {port}"


@pytest.mark.parametrize("values", EXAMPLES)
def test_routers_and_engines_agree(example: Examples, reader: Reader, values: str) -> None:
    release = example(values, "1.37")
    (router,) = components(release, "router")
    engines = components(release, "engine")
    settings = reader.read(release, router)
    served = [reader.read(release, engine) for engine in engines]
    assert sorted(settings.models) == sorted(name for engine in served for name in engine.names)
    for engine in served:
        assert (engine.tls_cert is None) == (settings.engine_tls_ca is None), "one encrypts, the other does not"
        assert (engine.tls_client_ca is None) == (settings.engine_tls_cert is None)


@pytest.mark.parametrize("values", EXAMPLES)
def test_routers_look_for_every_models_engines(example: Examples, reader: Reader, values: str) -> None:
    release = example(values, "1.37")
    (router,) = components(release, "router")
    places = " ".join(map(str, reader.read(release, router).engine))
    for pod in components(release, "engine"):
        services = [item for item in release.of("Service") if "selector" in item["spec"]]
        (service,) = [item for item in services if matches({"matchLabels": item["spec"]["selector"]}, pod.labels)]
        assert service["metadata"]["name"] in places
        assert service["spec"]["clusterIP"] == "None", "a router chooses the engine, not a Service"


def test_routers_look_for_engines_that_others_have_written_too(helm: Helm, reader: Reader) -> None:
    others = ["vllm+kubernetes://vllm-llama:8000", "sglang+http://10.0.0.7:30000"]
    release = helm.render(with_values(example_values("cpu-demo"), router__engines=others))
    (router,) = components(release, "router")
    engines = reader.read(release, router).engine
    assert engines[1:] == others
    assert len(engines) == 2 + 1


def test_a_flag_with_a_digit_in_it_reaches_the_engine(helm: Helm, reader: Reader) -> None:
    changes = {"flags": {"all2AllBackend": "alltoall"}, "tensorParallelSize": 2, "sharedMemory": "64Mi"}
    values = example_values("cpu-demo")
    release = helm.render(with_values(values, **{f"models__demo__{name}": value for name, value in changes.items()}))
    (engine,) = components(release, "engine")
    assert reader.read(release, engine).all2all_backend == "alltoall"


@pytest.mark.parametrize("component", ["router", "engine"])
def test_a_setting_that_is_none_is_found(
    example: Examples, component: str, reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    release = copy.deepcopy(example("cpu-demo", "1.37"))
    (pod,) = components(release, component)
    pod.containers[0]["env"].append({"name": f"QUIRE_{component.upper()}_MAX_NUM_SEKS", "value": "1"})
    with pytest.raises(SystemExit):
        reader.read(release, pod)
    assert "SEKS" in capsys.readouterr().err


def test_variables_see_only_those_before_them() -> None:
    container = {
        "env": [
            {"name": "EARLY", "value": "$(LATE)"},
            {"name": "LATE", "value": "x"},
            {"name": "URL", "value": "a$(LATE)b"},
        ]
    }
    assert environment(container) == {"EARLY": "$(LATE)", "LATE": "x", "URL": "axb"}
