"""Draws the pictures of the documentation: ``python scripts/pictures.py`` writes them all into docs/images.

Figures come from JSON files in docs/evidence. The pictures follow the viewer's light or dark theme.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES, EVIDENCE = ROOT / "docs" / "images", ROOT / "docs" / "evidence"
STYLE = """
:root { --fg: #1f2328; --muted: #59636e; --line: #c4ccd4; --fill: #f6f8fa }
:root { --blue: #0969da; --green: #1a7f37; --red: #cf222e }
@media (prefers-color-scheme: dark) {
:root { --fg: #e6edf3; --muted: #9198a1; --line: #4b535d; --fill: #161b22 }
:root { --blue: #2f81f7; --green: #2ea043; --red: #f85149 }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--fg) }
.title { font-weight: 600 } .muted { fill: var(--muted); font-size: 12px } .on { fill: #fff; font-size: 12px }
.box { fill: var(--fill); stroke: var(--line) } .line { stroke: var(--muted); fill: none }
.blue { fill: var(--blue) } .green { fill: var(--green) } .red { fill: var(--red) } .grey { fill: var(--line) }
"""
ROW = 18
"""Pixels from one line of text to the next."""


class Picture:
    """An SVG of ``width`` by ``height`` pixels. ``title`` says what it shows to those who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Writes one line; ``kind`` are classes of ``STYLE``."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draws a filled rectangle."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>')

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str]) -> None:
        """Draws a box with a title and lines below it."""
        self.bar(x, y, width, height)
        for number, words in enumerate(lines):
            self.text(x + 14, y + 24 + number * ROW, words, "muted" if number else "title")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws a line through points, with a head at its end."""
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        self._parts.append(f'<path d="{path}" class="line" marker-end="url(#head)"/>')

    def drawn(self) -> str:
        """The file's text."""
        width, height = self._size
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{head}<path d="M0 0 L8 4 L0 8 z" fill="var(--muted)"/></marker></defs>',
                *self._parts,
                "</svg>\n",
            ]
        )


def architecture() -> Picture:
    """The parts, what flows between them, and what each keeps."""
    picture = Picture(800, 300, "Clients, routers, engines and Redis, and what each of them keeps")
    picture.box(10, 100, 164, 96, ["Clients", "OpenAI, Anthropic,", "gRPC, a browser", "keep: the last event id"])
    picture.box(
        260,
        20,
        210,
        114,
        [
            "Router",
            "API, tenants, placement",
            "keeps: prefix index of engines,",
            "the load of all routers,",
            "streams under way",
        ],
    )
    picture.box(260, 164, 210, 60, ["Router", "any number, all equal"])
    picture.box(580, 20, 210, 96, ["Engine", "model, scheduler", "keeps: paged KV memory on", "device, host and disk"])
    picture.box(580, 140, 210, 60, ["Engine", "of Quire, vLLM or SGLang"])
    picture.box(260, 244, 530, 46, ["Redis", ""])
    picture.text(320, 268, "keeps: each request and its tokens, limits, usage, batches, conversations", "muted")
    picture.arrow((174, 140), (258, 90))
    picture.arrow((174, 150), (258, 190))
    picture.text(14, 216, "REST and gRPC, to any router", "muted")
    picture.arrow((470, 66), (578, 60))
    picture.arrow((470, 90), (578, 160))
    picture.arrow((470, 180), (578, 90))
    picture.arrow((470, 196), (578, 180))
    picture.text(508, 52, "gRPC", "muted")
    picture.arrow((365, 224), (365, 242))
    picture.arrow((250, 66), (238, 66), (238, 267), (258, 267))
    return picture


def failover() -> Picture:
    """A stream whose engine is killed, on an axis of time."""
    picture = Picture(800, 200, "A stream over time: its engine is killed, and another engine continues it")
    rows = {"client": 20, "router": 60, "engine A": 100, "engine B": 140}
    for name, y in rows.items():
        picture.text(20, y + 14, name, "title")
    spans = [
        ("client", 110, 330, "blue", "tokens 1 to 120"), ("client", 480, 300, "blue", "tokens 121 to 300"),
        ("engine A", 110, 320, "green", "computes"), ("engine B", 450, 330, "green", "prefix, then token 121"),
        ("router", 110, 670, "box", "keeps the client's connection open and the tokens so far"),
    ]  # fmt: skip
    for row, x, width, kind, words in spans:
        picture.bar(x, rows[row], width, 20, kind)
        picture.text(x + 8, rows[row] + 15, words, "muted" if kind == "box" else "on")
    picture.text(430, 115, "✕ kill -9", "red")
    picture.text(443, 36, "pause", "muted")
    picture.text(110, 188, "time →", "muted")
    picture.text(300, 188, "the pause is 0.31 s in the median, 0.52 s at most (of 35)", "muted")
    return picture


def placement() -> Picture:
    """What a placement adds up for three engines."""
    picture = Picture(800, 190, "The seconds until the first token that a router expects of three engines")
    picture.text(20, 24, "Seconds until the first token, as the router expects it", "title")
    parts = (("queue", "grey"), ("prompt tokens that are not cached", "blue"), ("steps of those that run", "green"))
    engines = {
        "engine A: 90 % cached, busy": (0.9, 0.1, 0.5),
        "engine B: 60 % cached": (0.0, 0.45, 0.25),
        "engine C: idle, nothing cached": (0.0, 1.1, 0.05),
    }
    for number, (name, seconds) in enumerate(engines.items()):
        y, x = 46 + number * 34, 250.0
        picture.text(20, y + 15, name)
        for (_, kind), part in zip(parts, seconds, strict=True):
            picture.bar(x, y, part * 300, 20, kind)
            x += part * 300
        picture.text(
            x + 8,
            y + 15,
            f"{sum(seconds):.2f} s{' ← chosen' if number == 1 else ''}",
            "title" if number == 1 else "muted",
        )
    x = 250.0
    for name, kind in parts:
        picture.bar(x, 160, 12, 12, kind)
        picture.text(x + 18, 171, name, "muted")
        x += 40 + 6.4 * len(name)
    return picture


def survival() -> Picture:
    """What a client sees of each death."""
    picture = Picture(800, 210, "What dies, what is lost and what a client sees")
    rows = [
        ("engine", "nothing", "a pause of 0.3 s, then the next token"),
        ("router", "the last 20 to 100 ms of tokens", "reconnect to any router; the same tokens again"),
        ("Redis, back with its data", "nothing", "nothing"),
        ("Redis, back empty", "records that no router holds", "running streams continue; ended ones are unknown"),
        ("node with engine and router", "as of a router", "a pause, then reconnect"),
    ]
    for x, words in ((20, "What dies"), (230, "What is lost"), (470, "What a client sees")):
        picture.text(x, 24, words, "title")
    for number, row in enumerate(rows):
        y = 40 + number * 34
        picture.bar(10, y, 780, 28)
        for x, words in zip((20, 230, 470), row, strict=True):
            picture.text(x, y + 19, words, "muted" if x > 20 else "")
    return picture


def bars(figures: Mapping[str, Any], title: str) -> Picture:
    """One row of bars for each engine, one column for each figure."""
    columns = ("throughput", "latency", "prompt")
    names = list(figures["throughput"]["values"])
    picture = Picture(800, 86 + 34 * len(names), title)
    for place, column in enumerate(columns):
        figure = figures[column]
        x, values = 150 + place * 220, figure["values"]
        picture.text(x, 20, figure["unit"], "title")
        picture.text(x, 38, figure["of"], "muted")
        most = max(values.values())
        for number, name in enumerate(names):
            y = 52 + number * 34
            picture.bar(x, y, max(4, 130 * values[name] / most), 20, "blue" if name == "Quire" else "grey")
            picture.text(
                x + 136 * values[name] / most + 8, y + 15, f"{values[name]:,}", "title" if name == "Quire" else "muted"
            )
            if place == 0:
                picture.text(20, y + 15, name, "title" if name == "Quire" else "")
    below = 76 + 34 * len(names)
    picture.text(20, below, f"{figures['model']}, on {figures['machine']}", "muted")
    return picture


def throughput() -> Picture:
    """Quire next to its peers on a CPU."""
    figures = json.loads((EVIDENCE / "engines.json").read_text())
    return bars(figures, "Throughput and latency of Quire, vLLM, llama.cpp and transformers on one CPU")


PICTURES: tuple[Callable[[], Picture], ...] = (architecture, failover, placement, survival, throughput)


def main() -> None:
    """Writes each picture into the file of its name."""
    for draw in PICTURES:
        (IMAGES / f"{draw.__name__}.svg").write_text(draw().drawn())


if __name__ == "__main__":
    main()
