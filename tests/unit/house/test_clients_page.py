"""The table of clients is what their suite wrote: its rows, in its order, with the versions that are installed."""

from pathlib import Path

import pytest

from tests.clients import table, test_real_clients


def test_the_page_has_a_row_for_each_client_of_the_suite_and_each_works() -> None:
    rows = [table.row(mark, table.WORKS) for mark in table.marks_of(test_real_clients)]
    assert len(rows) == len(set(rows)) > 15
    assert table.rows_of(table.PAGE.read_text()) == rows, "make clients writes it"


def test_a_client_that_was_not_run_or_failed_is_not_said_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "clients.md"
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
