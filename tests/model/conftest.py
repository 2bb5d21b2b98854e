"""The small models of ``models``, each written once a session and only if a test asks for it."""

import pytest

from tests.model.models import NAMES, SmallModels


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=NAMES)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param
