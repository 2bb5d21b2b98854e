"""``quire list``, ``quire pull`` and ``quire rm``, as commands of a user with a home and a Hub of their own."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire_cli.machine.running import registered

from tests.support.hub_server import HubServer, hub_server
from tests.support.registry_server import registry_server
from tests.support.running_servers import a_server
from tests.support.s3_server import ACCESS_KEY, s3_server
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


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of two models in object storage; a user of the same."""
    with s3_server() as server:
        for name in ("small", "other"):
            server.add("models", f"team/{name}", model_files())
        for variable, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_METADATA_ENDPOINT": f"{server.url}/nobody",
        }.items():
            monkeypatch.setenv(variable, value)
        yield ["s3://models/team/small", "s3://models/team/other"]


@contextmanager
def registry(program: Path) -> Iterator[list[str]]:
    """Names of two artifacts in a registry, the first with a tag that need not be typed."""
    with registry_server(program) as server:
        for tag in ("latest", "2"):
            server.push(model_files(), tag)
        yield [f"oci://{server.host}/team/small:latest", f"oci://{server.host}/team/small:2"]


@pytest.fixture(params=["s3", "oci"])
def copied(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str, str]]:
    """The kind of a place, and the names of two models there, both of which were pulled, as was one from the Hub."""
    kind = request.param
    place = bucket(monkeypatch) if kind == "s3" else registry(request.getfixturevalue("registry_program"))
    with place as (name, other):
        for each in (name, other):
            pulled = quire("pull", each)
            assert pulled.returncode == 0, pulled.stderr
            assert pulled.stdout.startswith(f"{each} is in {tmp_path}/assets/quire/{kind}/")
        yield kind, name, other


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


def test_a_copy_is_listed_by_its_name_and_alone_deleted_after_a_question(
    hub: HubServer, copied: tuple[str, str, str], tmp_path: Path
) -> None:
    kind, name, other = copied
    assert quire("pull", NAME).returncode == 0
    models = {each["name"]: each for each in json.loads(quire("list", "--json").stdout)["models"]}
    assert {each: models[each]["from"] for each in models} == {name: kind, other: kind, NAME: "hub"}
    assert models[name]["bytes"] > 200_000
    folder = Path(models[name]["path"])
    own, before = files_below(folder), files_below(tmp_path)
    assert len(own) > 4

    refused = answer("n\n", "rm", name)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[0].endswith(f" kB in {folder}")
    assert "other programs" not in refused.stderr  # as are those of the Hub's cache
    assert quire("rm", name).returncode == 1
    with registered(a_server(source=name)):
        served = quire("rm", name, "--yes")
    assert served.stderr.startswith(f"error: {name} is served at ")
    assert files_below(tmp_path) == before

    deleted = answer("y\n", "rm", name)
    assert (deleted.returncode, deleted.stdout.partition(",")[0]) == (0, f"deleted {name}")
    assert files_below(tmp_path) == before - own
    assert not folder.exists()
    assert set(listed()) == {other, NAME}
    assert quire("rm", other, "--yes").returncode == 0
    assert listed() == [NAME]


def test_a_copy_is_deleted_by_every_name_that_serves_it(hub: HubServer, copied: tuple[str, str, str]) -> None:
    kind, name, other = copied
    deleted = quire("rm", f"{name}/" if kind == "s3" else name.removesuffix(":latest"), "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert deleted.stdout.startswith(f"deleted {name}, ")
    assert listed() == [other]


def test_a_copy_without_its_name_is_deleted_by_the_name_of_its_folder(
    hub: HubServer, copied: tuple[str, str, str], tmp_path: Path
) -> None:
    """As earlier releases left them."""
    kind, _, other = copied
    folders = {file.read_text(): file.parent for file in tmp_path.glob(f"assets/quire/{kind}/*/name.txt")}
    nameless = next(folder for name, folder in folders.items() if name != other)
    (nameless / "name.txt").unlink()
    assert set(listed()) == {nameless.name, other}
    assert quire("rm", nameless.name, "--yes").returncode == 0
    assert not nameless.exists()
    assert listed() == [other]


def test_what_a_copys_folder_links_to_stays(hub: HubServer, copied: tuple[str, str, str], tmp_path: Path) -> None:
    """A user may have moved it to another disk."""
    kind, name, _ = copied
    [folder] = [file.parent for file in tmp_path.glob(f"assets/quire/{kind}/*/name.txt") if file.read_text() == name]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    (folder / "snapshots/mine").symlink_to(tmp_path / "mine")
    assert quire("rm", name, "--yes").returncode == 0
    assert not folder.exists()
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"
