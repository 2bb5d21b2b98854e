"""``make`` says what it installs before it does, and ``make up`` is ``quire serve``."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def make(folder: Path, *arguments: str, **variables: str) -> str:
    """What ``make`` prints, with a Python that only prints its arguments, one in each line."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/sh\necho python\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    return run("make", f"VENV={folder / 'venv'}", *arguments, **variables)


def run(*command: str, **variables: str) -> str:
    names = ("MAKE", "PIP_", "MODEL", "NAME", "ENGINES", "ARGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    made = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return made.stdout


def test_the_download_size_and_how_to_reduce_it_are_printed_before_pip_starts(tmp_path: Path) -> None:
    said, installs, _ = make(tmp_path, str(tmp_path / "venv/.ready")).partition("python\n-m\npip\ninstall")
    assert installs
    assert "5.4 GiB" in said
    assert "PIP_EXTRA_INDEX_URL" in said


def test_a_users_own_package_index_is_used_without_a_message(tmp_path: Path) -> None:
    said = make(tmp_path, str(tmp_path / "venv/.ready"), PIP_EXTRA_INDEX_URL="https://index.example/cpu")
    assert "GiB" not in said


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({}, ["demo/model", "--engines", "2", "--served-model-name", "quire-demo"]),
        ({"MODEL": "/a folder/m", "ENGINES": "1"}, ["/a folder/m", "--engines", "1"]),
        (
            {"MODEL": "m", "NAME": "org/m", "ARGS": "--port 81 --debug-route"},
            ["m", "--engines", "2", "--served-model-name", "org/m", "--port", "81", "--debug-route"],
        ),
    ],
)
def test_make_up_is_quire_serve(tmp_path: Path, variables: dict[str, str], arguments: list[str]) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.ready").touch()
    expected = ["python", "-m", "quire_cli.main", "serve", *arguments]
    assert make(tmp_path, "up", **variables).splitlines() == expected


def test_make_test_runs_every_folder_of_tests() -> None:
    said = run("make", "--dry-run", "test", "VENV=/nonexistent", "READY=", "HELM_READY=")
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert {f"tests/{folder}" for folder in folders} == set(re.findall(r"tests/\w+", said))
