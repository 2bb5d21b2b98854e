"""The rows of the table in docs/evidence/failures.md: each is a test with the mark ``row``, and what its client saw."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.client import Seen
from tests.cluster.cluster import Release
from tests.cluster.load import MODEL, Known, Load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "failures.md"
HEAD = (
    "| row | took | answers | longest pause | first token | errors seen | lost | repeated | changed |",
    "|---|---|---|---|---|---|---|---|---|",
)
MORE = 6
"""Answers that a client gets after the trouble."""


@dataclass
class Row:
    """One row. ``took`` is how many seconds the trouble lasted, and ``seen`` what clients saw of it."""

    name: str
    known: Known
    node: str
    took: float = 0.0
    seen: list[Seen] = field(default_factory=list)

    @contextmanager
    def client(self, release: Release, model: str = MODEL, *, key: str = "", more: int = MORE) -> Iterator[Load]:
        """A client that asks the whole time, and some more when the trouble is over. Raises ``AssertionError`` for
        anything that is lost, repeated or changed.
        """
        began = time.monotonic()
        with Load(release, self.known, self.node, model, key) as load:
            began = time.monotonic()
            yield load
            self.took = max(self.took, time.monotonic() - began)
            load.answers(more)
        self.seen.append(load.seen)
        wrong = {name: getattr(load.seen, name) for name in ("lost", "repeated", "changed") if getattr(load.seen, name)}
        assert not wrong, f"{json.dumps(wrong)[:2000]} of {load.seen.answers}; errors: {load.seen.errors}"

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Takes the time of what has no client, or of a part of the trouble."""
        began = time.monotonic()
        yield
        self.took = time.monotonic() - began

    def line(self) -> str:
        """The row as the table has it."""
        if not self.seen:
            return f"| {self.name} | {self.took:.0f} s | | | | | | | |"
        total, clients = Seen(), self.seen
        for seen in clients:
            total.pause, total.first = max(total.pause, seen.pause), max(total.first, seen.first)
        errors = sum(sum(seen.errors.values()) for seen in clients)
        counts = [sum(len(getattr(seen, name)) for seen in clients) for name in ("lost", "repeated", "changed")]
        answers = sum(seen.answers for seen in clients)
        figures = [answers, f"{total.pause:.1f} s", f"{total.first:.1f} s", errors, *counts]
        return f"| {self.name} | {self.took:.0f} s | {' | '.join(map(str, figures))} |"


def rows_of(page: str) -> dict[str, str]:
    """The lines of a page's table, by the name of the row."""
    lines = page.splitlines()
    first = lines.index(HEAD[0]) + len(HEAD)
    last = next((place for place in range(first, len(lines)) if not lines[place].startswith("|")), len(lines))
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[first:last]}


def merged(before: Mapping[str, str], ran: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """The table's lines, of rows that ran their new ones: in the ``order`` of the tests where it has them all, else the
    others stay where they are.
    """
    if set(before) <= set(order):
        return [ran.get(name) or before[name] for name in order if name in ran or name in before]
    names, last = list(before), -1
    for name in order:
        if name in before:
            last = names.index(name)
        elif name in ran:
            last += 1
            names.insert(last, name)
    return [ran.get(name) or before[name] for name in names]


def write(ran: Mapping[str, str], order: Sequence[str]) -> None:
    """Writes the page's table anew."""
    page = PAGE.read_text()
    before = rows_of(page)
    old, new = "\n".join([*HEAD, *before.values()]), "\n".join([*HEAD, *merged(before, ran, order)])
    PAGE.write_text(page.replace(old, new))
