"""Tables and figures in a terminal."""

import pytest
from quire_cli.machine.table import duration, size, table


def test_columns_are_aligned() -> None:
    assert table(("A", "LONG"), [("wide", "x"), ("y", "z")]) == "A     LONG\nwide  x\ny     z\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_500_000_000, "2.5 GB"), (3e12, "3.0 TB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 seconds"), (1, "1 second"), (125, "2 minutes"), (7200, "2 hours"), (1e6, "11 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
