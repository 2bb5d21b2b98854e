"""The pictures of the documentation are those that their script draws from what benchmarks wrote into docs/evidence, a
page shows each of them, and they can be read on a light and on a dark page.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from quire_engine.bench.bench_command import BenchReport
from quire_engine.bench.measure import UNITS, Readings
from quire_engine.bench.served import FIGURES, SAMPLINGS, ServedReadings
from quire_engine.bench.table import rows_of

from scripts import pictures
from scripts.pictures import DARK, ENGINES, IMAGES, LIGHT, PICTURES, ROOT, Picture

NAMED = re.compile(r"\]\(([^()\s]*images/[^()\s]+)\)")
WIDTHS = {"title": 7.6, "": 7.2}
"""Pixels of a character by the class of its text; of others 6.2. A wide font needs as much on average."""


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_is_as_its_script_draws_it(draw: Callable[[], Picture]) -> None:
    drawn = draw().drawn()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (IMAGES / f"{draw.__name__}.svg").read_text() == drawn, "run .venv/bin/python -m scripts.pictures"


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_no_text_leaves_its_picture(draw: Callable[[], Picture]) -> None:
    svg = ElementTree.fromstring(draw().drawn())
    width = float(svg.attrib["width"])
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        kind = text.attrib["class"]
        begin, length = float(text.attrib["x"]), WIDTHS.get(kind, 6.2) * len(text.text or "")
        begin -= length * {"end": 1, "middle": 0.5}.get(kind.rpartition(" ")[2], 0)
        assert 0 <= begin <= begin + length <= width, text.text


def test_a_page_shows_each_picture() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {(page.parent / image).resolve() for page in pages for image in NAMED.findall(page.read_text())}
    assert shown == set(IMAGES.iterdir())


def test_the_file_of_the_bars_is_what_the_benchmark_writes() -> None:
    published = json.loads(ENGINES.read_text())
    written = result_of(offline={"quire": 1.0, "vllm": 2.0}, served={"quire": 1.0, "vllm": 2.0})
    assert list(published) == list(written)
    for group in ("systems", "served"):
        assert list(published[group]["vllm"]) == list(written[group]["vllm"])
    known = {*UNITS, *written["served"]["vllm"]["medians"]}
    assert {figure for each in published["systems"].values() for figure in each["medians"]} <= known
    assert {figure for each in published["served"].values() for figure in each["medians"]} <= known


def test_tables_of_pages_have_the_figures_of_the_file() -> None:
    rows = {row.what: row.medians for row in rows_of(json.loads(ENGINES.read_text()))}
    systems = {"quire": "Quire", "vllm": "vLLM", "llama.cpp": "llama.cpp", "transformers": "transformers"}
    for page, (system, name) in product(("README.md", "docs/evidence/performance.md"), systems.items()):
        figures = [
            rows[f"offline {figure}, {UNITS[figure]}"][system] for figure in ("throughput", "latency", "prefill")
        ]
        cells = [f"\\D*\\b{re.escape(pictures.number_text(figure))}\\b[^|]*\\|" for figure in figures]
        assert re.search(rf"^\| {re.escape(name)}[^|]*\|{''.join(cells)}", (ROOT / page).read_text(), re.MULTILINE), (
            name
        )
    for sampling, column in zip(SAMPLINGS, (1, 4), strict=True):
        for figure in FIGURES.values():
            for place, system in enumerate(("quire", "vllm")):
                cell = served_table()[figure][column + place]
                assert cell.partition(" (")[0].strip("*") == pictures.number_text(
                    rows[f"served {sampling}: {figure}"][system]
                )


def test_bars_are_those_of_a_new_runs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(result_of(offline={"quire": 2345.0, "sglang": 1234.0}, served={"quire": 67.0})))
    monkeypatch.setattr(pictures, "ENGINES", file)
    assert {"Quire", "sglang", "2,345", "1,234"} <= set(texts(pictures.throughput()))
    assert {"Quire, T = 0", "67", "mean TTFT, ms"} <= set(texts(pictures.served()))
    widths = [float(bar.attrib["width"]) for bar in bars(pictures.throughput()) if bar.attrib["class"] != "box"]
    assert widths[1] / widths[0] == pytest.approx(1234 / 2345, rel=0.01)


def test_a_curve_has_a_point_for_each_run_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(pictures.documents(pictures.LOAD.read_text()))
    file = tmp_path / "load.json"
    file.write_text("\n".join(json.dumps(run, indent=2) for run in reversed(whole[:3])))
    monkeypatch.setattr(pictures, "LOAD", file)
    curves = [
        line for line in ElementTree.fromstring(pictures.load().drawn()).iter() if "curve" in line.get("class", "")
    ]
    assert [len(line.attrib["points"].split()) for line in curves] == [3] * 8
    for line in curves:
        across = [float(point.partition(",")[0]) for point in line.attrib["points"].split()]
        assert across == sorted(across)


def test_the_picture_of_a_placement_has_every_term_that_is_not_zero() -> None:
    for terms in pictures.placement_costs().values():
        assert sum(terms[name] for name in ("waiting", "prefill", "neighbours", "others")) == sum(terms.values())


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_contrast_with_their_background(theme: Mapping[str, str]) -> None:
    for text, behind in product(("fg", "muted"), ("page", "fill")):
        assert contrast(theme[text], theme[behind]) >= 4.5  # of WCAG for text
    for bar in ("blue", "green"):
        assert contrast("#ffffff", theme[bar]) >= 4.5
    assert contrast(theme["red"], theme["page"]) >= 4.5
    for shape in ("blue", "green", "red", "grey"):
        assert contrast(theme[shape], theme["page"]) >= 3  # of WCAG for graphics


def result_of(offline: Mapping[str, float], served: Mapping[str, float]) -> dict[str, Any]:
    """What ``quire-engine bench --json`` writes of one round, in which each figure of a system is the same number."""
    readings = {name: Readings({"throughput": [value], "latency": [value]}) for name, value in offline.items()}
    values = {
        name: ServedReadings({sampling: {key: [value] for key in FIGURES} for sampling in SAMPLINGS})
        for name, value in served.items()
    }
    title = "a shape: 3 requests; one stream; served 3 requests; medians of 1 rounds"
    return BenchReport(title, readings, {}, None, {}, values).as_data()


def served_table() -> dict[str, list[str]]:
    """The rows of the first table of servers, by their figures."""
    section = (ROOT / "docs/evidence/performance.md").read_text().partition("### Served")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in reversed(rows)}


def texts(picture: Picture) -> Iterator[str]:
    """What is written in a picture."""
    return (
        each.text or "" for each in ElementTree.fromstring(picture.drawn()).iter("{http://www.w3.org/2000/svg}text")
    )


def bars(picture: Picture) -> Iterator[ElementTree.Element]:
    """The rectangles of a picture."""
    return ElementTree.fromstring(picture.drawn()).iter("{http://www.w3.org/2000/svg}rect")


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2 between two colors."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
