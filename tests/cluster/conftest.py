"""One release for most rows, a client that was not disturbed, and the table that rows write."""

import os
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster, ClusterError, Hooks, Release, missing, spare_node
from tests.cluster.load import Agents, Known, undisturbed
from tests.cluster.rows import ROOT, Row, write
from tests.kube.values import over, with_values

CHART = ROOT / "charts" / "quire"
Values = dict[str, Any]
Releases = Callable[..., Release]
VALUES = "QUIRE_CLUSTER_VALUES"
"""A file with values of the chart for this cluster."""
LIMIT = 800
"""Seconds that a row may take."""
LINES: dict[str, str] = {}
"""Of the rows that ran well, by their names."""
ORDER: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-rows", action="store_true", help="write the table in docs/evidence/failures.md anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    for item in items:
        for mark in item.iter_markers("row"):
            ORDER.append(mark.args[0])
            item.add_marker(pytest.mark.timeout(LIMIT))
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    row = getattr(item, "funcargs", {}).get("row")
    if report.when == "call" and isinstance(row, Row):
        if report.passed:
            LINES[row.name] = row.line()
            if item.config.getoption("--write-rows", default=False):
                write(LINES, ORDER)
        clients = (f"{seen.worst}; itself late by {seen.late:.1f} s; {seen.errors}" for seen in row.seen)
        print(row.line(), *clients, sep="\n", flush=True)
    return report


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture(scope="session")
def hooks() -> Hooks:
    return Hooks.here()


@pytest.fixture(scope="session")
def values(client_node: str) -> Values:
    """Those of the walkthrough in k8s/README.md with a fixed number of engines, short times to shut down, and Redis on
    a node that stays, as its volume may be bound to one; over them those for this cluster.
    """
    own = os.environ.get(VALUES)
    walkthrough = yaml.safe_load((ROOT / "k8s" / "kind" / "values.yaml").read_text())
    chosen = with_values(
        walkthrough,
        autoscaling__mode="none",
        models__demo__dtype="float32",
        models__demo__flags={"kvCacheMemory": 64 << 20, "swapSpace": 0.0625},
        models__demo__resources__requests__cpu="100m",
        models__demo__shutdownDelay=2,
        router__shutdownDelay=5,
        router__resources__requests__cpu="100m",
        redis__nodeSelector={"kubernetes.io/hostname": client_node},
    )
    return over(chosen, yaml.safe_load(Path(own).read_text())) if own else chosen


@pytest.fixture(scope="session")
def namespaces(cluster: Cluster) -> Iterator[Callable[[], str]]:
    """Makes namespaces, each with a claim on the demo model, which are there until the end."""
    with ExitStack() as stack:

        def make() -> str:
            name = f"quire-test-{uuid.uuid4().hex[:6]}"
            stack.callback(cluster.forget, name)
            cluster.namespaced(name)
            return name

        yield make


@pytest.fixture(scope="session")
def releases(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Release]:
    """Makes releases of a name in a namespace; nothing of them is installed yet."""
    folder = tmp_path_factory.mktemp("values")
    return lambda namespace, name: Release(cluster, namespace, name, folder)


@pytest.fixture(scope="session")
def release(namespaces: Callable[[], str], releases: Releases, values: Values) -> Iterator[Release]:
    """Two routers, two engines and Redis, for all rows that leave them as they were."""
    made = releases(namespaces(), "quire")
    made.set(CHART, values)
    yield made
    with suppress(ClusterError):
        made.uninstall()


@pytest.fixture(scope="session")
def client_node(cluster: Cluster) -> str:
    """Where clients run: a node that no row disturbs."""
    return cluster.nodes()[0]


@pytest.fixture(scope="session")
def known(release: Release, client_node: str) -> Known:
    """The answers that every client of every release must get."""
    return undisturbed(release, client_node)


@pytest.fixture(scope="session")
def agents(release: Release) -> Iterator[Agents]:
    made = Agents(release)
    yield made
    made.close()


@pytest.fixture
def row(request: pytest.FixtureRequest, known: Known, client_node: str) -> Row:
    mark = request.node.get_closest_marker("row")
    return Row(mark.args[0], known, client_node)


@pytest.fixture
def two_nodes(cluster: Cluster) -> str:
    """The node that may be taken away. Skips where there is none."""
    if (node := spare_node()) is None or len(cluster.nodes()) < 2:
        pytest.skip("needs a second node, and its name in QUIRE_CLUSTER_NODE")
    return node
