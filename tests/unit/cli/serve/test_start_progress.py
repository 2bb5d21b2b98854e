"""One line says how far a start is, and makes room for lines of the log."""

import logging
import os
from collections.abc import Iterator

import pytest
from quire_cli.serve import log
from quire_cli.serve.start_progress import StartProgress
from quire_engine.core.startup import StartupPhase, report_facts


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    written: list[str] = []
    monkeypatch.setattr(log, "_STANDARD_OUTPUT", -1)
    monkeypatch.setattr(os, "write", lambda _descriptor, data: written.append(data.decode()))
    yield written
    log.show_status("")


def test_the_line_is_of_the_engine_that_is_least_far_until_all_are_ready() -> None:
    progress = StartProgress(["engine-0", "engine-1"], lambda _: None)
    assert progress.line(set()).startswith("engine-0: loading libraries (")
    progress.report("engine-0", f"{StartupPhase.WEIGHTS} 0.250")
    assert progress.line(set()).startswith("engine-1: loading libraries (")
    progress.report("engine-1", f"{StartupPhase.MEMORY} 0.000")
    assert progress.line(set()).startswith("engine-0: reading weights 25% (")
    assert progress.line({"engine-0"}).startswith("engine-1: measuring memory (")
    assert progress.line({"engine-0", "engine-1"}) == ""


def test_an_engine_says_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire_engine.progress"):
        report_facts(dtype="float32", kv_tokens=16)
    progress = StartProgress(["engine-0"], lambda _: None)
    progress.report("engine-0", caplog.messages[0])
    assert progress.facts == {"engine-0": {"dtype": "float32", "kv_tokens": 16}}


@pytest.mark.parametrize("record", ["", "weights", "weights much", "another 0.5", "facts", "facts 1"])
def test_a_record_of_another_version_changes_nothing(record: str) -> None:
    progress = StartProgress(["engine-0"], lambda _: None)
    progress.report("engine-0", record)
    assert progress.line(set()).startswith("engine-0: loading libraries (")


def test_the_log_stands_above_the_status_line(shown: list[str]) -> None:
    log.say("first")
    log.show_status("half")
    log.say("second")
    log.show_status("")
    log.show_status("")
    assert shown == [
        "quire    | first\n",
        "\r\x1b[Khalf",
        "\r\x1b[Kquire    | second\nhalf",
        "\r\x1b[K",
    ]
