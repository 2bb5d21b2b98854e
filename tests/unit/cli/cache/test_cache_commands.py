"""``quire list``, ``quire pull`` and ``quire rm``, as commands of a user with a home and a Hub of their own."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cli.machine.running import registered

from tests.support.hub_server import HubServer, hub_server
from tests.support.running_servers import a_server
from tests.unit.cli.model.conftest import model_files

NAME = "org/small"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        server.add(NAME, model_files())
        for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": "/nowhere"}.items():
            monkeypatch.setenv(name, value)
        yield server


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_cli.main", *arguments]
    return subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=False)


def answer(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that asks in a terminal, where ``text`` is typed."""
    ours, theirs = pty.openpty()
    os.write(ours, text.encode())
    command = [sys.executable, "-m", "quire_cli.main", *arguments]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=120, check=False)
    os.close(theirs)
    os.close(ours)
    return done


def listed() -> list[str]:
    return [each["name"] for each in json.loads(quire("list", "--json").stdout)["models"]]


def test_a_model_is_pulled_listed_and_deleted_after_a_question(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--org--small"
    assert quire("list").stderr == "no model was downloaded; quire pull MODEL does\n"
    pulled = quire("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"{NAME} is in {folder}/snapshots/")
    head, row = quire("list").stdout.splitlines()
    assert head.split() == ["NAME", "FROM", "SIZE", "LAST", "USED"]
    assert row.startswith(f"{NAME}  hub   20")
    assert json.loads(quire("list", "--json").stdout)["models"][0]["bytes"] > 200_000

    refused = answer("n\n", "rm", NAME)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[0].endswith(f" kB in {folder}")
    assert "which other programs on this machine use too" in refused.stderr
    assert refused.stderr.endswith("[y/N] error: nothing was deleted\n")
    assert listed() == [NAME]

    deleted = answer("y\n", "rm", NAME)
    assert (deleted.returncode, deleted.stdout.partition(",")[0]) == (0, f"deleted {NAME}")
    assert listed() == []
    assert not folder.exists()


def test_a_model_is_deleted_by_its_own_name_only(hub: HubServer) -> None:
    assert quire("pull", NAME).returncode == 0
    unknown = quire("rm", "org/smal", "--yes")
    assert unknown.returncode == 1
    assert unknown.stderr == (
        "error: no downloaded model is org/smal (did you mean org/small?)\ntip: quire list shows all\n"
    )
    with registered(a_server(source=NAME)):
        served = quire("rm", NAME, "--yes")
    assert (served.returncode, served.stderr.splitlines()[0]) == (
        1,
        f"error: {NAME} is served at http://127.0.0.1:8000",
    )
    unasked = quire("rm", NAME)
    assert unasked.stderr.endswith("error: nobody can be asked here\ntip: --yes deletes without a question\n")
    assert listed() == [NAME]
    assert quire("rm", f"{NAME}@main", "--yes").returncode == 0
    assert listed() == []


def test_what_cannot_be_served_is_not_pulled(hub: HubServer) -> None:
    hub.add("org/odd", model_files(architectures=["WhisperForConditionalGeneration"], model_type="whisper"))
    done = quire("pull", "org/odd")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert not hub.sent["model.safetensors"]
