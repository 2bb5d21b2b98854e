"""How policies look at manifests: pods wherever they are written down, and who selects whom."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.kube.helm import Manifest, Release

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")


@dataclass(frozen=True)
class Pod:
    """A pod as a manifest describes it; ``owner`` is that manifest."""

    owner: Manifest
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """How a message calls it."""
        return name(self.owner)

    @property
    def component(self) -> str:
        """What it is of Quire: router, engine, redis, or something else."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def containers(self) -> list[Manifest]:
        """The containers that run while the pod does."""
        return list(self.spec.get("containers", []))

    @property
    def all_containers(self) -> list[Manifest]:
        """The containers, those of the start included."""
        return [*self.spec.get("initContainers", []), *self.containers]

    @property
    def ports(self) -> dict[str, int]:
        """The ports of its containers by their names."""
        return {
            port["name"]: port["containerPort"]
            for container in self.all_containers
            for port in container.get("ports", [])
        }

    @property
    def volumes(self) -> list[Manifest]:
        """Its volumes."""
        return list(self.spec.get("volumes", []))


def name(manifest: Manifest) -> str:
    """``Kind/name``."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def pods(release: Release) -> Iterator[Pod]:
    """Every pod of the release, those of jobs and hooks included."""
    for manifest in release.everything:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Pod":
            yield _pod(manifest, manifest)
        elif manifest["kind"] in WORKLOADS:
            yield _pod(manifest, spec["template"])
        elif manifest["kind"] == "LeaderWorkerSet":
            # Its controller numbers the pods of a group; all are alike but for that.
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
            first = _pod(manifest, template)
            yield replace(first, labels={**first.labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"})
        elif manifest["kind"] == "CronJob":
            yield _pod(manifest, spec["jobTemplate"]["spec"]["template"])


def components(release: Release, *wanted: str) -> list[Pod]:
    """The pods of these components that run all the time."""
    return [pod for pod in pods(release) if pod.component in wanted and pod.owner["kind"] not in ("Job", "Pod")]


def _pod(owner: Manifest, template: Manifest) -> Pod:
    metadata = template.get("metadata", {})
    return Pod(owner, metadata.get("labels", {}), metadata.get("annotations", {}), template["spec"])


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of an object picks these labels; None picks nothing, an empty one all."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_fits(expression, labels) for expression in selector.get("matchExpressions", []))


def _fits(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, operator = labels.get(expression["key"]), expression["operator"]
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    return (value in expression["values"]) == (operator == "In")
