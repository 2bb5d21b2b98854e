"""Starting and ending: probes, the time that a pod has to end, disruption budgets, replicas and updates."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kube.helm import Release
from tests.kube.manifests import Pod, components, matches, name, pods

MARGIN = 10
"""Seconds between the end of a drain and the end of its pod, at the least."""
LONG_START = 600
"""Seconds that an engine may take to load its model, at the least."""
LONG_SILENCE, LATE_ANSWER = 60, 10
"""Seconds before a process counts as hung, and that an answer of a machine that is short of processors may take."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def probes_mean_three_things(release: Release) -> Iterator[str]:
    """A pod that serves has all three, readiness asks something else than liveness, and their ports are there."""
    for pod in components(release, "router", "engine", "redis"):
        container = pod.containers[0]
        if missing := [probe for probe in PROBES if probe not in container]:
            yield f"{pod.name} has no {', '.join(missing)}"
            continue
        questions = [_question(container[probe]) for probe in PROBES]
        if questions[1] == questions[2]:
            yield f"{pod.name}: readiness and liveness ask the same"
        if questions[0] == questions[2] and pod.component == "engine":
            yield f"{pod.name}: startup asks no more than liveness"
        for probe in PROBES:
            if (port := _port(container[probe])) is not None and port not in {*pod.ports, *pod.ports.values()}:
                yield f"{pod.name}: {probe} asks port {port}, which nothing listens on"


def _question(probe: Mapping[str, Any]) -> Any:
    return probe.get("httpGet") or probe.get("exec") or probe.get("grpc") or probe.get("tcpSocket")


def _port(probe: Mapping[str, Any]) -> Any:
    return (probe.get("httpGet") or probe.get("grpc") or probe.get("tcpSocket") or {}).get("port")


def engines_may_take_long_to_start(release: Release) -> Iterator[str]:
    """Loading a model is no reason to be killed."""
    for pod in components(release, "engine"):
        probe = pod.containers[0].get("startupProbe", {})
        budget = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if budget < LONG_START:
            yield f"{pod.name} has {budget} s to start"


def a_late_answer_restarts_no_pod(release: Release) -> Iterator[str]:
    """A machine that is short of processors answers late, and a restart costs more than an answer."""
    for pod in components(release, "router", "engine"):
        probe = pod.containers[0].get("livenessProbe", {})
        patience = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if patience < LONG_SILENCE or probe.get("timeoutSeconds", 1) < LATE_ANSWER:
            yield f"{pod.name} is restarted after {patience} s of answers that take {probe.get('timeoutSeconds', 1)} s"


def pods_end_after_their_drain(release: Release) -> Iterator[str]:
    """The time to end is that of the delay, of the drain that the process is told, and of a margin."""
    for pod in components(release, "router", "engine"):
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        drain = setting(pod, "shutdown-timeout")
        if drain is None:
            yield f"{pod.name} is not told how long to drain"
        elif grace < delay(pod) + float(drain) + MARGIN:
            yield f"{pod.name} has {grace} s for a delay of {delay(pod)} s and a drain of {drain} s"
        if not delay(pod):
            yield f"{pod.name} ends before the others know"


def delay(pod: Pod) -> float:
    """Seconds for which a pod that is told to end goes on as before: those of its preStop, and those of the process."""
    return _pre_stop(pod) + float(setting(pod, "shutdown-delay") or 0)


def _pre_stop(pod: Pod) -> float:
    hook = pod.containers[0].get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    words = " ".join(hook.get("exec", {}).get("command", []))
    match = re.search(r"sleep\W+([0-9.]+)", words)
    return float(match[1]) if match else 0.0


def setting(pod: Pod, flag: str) -> str | None:
    """What a pod's first container gives as ``--flag``, or as the variable of that name."""
    container = pod.containers[0]
    arguments = [*container.get("command", []), *container.get("args", [])]
    for position, argument in enumerate(arguments):
        if argument.startswith(f"--{flag}="):
            return str(argument.partition("=")[2])
        if argument == f"--{flag}" and position + 1 < len(arguments):
            return str(arguments[position + 1])
    ending = flag.replace("-", "_").upper()
    values = [entry.get("value") for entry in container.get("env", []) if entry["name"].endswith(f"_{ending}")]
    return values[0] if values else None


def budgets_protect_and_let_go(release: Release) -> Iterator[str]:
    """Every budget is that of one workload, keeps at least one pod where there are several, and lets one be evicted."""
    for budget in release.of("PodDisruptionBudget"):
        spec = budget["spec"]
        covered = [pod for pod in pods(release) if matches(spec["selector"], pod.labels)]
        if len(covered) != 1:
            yield f"{name(budget)} covers {[pod.name for pod in covered]}"
            continue
        if ("minAvailable" in spec) == ("maxUnavailable" in spec):
            yield f"{name(budget)} says both or neither of minAvailable and maxUnavailable"
        if spec.get("minAvailable") in (0, "0%") or spec.get("maxUnavailable") == "100%":
            yield f"{name(budget)} protects nothing"
        replicas = covered[0].owner["spec"].get("replicas")
        if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable") in (replicas or -1, "100%"):
            yield f"{name(budget)} lets no node be emptied"


def several_replicas_have_a_budget(release: Release) -> Iterator[str]:
    """Where there are several pods of a component, they are not all evicted at once, nor all on one node."""
    budgets = release.of("PodDisruptionBudget")
    for pod in components(release, "router", "engine"):
        if pod.owner["spec"].get("replicas", 2) < 2:
            continue
        if not any(matches(budget["spec"]["selector"], pod.labels) for budget in budgets):
            yield f"{pod.name} has no disruption budget"
        constraints = pod.spec.get("topologySpreadConstraints", [])
        if not any(matches(constraint.get("labelSelector"), pod.labels) for constraint in constraints):
            yield f"{pod.name} is not spread"


def one_owner_of_replicas(release: Release) -> Iterator[str]:
    """Where something scales a workload, the chart leaves the number alone: an upgrade would set it back."""
    kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet")
    workloads = {(item["kind"], item["metadata"]["name"]): item for item in release.of(*kinds)}
    scaled: set[tuple[str, str]] = set()
    for scaler in release.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        key = (target.get("kind", "Deployment"), target["name"])
        if key not in workloads:
            yield f"{name(scaler)} scales {key}, which is not there"
        elif "replicas" in workloads[key]["spec"]:
            yield f"{name(scaler)} and the chart both set the replicas of {key[1]}"
        if key in scaled:
            yield f"{key[1]} is scaled twice"
        scaled.add(key)


def updates_take_nothing_away(release: Release) -> Iterator[str]:
    """A router is replaced by a ready one, never ended before."""
    for pod in components(release, "router"):
        strategy = pod.owner["spec"].get("strategy", {}).get("rollingUpdate", {})
        if strategy.get("maxUnavailable") not in (0, "0%"):
            yield f"{pod.name} may be ended before another is ready"
