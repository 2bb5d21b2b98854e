"""Helm, the chart's example values and what reads their settings, for the tests of the chart."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kube.helm import ENVIRONMENT, MISSING, Helm, Release
from tests.kube.helm_api import HelmApi
from tests.kube.settings import Reader
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


@pytest.fixture
def reader(example: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Reads the settings of pods."""
    spare: dict[str, str] = {}
    for secret in example("tls", "1.37").of("Secret"):
        spare = {**spare, **secret["data"]}
    return Reader(spare, tmp_path, monkeypatch)
