"""Draws the pictures of the documentation: ``.venv/bin/python -m scripts.pictures`` writes them into docs/images.

No figure is copied by hand. Bars and curves are what a benchmark wrote, so a new run's file takes the place
of the old one in docs/evidence:

    make bench && cp .run/bench-135m.json docs/evidence
    for rate in 0.25 0.5 1 1.5 2 3; do quire-engine simulate ... --rate $rate --json; done > docs/evidence/load.json

The flags of the second command are on the page performance.md. What a placement costs is what the router's own scorers
say, and the pause of a stream is read from its table. The pictures follow the viewer's light or dark theme.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from quire_router.engines.settings import ConnectionSettings
from quire_router.placement.engine_table import EngineTable, StepTimes
from quire_router.placement.policies import (
    CandidateView,
    PlacementQuery,
    PlacementSettings,
    PrefixMatches,
    make_scorers,
)

ROOT = Path(__file__).parents[1]
IMAGES, EVIDENCE = ROOT / "docs" / "images", ROOT / "docs" / "evidence"
ENGINES, LOAD, FAILURES = EVIDENCE / "bench-135m.json", EVIDENCE / "load.json", EVIDENCE / "failures.md"
NAMES = {"quire": "Quire", "vllm": "vLLM"}
"""How systems are written whose names in a benchmark's files are in small letters."""
LIGHT = {
    "page": "#ffffff", "fg": "#1f2328", "muted": "#59636e", "line": "#c4ccd4", "fill": "#f6f8fa", "grey": "#818b98",
    "blue": "#0969da", "green": "#1a7f37", "red": "#cf222e",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "fg": "#e6edf3", "muted": "#9198a1", "line": "#4b535d", "fill": "#161b22", "grey": "#6e7681",
    "blue": "#1f6feb", "green": "#238636", "red": "#f85149",
}  # fmt: skip
STYLE = f"""
:root {{ {"; ".join(f"--{name}: {color}" for name, color in LIGHT.items())} }}
@media (prefers-color-scheme: dark) {{
:root {{ {"; ".join(f"--{name}: {color}" for name, color in DARK.items())} }}
}}
text {{ font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--fg) }}
.title {{ font-weight: 600 }} .muted {{ fill: var(--muted); font-size: 12px }} .on {{ fill: #fff; font-size: 12px }}
.end {{ text-anchor: end }} .middle {{ text-anchor: middle }}
.box {{ fill: var(--fill); stroke: var(--line) }} .grid {{ stroke: var(--line) }}
.axis {{ stroke: var(--muted); fill: none }}
.blue {{ fill: var(--blue); color: var(--blue) }} .green {{ fill: var(--green); color: var(--green) }}
.red {{ fill: var(--red); color: var(--red) }} .grey {{ fill: var(--grey); color: var(--grey) }}
.curve {{ fill: none; stroke: currentColor; stroke-width: 2 }}
"""
A100 = StepTimes(step_seconds=0.0106, token_seconds=9.6e-5, sequence_seconds=1.7e-4, host_block_seconds=1e-4)
"""Of an engine with a model of 8 B parameters, in the placement that is shown."""
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
        self._parts.append(f'<path d="{path}" class="axis" marker-end="url(#head)"/>')

    def line(self, kind: str, *points: tuple[float, float]) -> None:
        """Draws a line through points."""
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{kind}"/>')

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
    picture = Picture(800, 306, "Clients, routers, engines and Redis, and what each of them keeps")
    picture.box(10, 100, 164, 96, ["Clients", "OpenAI, Anthropic,", "gRPC, a browser", "keep: the last event id"])
    router = ["Router", "API, tenants, placement", "keeps: prefix index of engines,", "the load of all routers,"]
    picture.box(260, 20, 210, 114, [*router, "streams under way"])
    picture.box(260, 164, 210, 60, ["Router", "any number, all equal"])
    picture.box(580, 20, 210, 96, ["Engine", "model, scheduler", "keeps: paged KV memory on", "device, host and disk"])
    picture.box(580, 140, 210, 60, ["Engine", "of Quire, vLLM or SGLang"])
    picture.box(260, 250, 530, 46, ["Redis"])
    picture.text(320, 274, "keeps: each request and its tokens, limits, usage, batches, conversations", "muted")
    picture.arrow((174, 140), (258, 90))
    picture.arrow((174, 150), (258, 190))
    picture.text(14, 216, "REST and gRPC, to any router", "muted")
    picture.arrow((470, 66), (578, 60))
    picture.arrow((470, 90), (578, 160))
    picture.arrow((470, 180), (578, 90))
    picture.arrow((470, 196), (578, 180))
    picture.text(508, 52, "gRPC", "muted")
    picture.arrow((365, 224), (365, 248))
    picture.arrow((260, 66), (240, 66), (240, 273), (258, 273))
    return picture


def request() -> Picture:
    """What a request passes, and what each part keeps of it."""
    picture = Picture(
        800, 340, "The life of a request: client, API, admission, placement, engine, journal, text, stream"
    )
    picture.box(4, 60, 102, 132, ["Client", "asks any", "router", "keeps: the", "last event id"])
    picture.bar(122, 10, 510, 236)
    picture.text(136, 32, "Router", "title")
    going = [
        ["1  API", "checks parameters,", "turns text to tokens", "keeps: the request"],
        ["2  Admission", "key, limits, fair queue", "keeps: what each", "tenant uses"],
        ["3  Placement", "fewest seconds", "keeps: what engines", "cache and compute"],
    ]
    coming = [
        ["7  Stream", "SSE, gRPC or JSON", "keeps: a bounded", "queue per client"],
        ["6  Text", "tokens to text", "keeps: what may be", "a stop string"],
        ["5  Journal", "writes every 20 ms", "keeps: tokens not", "yet written"],
    ]
    for place, (above, below) in enumerate(zip(going, coming, strict=True)):
        picture.box(130 + place * 166, 44, 158, 88, above)
        picture.box(130 + place * 166, 150, 158, 88, below)
    engine = [
        "4  Engine",
        "queue, prefill,",
        "decode",
        "",
        "keeps: KV blocks,",
        "and the batches",
        "that the router has",
        "not confirmed",
    ]
    picture.box(656, 44, 140, 194, engine)
    for x, gap in ((106, 24), (288, 8), (454, 8), (620, 36)):
        picture.arrow((x, 88), (x + gap - 1, 88))
        picture.arrow((x + gap, 182), (x + 1, 182))
    picture.box(
        122,
        270,
        674,
        62,
        ["Redis", "keeps: prompt, parameters, seed, the tokens so far, and which router owns the request"],
    )
    picture.arrow((541, 238), (541, 268))
    return picture


def failover() -> Picture:
    """A stream whose engine is killed, on an axis of time."""
    pause, longest, streams = killed_engine()
    picture = Picture(800, 226, "A stream over time: its engine is killed, and another engine continues it")

    def at(second: float) -> float:
        return 110 + (second + 0.5) * 480

    rows = {"client": 34, "router": 74, "engine A": 114, "engine B": 154}
    end = at(0.88)
    for name, y in rows.items():
        picture.text(20, y + 14, name, "title")
    moved = ConnectionSettings().refused_grace
    spans = [
        ("client", -0.5, 0.0, "blue", "tokens 1 to 120"),
        ("client", pause, 0.88, "blue", "tokens 121 to 300"),
        ("router", -0.5, 0.88, "box", "keeps the client's connection open, and the tokens so far"),
        ("engine A", -0.5, 0.0, "green", "decodes"),
        ("engine B", moved, pause, "grey", ""),
        ("engine B", pause, 0.88, "green", "decodes from token 121 on"),
    ]
    for row, begin, until, kind, words in spans:
        picture.bar(at(begin), rows[row], at(until) - at(begin), 20, kind)
        picture.text(at(begin) + 8, rows[row] + 15, words, "muted" if kind == "box" else "on")
    picture.text(at(0) + 8, rows["engine A"] + 15, "✕ kill -9", "red")
    picture.text(at(pause / 2), rows["client"] + 15, f"pause {pause:g} s", "muted middle")
    picture.text(at(moved) - 6, rows["engine B"] + 15, "computes the prompt and 120 tokens", "muted end")
    picture.line("axis", (110, 188), (end, 188))
    for second in (-0.4, -0.2, 0, 0.2, 0.4, 0.6, 0.8):
        picture.line("axis", (at(second), 188), (at(second), 193))
        picture.text(at(second), 208, f"{second:g} s", "muted middle")
    picture.text(20, 208, "since the kill", "muted")
    picture.text(
        at(-0.5), 16, f"{pause:g} s is the median of {streams} streams; the longest pause was {longest:g} s", "muted"
    )
    return picture


def killed_engine() -> tuple[float, float, int]:
    """The median and the longest pause of streams whose engine was killed, in seconds, and how many there were."""
    row = re.search(
        r"^\| an engine is killed .*?\| (\d+) \| ([\d.]+) s \| ([\d.]+) s", FAILURES.read_text(), re.MULTILINE
    )
    assert row is not None, "the table of pauses has another form"
    return float(row[2]), float(row[3]), int(row[1])


def placement() -> Picture:
    """What a placement adds up for three engines."""
    picture = Picture(800, 206, "The seconds that a router adds up for a prompt of 4,000 tokens at three engines")
    picture.text(20, 24, "Expected cost of a prompt of 4,000 tokens, in seconds", "title")
    kinds = {"waiting": "grey", "prefill": "blue", "neighbours": "green", "others": "red"}
    costs = placement_costs()
    sums = {name: sum(terms.values()) for name, terms in costs.items()}
    scale = 430 / max(sums.values())
    for number, (name, terms) in enumerate(costs.items()):
        y, x = 44 + number * 34, 270.0
        picture.text(20, y + 15, name)
        for term, kind in kinds.items():
            picture.bar(x, y, terms[term] * scale, 20, kind)
            x += terms[term] * scale
        chosen = sums[name] == min(sums.values())
        picture.text(x + 8, y + 15, f"{sums[name]:.2f}{' ← chosen' if chosen else ''}", "title" if chosen else "muted")
    words = {
        "waiting": "prompts ahead",
        "prefill": "tokens that are not cached",
        "neighbours": "sequences that decode",
        "others": "who must wait for this one",
    }
    for number, (term, what) in enumerate(words.items()):
        x, y = 20 + number % 2 * 380, 160 + number // 2 * 24
        picture.bar(x, y, 12, 12, kinds[term])
        picture.text(x + 20, y + 11, term)
        picture.text(x + 108, y + 11, what, "muted")
    return picture


def placement_costs() -> dict[str, dict[str, float]]:
    """The terms that ``cost`` adds up for one prompt at three engines, in seconds: an example."""
    prompt = 4_000
    engines = {  # tokens that are cached, prompt tokens that wait, sequences that decode
        "engine A: 90 % cached, busy": (3_600, 9_000, 24),
        "engine B: 60 % cached": (2_400, 800, 12),
        "engine C: nothing cached, idle": (0, 0, 0),
    }
    table = EngineTable()
    rows = np.array([table.add(name) for name in engines], np.intp)
    device = np.zeros(len(table))
    for row, (cached, pending, decoding) in zip(rows, engines.values(), strict=True):
        device[row], table.pending_tokens[row], table.decoding[row] = cached, pending, decoding
        table.set_step_times(int(row), A100)
    matches = PrefixMatches(device, np.zeros(len(table)))
    view = CandidateView(PlacementQuery(prompt, 256, 1, rows, matches, mean_queued=0.2), table)
    columns = {name: view.score(scorer) for name, scorer in make_scorers(PlacementSettings()).items()}
    return {
        engine: {name: float(column[place]) for name, column in columns.items()} for place, engine in enumerate(engines)
    }


def survival() -> Picture:
    """What a client sees of each death."""
    picture = Picture(800, 210, "What dies, what is lost and what a client sees")
    rows = [
        ("engine", "nothing", f"a pause of {killed_engine()[0]:.1f} s, then the next token"),
        ("router", "the last 20 to 100 ms of tokens", "reconnects to any router; the same tokens again"),
        ("Redis, back with its data", "nothing", "nothing"),
        ("Redis, back empty", "records that no router holds", "streams continue; ended requests are 404"),
        ("node with engine and router", "as of a router", "a pause, then reconnects"),
    ]
    for x, words in ((20, "What dies"), (220, "What is lost"), (440, "What a client sees")):
        picture.text(x, 24, words, "title")
    for number, row in enumerate(rows):
        y = 40 + number * 34
        picture.bar(10, y, 780, 28)
        for x, words in zip((20, 220, 440), row, strict=True):
            picture.text(x, y + 19, words, "muted" if x > 20 else "")
    return picture


class Column(NamedTuple):
    """Bars of one figure: its unit, what it is of, and the value of each system."""

    unit: str
    of: str
    values: Mapping[str, float]


def bars(title: str, note: str, columns: Sequence[Column]) -> Picture:
    """One row of bars for each system, one column for each figure. Our own are blue."""
    names = list(dict.fromkeys(name for column in columns for name in column.values))
    left = 34 + 7 * max(map(len, names))
    room = (794 - left) / len(columns)
    picture = Picture(800, 104 + 34 * len(names), title)
    for number, name in enumerate(names):
        picture.text(20, 85 + number * 34, name, "title" if is_ours(name) else "")
    for place, column in enumerate(columns):
        x, most = left + place * room, max(column.values.values())
        picture.text(x, 20, column.unit, "title")
        for number, words in enumerate(wrap(column.of, int(room / 7))):
            picture.text(x, 38 + number * 16, words, "muted")
        for name, value in column.values.items():
            y, length = 70 + names.index(name) * 34, max(4.0, (room - 64) * value / most)
            picture.bar(x, y, length, 20, "blue" if is_ours(name) else "grey")
            picture.text(x + length + 8, y + 15, number_text(value), "title" if is_ours(name) else "muted")
    picture.text(20, 94 + 34 * len(names), note, "muted")
    return picture


def is_ours(name: str) -> bool:
    """Whether a system of a benchmark is Quire."""
    return name.startswith(NAMES["quire"])


def number_text(value: float) -> str:
    """A number as tables have it: one decimal below 100."""
    return f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def throughput() -> Picture:
    """Engines next to each other on a CPU, offline: what ``quire-engine bench --json`` wrote."""
    result = json.loads(ENGINES.read_text())
    what, _, workloads = result["title"].partition(": ")
    systems = {NAMES.get(name, name): each["medians"] for name, each in result["systems"].items()}
    measured = [
        figure for figure in ("throughput", "latency", "prefill") if any(figure in each for each in systems.values())
    ]
    columns = [
        Column(
            f"{unit} (less is better)" if (unit := result["units"][figure]).startswith("ms") else unit,
            words,
            {name: each[figure] for name, each in systems.items() if figure in each},
        )
        for figure, words in zip(measured, workloads.split("; "), strict=False)
    ]
    names = " and ".join([", ".join([*systems][:-1]), [*systems][-1]])
    return bars(f"Throughput and latency of {names} on one CPU", what, columns)


def served() -> Picture:
    """Servers next to each other under load: the same file's figures of ``--measure served``."""
    result = json.loads(ENGINES.read_text())
    what, _, workloads = result["title"].partition(": ")
    of = next(part for part in workloads.split("; ") if part.startswith("served "))
    figures: dict[str, dict[str, float]] = {}
    for server, each in result["served"].items():
        for case, value in each["medians"].items():
            sampling, _, figure = case.partition(": ")
            figures.setdefault(figure, {})[f"{NAMES.get(server, server)}, {sampling}"] = value
    columns = [
        Column(figure, "" if figure.endswith("/s") else "less is better", dict(sorted(values.items(), key=sampling_of)))
        for figure, values in figures.items()
    ]
    return bars("Throughput and latency of Quire and vLLM as servers on one CPU", f"{what}: {of}", columns)


def sampling_of(row: tuple[str, float]) -> str:
    """What rows are sorted by, so that servers stand below each other."""
    return row[0].partition(", ")[2]


def load() -> Picture:
    """Tokens per second and waits over load, simulated: what ``quire-engine simulate --json`` wrote for each rate."""
    results = sorted(documents(LOAD.read_text()), key=lambda result: result["settings"]["rate"])
    first = results[0]
    kinds = dict(zip(first["runs"], ("grey", "red", "green", "blue"), strict=True))
    picture = Picture(800, 340, "Output tokens per second and time to first token over load, with and without paging")
    panels: tuple[tuple[int, str, Callable[[Mapping[str, Any]], float], bool], ...] = (
        (70, "output tokens/s", lambda run: run["output_tokens_per_second"], False),
        (470, "mean time to first token, s", lambda run: run["ttft"]["mean"], True),
    )
    for x, what, value, logarithmic in panels:
        lines = {
            name: [(result["settings"]["rate"], value(result["runs"][name])) for result in results] for name in kinds
        }
        chart = Chart(picture, (x, 40, 300, 200), list(lines.values()), logarithmic=logarithmic)
        picture.text(x - 50, 20, what, "title")
        picture.text(x, 276, f"load: times the rate of {Path(first['settings']['trace']).stem}", "muted")
        for name, points in lines.items():
            chart.curve(points, kinds[name])
    for number, (name, kind) in enumerate(kinds.items()):
        x = 70 + number * 170
        picture.bar(x, 296, 12, 12, kind)
        picture.text(x + 20, 307, name)
    note = f"{first['runs'][name]['requests']:,} requests, simulated: {first['settings']['preset']}"
    picture.text(70, 330, note, "muted")
    return picture


class Chart:
    """Axes of a chart in the rectangle ``place`` (x, y, width, height) that has room for all ``curves``."""

    def __init__(
        self,
        picture: Picture,
        place: tuple[float, float, float, float],
        curves: Sequence[Sequence[tuple[float, float]]],
        *,
        logarithmic: bool,
    ) -> None:
        self._picture, self._place, self._logarithmic = picture, place, logarithmic
        x, y, width, height = place
        self._most = max(point[0] for curve in curves for point in curve)
        values = [point[1] for curve in curves for point in curve]
        if logarithmic:
            powers = range(floor(log10(min(values))), ceil(log10(max(values))) + 1)
            ticks = [10.0**power for power in powers]
            self._low, self._high = float(powers[0]), float(powers[-1])
        else:
            step = 10.0 ** floor(log10(max(values)))
            step *= 0.5 if max(values) < 3 * step else 1
            ticks = [number * step for number in range(ceil(max(values) / step) + 1)]
            self._low, self._high = 0.0, ticks[-1]
        for tick in ticks:
            _, level = self._at(0, tick)
            picture.line("grid", (x, level), (x + width, level))
            picture.text(x - 8, level + 4, f"{tick:,g}", "muted end")
        for across in range(ceil(self._most) + 1):
            picture.text(self._at(across, ticks[0])[0], y + height + 18, f"{across}", "muted middle")

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draws a line through the points, each with a dot."""
        places = [self._at(*point) for point in points]
        self._picture.line(f"curve {kind}", *places)
        for x, y in places:
            self._picture.bar(x - 3, y - 3, 6, 6, kind)

    def _at(self, across: float, value: float) -> tuple[float, float]:
        x, y, width, height = self._place
        level = log10(value) if self._logarithmic else value
        return x + width * across / self._most, y + height * (self._high - level) / (self._high - self._low)


def documents(text: str) -> Iterator[dict[str, Any]]:
    """The JSON documents of a file that follow one another, as a program writes that is run several times."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        document, at = decoder.raw_decode(text, at)
        yield document


PICTURES: tuple[Callable[[], Picture], ...] = (
    architecture,
    request,
    failover,
    placement,
    survival,
    throughput,
    served,
    load,
)


def main() -> None:
    """Writes each picture into the file of its name."""
    for draw in PICTURES:
        (IMAGES / f"{draw.__name__}.svg").write_text(draw().drawn())


if __name__ == "__main__":
    main()
