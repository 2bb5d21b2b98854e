"""The chart's files as they are, which needs no Helm: the schema, the examples, the README's table, versions."""

import copy
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.kube.helm import CHART, ROOT
from tests.kube.policies.access import NOT_THE_SECRET, SECRET_NAME
from tests.kube.previous import previous_chart
from tests.kube.values import EXAMPLES, VERSIONS, example_values, over

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
EMPTY = ("", None, [], {})
MAY_GO = re.compile(
    r"\.(requests|limits)\.|[lL]abels\b|topologySpread|metricsNamespace|disruptionsAllowed|^security\.runAs"
)
"""Values that can be missing although they are not empty by default."""
DESCRIPTION = yaml.safe_load((CHART / "Chart.yaml").read_text())


def test_the_readmes_table_and_the_schemas_descriptions_are_up_to_date() -> None:
    check = [sys.executable, ROOT / "scripts" / "chart_values.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_schema_takes_the_examples(values: str) -> None:
    Draft7Validator(SCHEMA).validate(over(DEFAULTS, example_values(values)))


def test_a_null_takes_away_only_what_the_templates_can_do_without() -> None:
    """Helm's null takes a default away. What the previous version had and is not empty has to be there; what is new may
    be missing, as it is after ``helm upgrade --reuse-values``.
    """
    with tarfile.open(previous_chart()) as archive:
        file = archive.extractfile("quire/values.yaml")
        assert file is not None
        previous = dict(leaves(yaml.safe_load(file)))
    assert {"$ref": "#/definitions/complete"} in SCHEMA["allOf"]
    complete = Draft7Validator(SCHEMA["definitions"]["complete"])
    for path, value in leaves(DEFAULTS):
        spoilt = copy.deepcopy(DEFAULTS)
        part = spoilt
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        needed = path == ("models",) or (path in previous and value not in EMPTY and not MAY_GO.search(".".join(path)))
        assert complete.is_valid(spoilt) != needed, ".".join(path)


def test_the_schema_takes_the_defaults() -> None:
    Draft7Validator(SCHEMA).validate(DEFAULTS)


def test_every_section_of_the_defaults_refuses_unknown_keys() -> None:
    for path in sections(DEFAULTS):
        spoilt = json.loads(json.dumps(DEFAULTS))
        part = spoilt
        for key in path:
            part = part[key]
        part["no-such-key"] = 1
        assert not Draft7Validator(SCHEMA).is_valid(spoilt), f"{'.'.join(path)} takes whatever it is given"


def sections(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of maps that have entries of their own in values.yaml; a map of labels is none."""
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and value and not key.lower().endswith(("labels", "requests", "limits")):
            yield from sections(value, (*path, key))


def test_every_number_and_word_of_the_defaults_has_a_type() -> None:
    for path, value in leaves(DEFAULTS):
        spoilt = json.loads(json.dumps(DEFAULTS))
        part = spoilt
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = [{"neither": "this"}] if not isinstance(value, list) else "no list"
        assert not Draft7Validator(SCHEMA).is_valid(spoilt), f"{'.'.join(path)} may be anything"


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What is no map, and where."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def test_no_value_is_a_secret() -> None:
    """Secrets are named, never written down: what sounds like one is the name of a Secret, or of a key in it."""
    for path, value in leaves(DEFAULTS):
        name = path[-1]
        if SECRET_NAME.search(name) and not NOT_THE_SECRET.search(name):
            assert re.search(r"(Secret|Secrets|Key|Field)$", name), f"{'.'.join(path)} asks for a secret itself"
            assert not isinstance(value, str) or len(value) < 20, f"{'.'.join(path)} has one"


def test_the_chart_is_for_the_packages_version() -> None:
    for package in ("proto", "engine", "router"):
        version = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]["version"]
        assert DESCRIPTION["appVersion"] == version


def test_the_chart_declares_its_kubernetes_version() -> None:
    assert DESCRIPTION["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_the_examples_are_those_that_were_promised() -> None:
    """A demo on the CPU, one GPU, eight, two models, another Redis, KEDA, HPA, TLS everywhere, the Gateway API."""
    promised = {"cpu-demo", "one-gpu", "eight-gpu", "two-models", "external-redis", "keda", "hpa", "tls", "gateway"}
    assert set(EXAMPLES) >= promised


@pytest.mark.parametrize("values", EXAMPLES)
def test_an_example_describes_its_purpose(values: str) -> None:
    assert (CHART / "ci" / f"{values}-values.yaml").read_text().startswith("# ")
