"""The small models of ``models``, each written once a run and only if a test asks for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_engine.kernels.bindings import library
from quire_engine.layers import streamed

from tests.model.models import NAMES, SmallModels
from tests.support.forked_ranks import ranks_are_forked


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    """In a folder that all workers share, so that each answer of transformers is computed by one of them."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "small-models"
    folder.mkdir(exist_ok=True)
    return SmallModels(folder)


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ranks_are_forked(patch)
        yield


@pytest.fixture(params=NAMES)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of layers' files, of which they are read in several requests; kernels are found in the one before."""
    library()
    monkeypatch.setattr(streamed, "_REQUEST_BYTES", 64 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"
