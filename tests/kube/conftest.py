"""Helm and the chart's example values, for the tests of the chart."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.kube.helm import ENVIRONMENT, MISSING, Helm, Release
from tests.kube.helm_api import HelmApi
from tests.kube.values import example_values

Examples = Callable[[str, str], Release]


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    if not (ENVIRONMENT / ".ready").is_file():
        pytest.skip(MISSING)
    with HelmApi() as api, Helm(api) as helm:
        yield helm


@pytest.fixture(scope="session")
def example(helm: Helm) -> Examples:
    """What Helm makes of one of ``ci/*-values.yaml`` for a version of Kubernetes; never to be changed."""

    @cache
    def rendered(name: str, version: str = "1.37") -> Release:
        return helm.render(example_values(name), version)

    return rendered
