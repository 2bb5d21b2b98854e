"""Engines from none to several and back to none, by each kind of autoscaler, while what it asks is started anew."""

import copy
from collections.abc import Callable

import pytest

from tests.cluster.cluster import Cluster, Release, eventually
from tests.cluster.conftest import CHART, Releases, Values
from tests.cluster.rows import Row
from tests.kube.values import with_values

SCALED = {"minReplicas": 0, "maxReplicas": 3, "targetLoad": 1, "scaleDownSeconds": 30, "scaleDownPods": 4}
KEDA = {"pollingInterval": 5, "cooldownPeriod": 15}
WAY = "0 → 1 → 3 → 0, and the server of its metrics rolled out meanwhile"
KEDA_NAMESPACE = "keda"
METRICS = "v1beta1.external.metrics.k8s.io"


def unavailable(cluster: Cluster, mode: str) -> str | None:
    """Why a mode cannot be tried, or None."""
    if mode == "keda":
        if not cluster.serves("keda.sh/v1alpha1"):
            return "KEDA is not installed"
        # Definitions alone scale nothing.
        running = cluster.kubectl(
            "get", "deployments", "--namespace", "keda", "--output", "jsonpath={..availableReplicas}"
        )
        return None if running.strip() else "KEDA's definitions are there, and its operator is not running"
    if METRICS in cluster.kubectl("get", "apiservices", "--output", "name"):
        return f"{METRICS} has a server already"
    return None if cluster.minor() >= 37 else "a HorizontalPodAutoscaler goes to none from Kubernetes 1.37 on"


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("hpa", marks=pytest.mark.row(f"HorizontalPodAutoscaler: {WAY}")),
        pytest.param("keda", marks=pytest.mark.row(f"KEDA: {WAY}")),
    ],
)
def test_from_none_to_several_and_back(
    row: Row, cluster: Cluster, releases: Releases, namespaces: Callable[[], str], values: Values, mode: str
) -> None:
    if why := unavailable(cluster, mode):
        pytest.skip(why)
    release = releases(namespaces(), "quire")
    scaled = with_values(copy.deepcopy(values), autoscaling={"mode": mode, "keda": KEDA})
    release.set(CHART, with_values(scaled, models__demo__autoscaling=SCALED))
    try:
        eventually("no engine is left", lambda: not release.pods("engine"), seconds=300)
        with row.client(release), row.client(release):
            eventually("three engines are ready", lambda: ready(release) == 3, seconds=300)
            roll_out_the_metrics(cluster, release, mode)
        eventually("no engine is left", lambda: not release.pods("engine"), seconds=300)
    finally:
        release.uninstall()


def roll_out_the_metrics(cluster: Cluster, release: Release, mode: str) -> None:
    """Starts anew what the autoscaler asks: the routers, and KEDA's own pods, which ask them."""
    release.kubectl("rollout", "restart", release.workload("router"))
    release.settled("router")
    if mode == "keda":
        cluster.kubectl("--namespace", KEDA_NAMESPACE, "rollout", "restart", "deployment")
        deployments = [each["metadata"]["name"] for each in cluster.items("--namespace", KEDA_NAMESPACE, "deployments")]
        for name in deployments:
            cluster.kubectl("--namespace", KEDA_NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=170s")


def ready(release: Release) -> int:
    """How many engines are."""
    statuses = [pod["status"].get("containerStatuses", [{}])[0] for pod in release.pods("engine")]
    return sum(bool(status.get("ready")) for status in statuses)
