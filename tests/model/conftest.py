"""The small models of ``models``, each written once a session and only if a test asks for it."""

import os

import pytest

from tests.model.models import NAMES, SmallModels

# Threads gain nothing on models this small, and wait for each other on a machine that is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=NAMES)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param
