"""The dashboards ask for what there is, in PromQL, and stand on Grafana's grid."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import queries
from tests.support.pages import ROOT

FOLDER = ROOT / "charts" / "quire" / "files" / "dashboards"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
GRID = 24


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def expressions(dashboard: dict) -> Iterator[tuple[str, str]]:
    """Every query with whose it is, those of the variables included."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.+), [a-z]+\)", variable.get("definition", "")):
            yield variable["name"], match[1]


def test_there_are_dashboards_and_each_has_a_name_of_its_own():
    assert [path.stem for path in DASHBOARDS] == [load(path)["uid"] for path in DASHBOARDS]
    assert DASHBOARDS
    assert len({load(path)["title"] for path in DASHBOARDS}) == len(DASHBOARDS)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_queries_existing_metrics(path):
    wrong = [f"{place}: {text}" for place, query in expressions(load(path)) for text in queries.complaints(query)]
    assert not wrong


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_heeds_the_dashboards_variables(path):
    dashboard = load(path)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\$\{?([a-z]+)\}?", target["expr"]))
            assert used <= variables, panel["title"]
            for series in queries.selectors(target["expr"]):
                assert "namespace" in series.labels, panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_legends_name_labels_that_are_left(path):
    """A label that was summed away would stand there as nothing."""
    for panel in load(path)["panels"]:
        for target in panel.get("targets", ()):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = queries.grouped(target["expr"])
            left = grouped or set().union(
                queries.TARGET_LABELS, *(each.labels for each in queries.selectors(target["expr"]))
            )
            assert wanted <= left, panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_have_descriptions(path):
    taken: set[tuple[int, int]] = set()
    panels = load(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= GRID
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_between_them_they_show_every_metric():
    """But the names that others' dashboards know."""
    shown = {
        series.name
        for path in DASHBOARDS
        for _, query in expressions(load(path))
        for series in queries.selectors(query)
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    every = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in queries.exported_metrics() if not name.startswith("vllm:")
    }
    assert not every - families
