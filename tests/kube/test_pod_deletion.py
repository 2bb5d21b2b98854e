"""Kubernetes' own ReplicaSet controller takes away the pod whose engine costs least, as routers have marked it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from quire_router.autoscale.pod_deletion_cost import PodDeletionCosts
from quire_router.clients.kube_client import KubeAccess, kube_client
from quire_router.clients.kube_lease import KubeLease

from tests.kube.cluster import RealCluster, missing, open_cluster, wait_until
from tests.support.engines_in_pods import fleet
from tests.support.processes import Process

CONTROLLERS = "kube-controller-manager"


@pytest.fixture(params=["KUBEBUILDER_ASSETS", "KUBECONFIG"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealCluster]:
    """One with a ReplicaSet controller."""
    if why := missing(request.param):
        pytest.skip(why)
    with ExitStack() as stack:
        (tmp_path / "server").mkdir()
        opened = stack.enter_context(open_cluster(request.param, tmp_path / "server"))
        (tmp_path / "kubeconfig").write_text(opened.kubeconfig)
        if request.param == "KUBEBUILDER_ASSETS":
            program = shutil.which(CONTROLLERS, path=os.environ[request.param])
            if program is None:
                pytest.skip(f"KUBEBUILDER_ASSETS has no {CONTROLLERS}, which is not among what setup-envtest fetches")
            command = [program, "--kubeconfig", str(tmp_path / "kubeconfig"), "--controllers", "replicaset-controller"]
            command += ["--leader-elect=false", "--secure-port", "0"]
            stack.callback(Process(command, tmp_path / "controllers.log").stop)
        yield opened


def replica_set(replicas: int) -> dict[str, Any]:
    """Pods that nothing runs in: their image is nowhere."""
    labels = {"app": "engines"}
    container = {"name": "engine", "image": "quire.invalid/engine:none"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    return {
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "engines"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }  # fmt: skip


async def test_the_pod_whose_end_costs_least_goes_first(cluster: RealCluster, tmp_path: Path) -> None:
    with cluster.namespace() as namespace:
        sets = f"/apis/apps/v1/namespaces/{namespace}/replicasets"
        cluster.request("POST", sets, replica_set(4))

        def pods() -> list[dict[str, Any]]:
            found = cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
            return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

        def settled() -> bool:
            """Either all are on a node or none is, as those without one go first."""
            return len(pods()) == 4 and len({"nodeName" in pod["spec"] for pod in pods()}) == 1

        wait_until(settled, "four pods")
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "marks"}}
        cluster.request("POST", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases", lease)
        names = sorted(pod["metadata"]["name"] for pod in pods())
        names = [names[2], names[0], names[3], names[1]]  # the order in which they are to go
        access = KubeAccess(str(tmp_path / "kubeconfig"))
        async with fleet([f"{namespace}/{name}" for name in names]) as (pool, index), kube_client(access) as client:
            costs = PodDeletionCosts(pool, index, "marks", "router", access)
            await costs.update(client, KubeLease(namespace, "marks", "router"))
        for left in (3, 2, 1):
            there = cluster.request("GET", f"{sets}/engines")
            there["spec"]["replicas"] = left
            cluster.request("PUT", f"{sets}/engines", there)
            wait_until(lambda left=left: len(pods()) == left, f"{left} pods")
            assert {pod["metadata"]["name"] for pod in pods()} == set(names[-left:])
