"""What clients see when nodes, and what the cluster itself is made of, go away: one node of two, Redis' volume, the API
server, DNS. The spare node (``QUIRE_CLUSTER_NODE``) is the one that goes; clients run on another.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Hooks, Release, eventually
from tests.cluster.conftest import CHART, Releases, Values
from tests.cluster.rows import Row
from tests.kube.values import with_values

AWAY = 30.0
"""Seconds that something is away."""
NOTICED = 120.0
"""Seconds in which Kubernetes notices that a node is away; 40 to 50 as it comes."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""Says that a node is off, so that what ran there may be made anew elsewhere at once."""


@pytest.fixture
def spread(release: Release, two_nodes: str) -> Iterator[None]:
    """A router and an engine on each node, before and after the row."""
    spread_out(release)
    yield
    spread_out(release)


@pytest.fixture
def does(hooks: Hooks, request: pytest.FixtureRequest) -> Callable[..., None]:
    """The hooks, where there are those that the mark ``needs`` names."""
    for words in request.node.get_closest_marker("needs").args:
        node = (request.getfixturevalue("two_nodes"),) if len(words) == 1 else ()
        if why := hooks.missing(*words, *node):
            pytest.skip(why)
    return hooks


def spread_out(release: Release) -> None:
    """Starts pods anew where all of a kind are on one node, which a node that was away leaves behind."""
    release.settled()
    for component in ("engine", "router"):
        for _ in range(3):
            if len(nodes_of(release, component)) > 1:
                break
            release.kubectl("rollout", "restart", release.workload(component))
            release.settled(component)


def nodes_of(release: Release, component: str) -> set[str]:
    """Where the pods of a component are."""
    return {pod["spec"]["nodeName"] for pod in release.pods(component)}


@pytest.mark.row("routers and engines are on both nodes, where no node has a zone's label")
def test_spread(row: Row, cluster: Cluster, release: Release, two_nodes: str) -> None:
    with row.timed():
        release.settled()
        labels = [node["metadata"]["labels"] for node in cluster.items("nodes")]
        assert not [each for each in labels if "topology.kubernetes.io/zone" in each]
        for component in ("engine", "router"):
            release.kubectl("scale", release.workload(component), "--replicas=0")
        for component in ("engine", "router"):
            eventually("all are gone", lambda component=component: not release.pods(component))
            release.kubectl("scale", release.workload(component), "--replicas=2")
        release.settled()
        assert both_are_on_both(release)


@pytest.mark.row("routers and engines are on both nodes again when all are rolled out")
def test_spread_after_a_rollout(row: Row, release: Release, spread: None) -> None:
    with row.timed():
        for component in ("engine", "router"):
            release.kubectl("rollout", "restart", release.workload(component))
        release.settled()
        assert both_are_on_both(release)


def both_are_on_both(release: Release) -> bool:
    """Whether each of the two nodes has an engine and a router."""
    return len(nodes_of(release, "engine")) == len(nodes_of(release, "router")) == 2


@pytest.mark.row("a node with an engine and a router is drained")
def test_drained(row: Row, release: Release, two_nodes: str, spread: None) -> None:
    own = f"app.kubernetes.io/instance={release.name}"
    drain = ("drain", two_nodes, "--ignore-daemonsets", "--delete-emptydir-data", "--pod-selector", own)
    try:
        with row.client(release):
            release.cluster.kubectl(*drain, "--timeout=240s", seconds=250)
            release.settled()
            assert two_nodes not in nodes_of(release, "engine") | nodes_of(release, "router")
    finally:
        release.cluster.kubectl("uncordon", two_nodes)


@pytest.mark.needs(("cut",), ("mend",))
@pytest.mark.row(f"a node with an engine and a router is cut off for {AWAY:.0f} s")
def test_cut_off(row: Row, release: Release, two_nodes: str, does: Callable[..., None], spread: None) -> None:
    with row.client(release):
        does("cut", two_nodes)
        try:
            time.sleep(AWAY)
        finally:
            does("mend", two_nodes)
        eventually("the node is back", lambda: release.cluster.ready(two_nodes))
        release.settled()


@pytest.mark.needs(("end",), ("begin",))
@pytest.mark.row("a node with an engine and a router is lost, and what ran there made anew elsewhere")
def test_lost(row: Row, release: Release, two_nodes: str, does: Callable[..., None], spread: None) -> None:
    cluster = release.cluster
    try:
        with row.client(release):
            does("end", two_nodes)
            eventually("Kubernetes notices", lambda: not cluster.ready(two_nodes), seconds=NOTICED)
            cluster.kubectl("taint", "node", two_nodes, OUT_OF_SERVICE)
            eventually("nothing is left there", lambda: not left_on(release, two_nodes))
            release.settled()
    finally:
        does("begin", two_nodes)
        eventually("the node is back", lambda: cluster.ready(two_nodes))
        cluster.kubectl("taint", "node", two_nodes, f"{OUT_OF_SERVICE.partition('=')[0]}-")


def left_on(release: Release, node: str) -> list[Any]:
    """Engines and routers that a node has."""
    pods = [*release.pods("engine"), *release.pods("router")]
    return [pod for pod in pods if pod["spec"].get("nodeName") == node]


@pytest.mark.needs(("stop", "api-server"), ("start", "api-server"))
@pytest.mark.row(f"the API server is away for {AWAY:.0f} s")
def test_api_server_away(row: Row, release: Release, does: Callable[..., None]) -> None:
    release.settled()
    with row.client(release):
        does("stop", "api-server")
        try:
            time.sleep(AWAY)
        finally:
            does("start", "api-server")
        eventually("it answers", release.cluster.nodes)
        release.settled()


@pytest.mark.needs(("stop", "dns"), ("start", "dns"))
@pytest.mark.row(f"DNS is away for {AWAY:.0f} s")
def test_dns_away(row: Row, release: Release, does: Callable[..., None]) -> None:
    release.settled()
    with row.client(release):
        does("stop", "dns")
        try:
            time.sleep(AWAY)
        finally:
            does("start", "dns")
        release.settled()


@pytest.mark.row("Redis loses its volume")
def test_redis_loses_its_volume(row: Row, release: Release) -> None:
    release.settled()
    with row.client(release):
        (pod,) = release.pods("redis")
        claim = json.loads(release.kubectl("get", "pvc", f"data-{pod['metadata']['name']}", "--output", "json"))
        release.kubectl("delete", "pvc", claim["metadata"]["name"], "--wait=false")
        release.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        eventually("another claim is bound", lambda: bound_anew(release, claim))
        release.settled()


def bound_anew(release: Release, claim: dict[str, Any]) -> bool:
    """Whether a claim of the same name is there, and bound."""
    found = json.loads(release.kubectl("get", "pvc", claim["metadata"]["name"], "--output", "json"))
    return found["metadata"]["uid"] != claim["metadata"]["uid"] and found["status"].get("phase") == "Bound"


@pytest.mark.row("Redis without a volume is deleted")
def test_redis_without_a_volume(row: Row, releases: Releases, namespaces: Callable[[], str], values: Values) -> None:
    release = releases(namespaces(), "quire")
    release.set(CHART, with_values(copy.deepcopy(values), redis__persistence__enabled=False))
    try:
        with row.client(release):
            (pod,) = release.pods("redis")
            release.kubectl("delete", "pod", pod["metadata"]["name"])
            release.settled()
    finally:
        release.uninstall()
