"""docs/recipes.md shows what the suite of clients ran: its rows in its order, with the installed versions, and the
settings that it gives to programs.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.clients import coding_agents, open_webui, table, test_real_clients
from tests.clients.suite import MODEL
from tests.clients.test_recipes import STATED_MODEL, STATED_URL, TOGETHER, snippet


def test_the_page_has_a_row_for_each_client_of_the_suite_and_each_works() -> None:
    rows = [table.row(mark, table.WORKS) for mark in table.marks_of(test_real_clients)]
    assert len(rows) == len(set(rows)) > 15
    assert table.rows_of(table.PAGE.read_text()) == rows, "make clients writes it"


def test_a_client_that_was_not_run_or_failed_is_not_said_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "recipes.md"
    page.write_text("\n".join(["Before", *table.HEAD, "| old | 1 | all | works |", "", "After | behind", ""]))
    monkeypatch.setattr(table, "PAGE", page)
    marks = [pytest.mark.client(name, "all", version="1").mark for name in ("one", "other")]
    for outcomes in ({}, {"one": ["passed"]}, {"one": ["passed"], "other": ["passed", "skipped"]}):
        with pytest.raises(LookupError, match="was not run"):
            table.write(marks, outcomes)
    table.write(marks, {"one": ["passed", "passed"], "other": ["passed", "failed"]})
    rows = ["| one | 1 | all | works |", "| other | 1 | all | **fails** |"]
    assert page.read_text().splitlines() == ["Before", *table.HEAD, *rows, "", "After | behind"]
    table.write(marks, {"other": ["passed"]})  # the other's row stays
    rows[1] = "| other | 1 | all | works |"
    assert page.read_text().splitlines() == ["Before", *table.HEAD, *rows, "", "After | behind"]
    newer = [pytest.mark.client(name, "all", version="2").mark for name in ("one", "other")]
    with pytest.raises(LookupError, match="one was not run"):
        table.write(newer, {"other": ["passed"]})


def test_a_package_that_is_pinned_nowhere_has_no_version() -> None:
    with pytest.raises(LookupError, match="no version stands behind nothing== in "):
        table.pinned("nothing==")


def test_the_page_shows_the_program_of_the_examples() -> None:
    _, _, program = (table.ROOT / "examples" / "langchain_agent.py").read_text().partition('\n"""\n\n')
    assert snippet("LangChain", "python", TOGETHER) == program


def shown(heading: str, language: str) -> str:
    """A recipe's block, for the model of the suite."""
    return snippet(heading, language).replace(f'"{STATED_MODEL}"', f'"{MODEL}"')


def written(agent: coding_agents.Agent, home: Path, path: str) -> str:
    """The settings that the suite writes into the home of an agent."""
    agent.settle(agent, home, STATED_URL)
    return (home / path).read_text()


def test_claude_code_is_run_with_the_settings_of_its_recipe(tmp_path: Path) -> None:
    given = json.loads(written(coding_agents.CLAUDE_CODE, tmp_path, ".claude/settings.json"))
    recipe: dict[str, Any] = json.loads(shown("Claude Code", "json"))
    assert recipe.keys() == given.keys() == {"env"}
    assert recipe["env"].items() <= given["env"].items()


def test_codex_is_run_with_the_settings_of_its_recipe(tmp_path: Path) -> None:
    given = tomllib.loads(written(coding_agents.CODEX, tmp_path, ".codex/config.toml"))
    recipe = tomllib.loads(shown("Codex", "toml"))
    assert recipe == {name: given[name] for name in recipe}


def test_open_webui_is_run_with_the_settings_of_its_recipe() -> None:
    exports, serve = snippet("Open WebUI", "sh").splitlines()
    recipe = dict(word.split("=", 1) for word in exports.removeprefix("export ").split())
    assert recipe.items() <= open_webui.settings(STATED_URL).items()
    assert serve.startswith("open-webui serve")
