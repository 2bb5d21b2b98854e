"""Advice about optional packages names those, and no distribution that anybody could register in our name."""

import re
from pathlib import Path

import pytest
from quire_proto.extras import FOLDERS, install_command

ROOT = Path(__file__).parents[3]
EXTRAS = [
    ("quire-engine", "cuda"),
    ("quire-engine", "plot"),
    ("quire-llm", "s3"),
    ("quire-llm", "oci"),
    ("quire-router", "kv-events"),
]
INSTALLS = re.compile(r"(?:pip|uv)3? install [^`\n]*")
OUR_NAME = re.compile(r"(?<![\w./-])(?:quire|quire-(?:llm|engine|router|proto|cli))(?=[\[='\"\s<>~]|$)")


@pytest.mark.parametrize(("distribution", "extra"), EXTRAS)
def test_the_command_names_the_packages_behind_an_extra(distribution: str, extra: str) -> None:
    command = install_command(distribution, extra)
    assert re.match(r"pip install '?[a-z]", command)
    assert "quire" not in command


def test_a_checkout_that_was_not_installed_names_its_folder() -> None:
    assert install_command("quire-engine", "no-such-extra") == "pip install './engine[no-such-extra]'"
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in FOLDERS.values())


def test_no_page_and_no_sentence_installs_a_package_of_our_name_from_an_index() -> None:
    folders = ("docs", "proto", "engine", "router", "cli", "charts", "docker", "demo", "examples", "k8s", "scripts")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py", ".sh", ".yaml")
    ]
    told = [
        f"{path.relative_to(ROOT)}: {command}"
        for path in (ROOT / "README.md", *files)
        for command in INSTALLS.findall(path.read_text(encoding="utf-8"))
        if OUR_NAME.search(command)
    ]
    assert told == []
