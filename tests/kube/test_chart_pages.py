"""The values that pages show are values that the chart takes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.helm import CHART, ROOT, Helm, Release

PAGES = (CHART / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "gateways.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_values_that_a_page_shows_can_be_installed(helm: Helm, page: Path) -> None:
    shown = list(values_of(page))
    assert shown
    for values in shown:
        assert set(values["models"]) <= {
            name.removeprefix("quire-engine-") for name in deployments(helm.render(values))
        }


def test_the_secrets_that_the_operations_guide_creates_are_those_that_its_values_name() -> None:
    text = PAGES[1].read_text()
    created = set(re.findall(r"create secret generic (\S+)", text))
    (values,) = values_of(PAGES[1])
    named = re.findall(r"(?:tokenSecret|existingSecret|apiKeySecret)': '([a-z-]+)", str(values))
    assert created == set(named)


def values_of(page: Path) -> Iterator[dict[str, Any]]:
    """The examples of whole values, which name models."""
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        values = yaml.safe_load(block)
        if isinstance(values, dict) and "models" in values:
            yield values


def deployments(release: Release) -> list[str]:
    """The names of the Deployments of a release."""
    return [manifest["metadata"]["name"] for manifest in release.of("Deployment")]
