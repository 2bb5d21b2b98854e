"""A pytest plugin that writes which cases there are, and then what became of each, as lines of JSON, so that a run that
was ended early says what it did not reach. Cases that the file has already are not run.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(os.environ["QUIRE_CASES"])
_KNOWN = {json.loads(line)["id"] for line in _PATH.read_text(encoding="utf-8").splitlines()}


def _write(**line: Any) -> None:
    with _PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Writes the cases that will run, and those that a shim has set an outcome for, which will not."""
    items[:] = [item for item in items if item.nodeid not in _KNOWN]
    for item in items:
        _write(id=item.nodeid, outcome=dict(item.user_properties).get("outcome", "collected"), error="")
    items[:] = [item for item in items if not item.user_properties]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Writes a module that cannot be imported as one case."""
    if report.outcome != "passed":
        _write(id=report.nodeid, outcome=report.outcome, error=report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what became of a part of a case: setting up, the call, tearing down."""
    if report.when == "call" or report.outcome != "passed":
        _write(id=report.nodeid, outcome=report.outcome, error=_error(report))


def _error(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return "\n".join(filter(None, (getattr(crash, "message", ""), report.longreprtext)))
