"""The table of clients in docs/recipes.md: a row for each mark ``client`` of a test, written by ``make clients``.

``client(name, what, *pins)`` names a client, what is run, and what stands before the versions of its packages in
``scripts/clients.sh`` or ``go.mod``; ``version`` is said where neither pins one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
PINS = (ROOT / "scripts" / "clients.sh", ROOT / "tests" / "clients" / "programs" / "go" / "go.mod")
HEAD = ("| client | version | what is run | |", "|---|---|---|---|")
WORKS, FAILS = "works", "**fails**"


def row(mark: pytest.Mark, result: str) -> str:
    """A line of the table."""
    name, what, *pins = mark.args
    version = mark.kwargs.get("version") or ", ".join(pinned(pin) for pin in pins)
    return f"| {name} | {version} | {what} | {result} |"


def pinned(pin: str) -> str:
    """The version that stands behind ``pin``. Raises ``LookupError`` if there is none."""
    pattern = re.compile(rf"(?<![\w/@-]){re.escape(pin)}(\d[\w.]*)")
    for file in PINS:
        if found := pattern.search(file.read_text()):
            return found[1]
    raise LookupError(f"no version stands behind {pin} in {' and '.join(file.name for file in PINS)}")


def marks_of(module: ModuleType) -> Iterator[pytest.Mark]:
    """All marks ``client`` of a module's tests, in their order in it."""
    for test in vars(module).values():
        for mark in reversed(getattr(test, "pytestmark", [])):
            if mark.name == "client":
                yield mark
            elif mark.name == "parametrize":
                marks = (own for value in mark.args[1] for own in getattr(value, "marks", ()))
                yield from (own for own in marks if own.name == "client")


def rows_of(page: str) -> list[str]:
    """The rows of the table of a page."""
    lines = page.splitlines()
    first = lines.index(HEAD[0]) + len(HEAD)
    last = next((place for place in range(first, len(lines)) if not lines[place].startswith("|")), len(lines))
    return lines[first:last]


def write(marks: Iterable[pytest.Mark], results: Mapping[str, Sequence[str]]) -> None:
    """Writes the page's table anew. ``results`` are the outcomes of the tests of each client by its name. The row of a
    client that was not run stays, if it is of the version that would be run. Raises ``LookupError`` if it is not.
    """
    page = PAGE.read_text()
    before, rows = rows_of(page), []
    for mark in marks:
        outcomes = set(results.get(mark.args[0], ["skipped"]))
        if "skipped" in outcomes:
            known = [line for line in (row(mark, WORKS), row(mark, FAILS)) if line in before]
            if not known:
                raise LookupError(f"{mark.args[0]} was not run")
            rows += known
        else:
            rows.append(row(mark, FAILS if "failed" in outcomes else WORKS))
    PAGE.write_text(page.replace("\n".join(before), "\n".join(rows)))
