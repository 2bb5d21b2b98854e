"""The chart's values stand for the services' own settings: all of them, under their names, within their bounds."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from quire_engine.config import EngineConfig
from quire_proto.units import unit_metavar
from quire_router.config import Settings

from scripts.chart_values import NOT_FLAGS
from tests.kube.helm import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
MODEL = SCHEMA["definitions"]["model"]["properties"]
FLAGS = MODEL["flags"]["properties"]
TEMPLATES = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
ENGINE = EngineConfig.model_json_schema()
SET_FOR_ENGINES = {"port", "metrics_port", "headless", "master_port", "insecure"}
"""Settings of the engine that the chart leaves as they are."""
OF_GROUPS = {name for name in EngineConfig.model_fields if name.startswith("data_parallel_")}
"""Those of engines that share experts, each of which needs an address: the chart makes no such groups."""
SET_FOR_ROUTERS = {
    "engine_dns_period", "http_port", "grpc_port", "journal_file", "journal_max_bytes", "metrics_port",
    "scaling_client_ca", "scaling_client_name", "scaling_namespace", "engine_api_key",
    "allowed_hosts",
}  # fmt: skip
"""Settings of the router that the chart leaves as they are."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const", "type")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower()


def test_every_setting_of_the_engine_is_a_flag_or_has_a_value_or_is_the_charts() -> None:
    flags = {snake(flag) for flag in FLAGS}
    named = {name.lower() for name in re.findall(r"QUIRE_ENGINE_([A-Z_]+[A-Z])", TEMPLATES)}
    [picked] = re.findall(r'"QUIRE_ENGINE_" "settings" \(pick \$\.model ([^)]*)\)', TEMPLATES)
    named |= {snake(name) for name in re.findall(r'"(\w+)"', picked)}
    assert named | SET_FOR_ENGINES | OF_GROUPS == NOT_FLAGS
    assert flags == set(EngineConfig.model_fields) - NOT_FLAGS, "run .venv/bin/python scripts/chart_values.py"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_takes_what_the_engine_takes(flag: str) -> None:
    wanted, field = _bounds(ENGINE["properties"][snake(flag)]), EngineConfig.model_fields[snake(flag)]
    with_unit = {"type": [wanted["type"], "string"]} if unit_metavar(field) else {}
    assert _bounds(FLAGS[flag]) == wanted | with_unit
    assert FLAGS[flag]["description"] == EngineConfig.model_fields[snake(flag)].description


@pytest.mark.parametrize("value", ["dtype", "maxModelLen", "tensorParallelSize", "pipelineParallelSize"])
def test_a_value_takes_what_the_engine_takes(value: str) -> None:
    taken = MODEL[value] | ({"type": "integer"} if "minimum" in MODEL[value] else {})
    assert _bounds(taken) == _bounds(ENGINE["properties"][snake(value)])


def _bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """What a schema allows, beside null."""
    if "$ref" in schema:
        schema = ENGINE["$defs"][schema["$ref"].rpartition("/")[2]]
    (only,) = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    found = {name: only[name] for name in BOUNDS if name in only}
    if "const" in found:
        found["enum"] = [found.pop("const")]
    if "enum" in found:
        return {"enum": sorted(found["enum"])}
    return found


def test_every_setting_of_the_router_can_be_given_or_is_the_charts() -> None:
    named = {name.lower() for name in re.findall(r"QUIRE_ROUTER_([A-Z_]+[A-Z])", TEMPLATES)}
    named |= {snake(name) for name in re.findall(r'"(\w+)" \$router', TEMPLATES)}
    left = set(Settings.model_fields) - named - set(map(snake, _names(DEFAULTS["router"])))
    assert left == SET_FOR_ROUTERS, "needs a value (values.yaml, values.schema.json, templates/router), or a line above"


def _names(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield name
        yield from _names(value) if isinstance(value, dict) else ()


@pytest.mark.parametrize("section", ["limits", "placement"])
def test_the_charts_router_values_are_settings_of_the_router(section: str) -> None:
    names = {{"policy": "placement_policy"}.get(name, snake(name)) for name in DEFAULTS["router"][section]}
    assert names - set(Settings.model_fields) == set()


def test_limits_with_a_unit_are_numbers_or_texts() -> None:
    limits = SCHEMA["properties"]["router"]["properties"]["limits"]["properties"]
    texts = {snake(name) for name, limit in limits.items() if "string" in limit["type"]}
    with_unit = {name for name, field in Settings.model_fields.items() if unit_metavar(field)}
    assert texts == with_unit & set(map(snake, limits)) != set()


def test_policies_are_those_of_the_router() -> None:
    allowed = SCHEMA["properties"]["router"]["properties"]["placement"]["properties"]["policy"]["enum"]
    options = Settings.model_json_schema()["properties"]["placement_policy"]["enum"]
    assert sorted(option for option in allowed if option is not None) == sorted(options)
