"""Lines of a log: nothing from outside begins one, and nothing changes the terminal that shows it."""

import json
import logging
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.logs import JsonFormatter, LineFormatter, one_line

FORM = "%(levelname)s %(name)s: %(message)s"


def formatted(message: str, *values: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return LineFormatter(FORM).format(logging.LogRecord("x", logging.INFO, "f", 1, message, values, info))


@given(st.text())
def test_a_message_is_one_line_of_what_can_be_printed(text: str) -> None:
    line = formatted("the adapter %s is loaded", text)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    if text.isprintable():
        assert line == f"INFO x: the adapter {text} is loaded"


@given(st.text())
def test_no_line_of_a_traceback_looks_like_one_of_the_log(text: str) -> None:
    try:
        raise ValueError(f"{text}\nERROR x: forged")
    except ValueError as error:
        first, *rest = formatted("it failed", error=error).split("\n")
    assert first == "INFO x: it failed"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_escapes_can_be_read_back() -> None:
    assert one_line("a\n\x1b[2J\u2028ü\ud800") == "a\\n\\x1b[2J\\u2028ü\\ud800"


@given(st.text(), st.text())
def test_a_record_in_json_is_one_line_with_its_reason(reason: str, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
        record = logging.LogRecord("a.logger", logging.WARNING, "f", 1, "Redis is away (%s)", (reason,), info)
    line = JsonFormatter(rank=1).format(record)
    assert line.isascii()
    assert line.isprintable()
    read = json.loads(line)
    assert (read["level"], read["logger"], read["rank"]) == ("warning", "a.logger", 1)
    assert read["message"] == f"Redis is away ({reason})"
    assert "ValueError" in read["exception"]
    assert datetime.fromisoformat(read["time"]).timestamp() == pytest.approx(record.created, abs=0.01)
