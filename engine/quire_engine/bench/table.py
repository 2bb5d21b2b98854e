"""One table of several results of ``quire-engine bench --json``: ``python -m quire_engine.bench.table FILE...``"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire_proto.terminal import fail

OURS = "quire"
HEAD = "In brackets: how many times as good quire is, in as many bits where it was measured so."


class Row(NamedTuple):
    """A figure: the median of each system, and how many times as good we are as each peer."""

    what: str
    medians: Mapping[str, float]
    ratios: Mapping[str, float]


def main() -> None:
    """Prints the table. Exits with 1 and one sentence for a file that is no result."""
    try:
        results = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
        sys.stdout.write(f"{format_table(results)}\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"Not a result of quire-engine bench --json: {error!r}")


def format_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A block for each result, with a line for each of its figures, offline and served, and a column for each system
    that was measured there; failures below it.
    """
    return "\n\n".join([HEAD, *("\n".join(_block(result)) for result in results)])


def _block(result: Mapping[str, Any]) -> list[str]:
    rows = list(rows_of(result))
    names = list(dict.fromkeys(name for row in rows for name in row.medians))
    cells = [["", *names], *([row.what, *(_cell(row, name) for name in names)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [result["title"]]
    for first, *others in cells:
        columns = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *columns]).rstrip())
    failed = {name: each["failure"] for name, each in result["systems"].items()}
    failed |= {f"{name} served": each["failure"] for name, each in result.get("served", {}).items()}
    return lines + [f"{name}: {failure}" for name, failure in failed.items() if failure]


def rows_of(result: Mapping[str, Any]) -> Iterator[Row]:
    """The figures of a result in their order."""
    for figure, unit in result["units"].items():
        medians = {
            name: each["medians"][figure] for name, each in result["systems"].items() if figure in each["medians"]
        }
        if medians:
            ratios = {name: each[figure] for name, each in result["ratios"].items() if figure in each}
            yield Row(f"offline {figure}, {unit}", medians, ratios)
    served = result.get("served", {})
    for figure in dict.fromkeys(figure for each in served.values() for figure in each["medians"]):
        having = {name: each for name, each in served.items() if figure in each["medians"]}
        medians = {name: each["medians"][figure] for name, each in having.items()}
        ratios = {name: each["ratios"][figure] for name, each in having.items() if figure in each["ratios"]}
        yield Row(f"served {figure}", medians, ratios)


def _cell(row: Row, name: str) -> str:
    if name not in row.medians:
        return "-"
    value = row.medians[name]
    text = f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{text} ({row.ratios[name]:.2f})" if name in row.ratios else text


if __name__ == "__main__":
    main()
