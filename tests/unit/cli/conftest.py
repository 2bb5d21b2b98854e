"""Commands of these tests find no server that runs for the user who tests, and leave nothing in the user's folders."""

from pathlib import Path

import pytest

from tests.support.registry_server import build_registry


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for the user's state folder."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def registry_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of a registry."""
    built = build_registry(tmp_path_factory.mktemp("registry"))
    if isinstance(built, str):
        pytest.skip(built)
    return built
