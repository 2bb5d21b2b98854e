"""What cannot run says which value to change: ``helm`` refuses it, or the pods of ``helm test`` and the last words of
those that fail do.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.cluster import ClusterError, Release, eventually
from tests.cluster.conftest import CHART, Releases, Values
from tests.cluster.rows import Row
from tests.kube.values import with_values

ONE = {"models__demo__replicas": 1, "router__replicas": 1}
IMPATIENT = {"router__limits__holdTimeout": 5, "tests__timeoutSeconds": 15}
Namespaces = Callable[[], str]
Made = Callable[..., Release]


@pytest.fixture
def made(releases: Releases, namespaces: Namespaces, values: Values) -> Any:
    """Makes a small release with other values, which need not become ready, and takes it away in the end."""
    taken: list[Release] = []

    def make(*, wait: bool = False, **changes: Any) -> Release:
        release = releases(namespaces(), "quire")
        taken.append(release)
        release.set(CHART, with_values(copy.deepcopy(values), **ONE, **IMPATIENT, **changes), wait=wait)
        return release

    yield make
    for release in taken:
        release.uninstall()


def complaint(release: Release) -> str:
    """What the pods of ``helm test`` say, one of which fails."""
    with pytest.raises(ClusterError, match="test"):
        release.test()
    return release.kubectl("logs", "--selector", "app.kubernetes.io/component=test", "--tail=-1")


@pytest.mark.row("a claim that is not there: `helm test` names `models.demo.source.pvc.claimName`")
def test_a_claim_that_cannot_bind(row: Row, made: Made) -> None:
    release = made(models__demo__source={"pvc": {"claimName": "nobody-has-it"}})
    with row.timed():
        said = complaint(release)
    assert "nobody-has-it (models.demo.source.pvc.claimName)" in said


@pytest.mark.row("an image that is not there: `helm test` names `engine.image`")
def test_an_image_that_is_not_there(row: Row, made: Made) -> None:
    release = made(engine__image={"tag": "gone"})
    release.settled("router")
    with row.timed():
        said = complaint(release)
    assert "quire-engine:gone-cpu (image.registry, engine.image)" in said


@pytest.mark.row("no right to read EndpointSlices: `helm test` names `router.discovery`")
def test_a_cluster_without_the_right(row: Row, made: Made) -> None:
    release = made()
    release.kubectl("delete", "rolebinding", f"{release.fullname}-router")
    release.kubectl("rollout", "restart", release.workload("router"))
    release.settled("router")
    with row.timed():
        said = complaint(release)
    assert "router.discovery: dns" in said


@pytest.mark.row("a model above its memory limit: the pod is OOMKilled, `helm test` names `…resources.limits.memory`")
def test_a_model_above_its_limit(row: Row, made: Made) -> None:
    release = made(
        models__demo__resources={"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    )
    release.settled("router")

    def ended() -> Any:
        statuses = [pod["status"].get("containerStatuses", [{}])[0] for pod in release.pods("engine")]
        states = [status.get(name, {}) for status in statuses for name in ("state", "lastState")]
        return [state["terminated"] for state in states if "terminated" in state]

    with row.timed():
        (end, *_) = eventually("an engine ends", ended)
        said = complaint(release)
    assert end["reason"] == "OOMKilled" or "limits.memory" in end.get("message", "")
    assert "models.demo.resources.limits.memory is 128Mi" in said


@pytest.mark.row("Redis without a volume that can be bound: `helm test` names `redis.persistence.storageClass`")
def test_a_redis_that_cannot_start(row: Row, made: Made) -> None:
    release = made(redis__persistence__storageClass="nobody-has-it")
    release.settled("router", "engine")
    with row.timed():
        said = complaint(release)
    assert "redis.persistence.storageClass" in said


@pytest.mark.row("two autoscalers for one Deployment: `helm` refuses")
def test_two_autoscalers(row: Row, release: Release, values: Values) -> None:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": release.workload("engine").partition("/")[2]}
    theirs = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "theirs", "namespace": release.namespace},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 2},
    }  # fmt: skip
    release.cluster.apply(theirs)
    try:
        with row.timed(), pytest.raises(ClusterError, match=r"theirs scales .* set models\.demo\.autoscaling\.enabled"):
            release.helm(
                "upgrade", release.name, str(CHART), "--reuse-values", "--dry-run=server",
                "--set-json", json.dumps({"autoscaling": {"mode": "hpa"}}),
            )  # fmt: skip
    finally:
        release.kubectl("delete", "horizontalpodautoscaler", "theirs")
