"""The settings that the chart renders are valid: the services' own settings classes read the manifests."""

import copy
import math
from typing import Any

import pytest
from quire_proto.engine_token import read_tokens

from tests.kube.conftest import Examples
from tests.kube.helm import Helm
from tests.kube.manifests import components, matches
from tests.kube.settings import Reader, environment
from tests.kube.test_chart_flags import FLAGS, snake
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
        assert read_tokens(engine.engine_token_file) == read_tokens(settings.engine_token_file)


@pytest.mark.parametrize("optional", [True, False, None])
def test_both_sides_speak_plain_text_too_only_while_tls_is_optional(
    helm: Helm, reader: Reader, optional: bool | None
) -> None:
    values = with_values(example_values("cpu-demo"), tls__mode="helm")
    release = helm.render(values if optional is None else with_values(values, tls__optional=optional))
    (router,), (engine,) = components(release, "router"), components(release, "engine")
    tls = reader.read(release, router).engine_tls
    assert tls is not None
    assert tls.optional == reader.read(release, engine).tls_optional == bool(optional)


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


VALUES = {
    "boolean": [True, False],
    "string": ["text"],
    "array": [["a=/x"], ["a=/x", "b=/y"]],
    "integer": [1 << 24],
    "number": [0.25],
}


def values_of(flag: str) -> list[Any]:
    """Returns a few values of each kind that a flag takes, by its schema; its numbers need not be within its bounds."""
    schema = FLAGS[flag]
    if "enum" in schema:
        return list(schema["enum"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    values = [value for kind in types for value in VALUES[kind]]
    return [value for value in values if not _is_out_of_bounds(schema, value)] or [
        schema.get("maximum", schema.get("minimum"))
    ]


def _is_out_of_bounds(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > schema.get("maximum", math.inf) or value < schema.get("minimum", -math.inf)


def as_variable(value: Any) -> str:
    """Returns a value as the services read it from a variable."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


ROUNDS = max(len(values_of(flag)) for flag in FLAGS)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_flag_of_any_kind_is_rendered_as_the_engine_reads_it(helm: Helm, turn: int) -> None:
    """All flags at once, each with one of its values: one release for each takes a minute longer."""
    flags = {flag: values[turn % len(values)] for flag in FLAGS if (values := values_of(flag))}
    release = helm.render(with_values(example_values("cpu-demo"), models__demo__flags=flags))
    (engine,) = components(release, "engine")
    rendered = environment(engine.containers[0])
    expected = {f"QUIRE_ENGINE_{snake(flag).upper()}": as_variable(value) for flag, value in flags.items()}
    assert {name: rendered.get(name) for name in expected} == expected


@pytest.mark.parametrize("modules", [["polite=/adapters/polite"], ["polite=/adapters/polite", "sql=/adapters/sql"]])
def test_a_list_of_adapters_reaches_the_engine(helm: Helm, reader: Reader, modules: list[str]) -> None:
    flags = {"enableLora": True, "loraModules": modules}
    release = helm.render(with_values(example_values("cpu-demo"), models__demo__flags=flags))
    (engine,) = components(release, "engine")
    assert reader.read(release, engine).lora_modules == modules


def test_sizes_and_durations_of_values_may_have_units(helm: Helm, reader: Reader) -> None:
    changes = {
        "models__demo__flags": {"kvCacheMemory": "256MiB", "stallTimeout": "2m"},
        "router__limits__maxBodyBytes": "8Mi",
    }
    release = helm.render(with_values(example_values("cpu-demo"), **changes))
    (engine,), (router,) = components(release, "engine"), components(release, "router")
    assert reader.read(release, engine).kv_cache_memory == 256 << 20
    assert reader.read(release, engine).stall_timeout == 120
    assert reader.read(release, router).max_body_bytes == 8 << 20


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
