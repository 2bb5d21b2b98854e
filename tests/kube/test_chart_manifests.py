"""Every example of the chart's values makes manifests that Kubernetes takes, and that obey the policies."""

import pytest

from tests.kube.conftest import Examples
from tests.kube.helm import Helm
from tests.kube.policies import POLICIES
from tests.kube.validity import problems
from tests.kube.values import EXAMPLES, VERSIONS

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize(
    "values", [pytest.param(name, marks=pytest.mark.soak if number % 2 else ()) for number, name in enumerate(EXAMPLES)]
)
def test_the_oldest_and_the_newest_kubernetes_take_the_manifests(helm: Helm, example: Examples, values: str) -> None:
    for version in (OLDEST, NEWEST):
        release = example(values, version)
        assert release.manifests
        assert problems(helm, release.everything, version) == {}


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kubernetes_takes_the_manifests(helm: Helm, example: Examples, version: str) -> None:
    for values in EXAMPLES:
        assert problems(helm, example(values, version).everything, version) == {}, values


@pytest.mark.parametrize("values", EXAMPLES)
def test_every_example_obeys_the_policies(example: Examples, values: str) -> None:
    release = example(values, NEWEST)
    assert [breach for policy in POLICIES for breach in policy(release)] == []


def test_a_kind_without_a_schema_is_refused(helm: Helm) -> None:
    mystery = {"apiVersion": "example.com/v1", "kind": "Mystery", "metadata": {"name": "x"}, "spec": {}}
    assert problems(helm, [mystery], NEWEST) == {"Mystery/x": "no schema for Mystery of example.com/v1"}
