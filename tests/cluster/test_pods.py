"""What clients see when pods end, in every way in which they can."""

import copy
import time
from typing import Any

import pytest

from tests.cluster.cluster import ClusterError, Release, eventually
from tests.cluster.conftest import CHART
from tests.cluster.load import Agents, named
from tests.cluster.rows import Row
from tests.kube.values import with_values

FROZEN = 15.0
"""Seconds that a process is stopped."""
NAMES = {"engine": "an engine", "router": "a router", "redis": "Redis"}
EATEN = """
import os, time
with open("/proc/1/oom_score_adj", "w") as file:
    file.write("1000")
while True:
    if not os.fork():
        eaten = b"x" * (48 << 20)
        time.sleep(600)
    time.sleep(0.05)
"""
"""Takes memory of a container until its first process is killed: by many small processes, as the largest one goes."""
Pod = dict[str, Any]


def each(way: str, *components: str) -> Any:
    """The rows of one way to end: that of an engine, of a router and of Redis."""
    return pytest.mark.parametrize(
        "component",
        [pytest.param(key, marks=pytest.mark.row(f"{NAMES[key]} is {way}")) for key in components or NAMES],
    )


def replaced(release: Release, component: str, pod: Pod) -> None:
    """Waits until another pod is ready in the place of one."""
    uid = pod["metadata"]["uid"]
    eventually("its pod goes", lambda: uid not in [other["metadata"]["uid"] for other in release.pods(component)])
    release.settled(component)


def state(release: Release, pod: Pod) -> Any:
    """What Kubernetes says of a pod's container, which is started anew in its place."""
    name = pod["metadata"]["name"]
    (found,) = [other for other in release.pods_of_all_kinds() if other["metadata"]["name"] == name]
    return found["status"]["containerStatuses"][0]


def restarted(release: Release, component: str, pod: Pod) -> Any:
    """Waits until a pod's container was started anew and is ready; how the one before ended."""
    before = pod["status"]["containerStatuses"][0]["restartCount"]
    eventually("its container is started anew", lambda: state(release, pod)["restartCount"] > before)
    release.settled(component)
    return state(release, pod)["lastState"]["terminated"]


@each("deleted")
def test_deleted(row: Row, release: Release, component: str) -> None:
    release.settled()
    with row.client(release):
        pod = release.pods(component)[0]
        release.kubectl("delete", "pod", *named([pod]), "--wait=false")
        replaced(release, component, pod)


@each("deleted by force")
def test_deleted_by_force(row: Row, release: Release, component: str) -> None:
    release.settled()
    with row.client(release):
        pod = release.pods(component)[0]
        release.kubectl("delete", "pod", *named([pod]), "--grace-period=0", "--force")
        replaced(release, component, pod)


@each("evicted, and the other may not be", "engine", "router")
def test_evicted_against_its_budget(row: Row, release: Release, component: str) -> None:
    release.settled()
    with row.client(release):
        pod, other = release.pods(component)
        release.evict(pod)
        with pytest.raises(ClusterError, match="disruption budget"):
            release.evict(other)
        replaced(release, component, pod)


@each("evicted, which no budget forbids", "redis")
def test_evicted(row: Row, release: Release, component: str) -> None:
    release.settled()
    with row.client(release):
        (pod,) = release.pods(component)
        release.evict(pod)
        replaced(release, component, pod)


@each("killed (`kill -9`)")
def test_killed(row: Row, release: Release, agents: Agents, component: str) -> None:
    release.settled()
    agents.on(release.pods(component)[0]["spec"]["nodeName"])
    with row.client(release):
        pod = release.pods(component)[0]
        agents.signal(pod, "SIGKILL")
        assert restarted(release, component, pod)["exitCode"] == 137


@each(f"frozen for {FROZEN:.0f} s (`kill -STOP`)")
def test_frozen(row: Row, release: Release, agents: Agents, component: str) -> None:
    release.settled()
    agents.on(release.pods(component)[0]["spec"]["nodeName"])
    with row.client(release):
        pod = release.pods(component)[0]
        agents.signal(pod, "SIGSTOP")
        time.sleep(FROZEN)
        agents.signal(pod, "SIGCONT")
        release.settled(component)


@each("killed for memory (its limit)", "engine", "router")
def test_killed_for_memory(row: Row, release: Release, component: str) -> None:
    release.settled()
    with row.client(release):
        pod = release.pods(component)[0]
        with pytest.raises(ClusterError):
            release.kubectl("exec", *named([pod]), "--", "python", "-c", EATEN)
        assert restarted(release, component, pod)["reason"] == "OOMKilled"


@each("given an image that is not there, and the one it had again", "engine", "router")
def test_image_gone(row: Row, release: Release, component: str) -> None:
    release.settled()
    before = copy.deepcopy(release.values)
    with row.client(release):
        gone = with_values(copy.deepcopy(before), **{f"{component}__image__tag": "gone"})
        release.set(CHART, gone, wait=False)
        eventually("a pod waits for its image", lambda: waits_for_image(release, component))
        release.set(CHART, before)
        release.settled(component)


def waits_for_image(release: Release, component: str) -> bool:
    """Whether a pod has been refused its image."""
    statuses = [pod["status"].get("containerStatuses", []) for pod in release.pods(component)]
    reasons = [status["state"].get("waiting", {}).get("reason") for each in statuses for status in each]
    return any(reason in ("ErrImagePull", "ImagePullBackOff") for reason in reasons)
