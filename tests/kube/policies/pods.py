"""Pods: images that stay what they are, resources, and as few rights on the node as can be."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kube.helm import Release
from tests.kube.manifests import Pod, pods

FLOATING = {"latest", "main", "master", "nightly", "edge", "stable", "dev", "head", "canary"}
VERSION = re.compile(r"v?[0-9]+\.[0-9]+(\.[0-9]+)?([-.][A-Za-z0-9_.-]+)?")
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
"""The kinds that Kubernetes' restricted standard allows."""
UNITS = {"": 1.0, "m": 0.001, **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)}}
UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}
HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")


def images_do_not_float(release: Release) -> Iterator[str]:
    """Every image has a digest, or a tag that is a version."""
    for pod in pods(release):
        images = [container["image"] for container in pod.all_containers]
        images += [volume["image"]["reference"] for volume in pod.volumes if "image" in volume]
        for image in images:
            if not _pinned(image):
                yield f"{pod.name}: {image} is no fixed version"


def _pinned(image: str) -> bool:
    if re.search(r"@sha256:[0-9a-f]{64}$", image):
        return True
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag not in FLOATING and VERSION.fullmatch(tag) is not None


def resources_are_set(release: Release) -> Iterator[str]:
    """Every container says what it needs, and at most how much memory it takes."""
    for pod in pods(release):
        for container in pod.all_containers:
            resources = container.get("resources", {})
            missing = [f"requests.{name}" for name in ("cpu", "memory") if name not in resources.get("requests", {})]
            missing += [] if "memory" in resources.get("limits", {}) else ["limits.memory"]
            if missing:
                yield f"{pod.name}: {container['name']} has no {', '.join(missing)}"


def last_words_are_kept(release: Release) -> Iterator[str]:
    """What a container logged last before it failed is in its pod's status, where ``kubectl describe`` shows it."""
    for pod in pods(release):
        for container in pod.all_containers:
            if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
                yield f"{pod.name}: {container['name']} fails without a word"


def nothing_runs_as_root(release: Release) -> Iterator[str]:
    """A numeric user that is not 0, which the kubelet can check whatever the image says."""
    for pod in pods(release):
        for container in pod.all_containers:
            context = _context(pod, container)
            if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
                yield f"{pod.name}: {container['name']} may run as root"


def containers_have_no_rights(release: Release) -> Iterator[str]:
    """What Kubernetes' restricted standard asks for, and a root file system that cannot be written."""
    for pod in pods(release):
        for container in pod.all_containers:
            context = _context(pod, container)
            for problem in _rights(context):
                yield f"{pod.name}: {container['name']} {problem}"


def _rights(context: Mapping[str, Any]) -> Iterator[str]:
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may gain privileges"
    if context.get("capabilities", {}) != {"drop": ["ALL"]}:
        yield "keeps capabilities"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "may write its root file system"


def _context(pod: Pod, container: Mapping[str, Any]) -> dict[str, Any]:
    return {**pod.spec.get("securityContext", {}), **container.get("securityContext", {})}


def pods_share_nothing_with_the_node(release: Release) -> Iterator[str]:
    """None of the node's namespaces and ports, and no volume, such as its folders, that the standard does not allow."""
    for pod in pods(release):
        for name in HOST_NAMESPACES:
            if pod.spec.get(name):
                yield f"{pod.name}: {name}"
        for volume in pod.volumes:
            if foreign := volume.keys() - VOLUMES - {"name"}:
                yield f"{pod.name}: volume {volume['name']} is a {', '.join(foreign)}"
        for container in pod.all_containers:
            if any("hostPort" in port for port in container.get("ports", [])):
                yield f"{pod.name}: {container['name']} takes a port of the node"


def temporary_folders_are_bounded(release: Release) -> Iterator[str]:
    """A folder that is lost with its pod has a size, so that it cannot fill the node's disk."""
    for pod in pods(release):
        for volume in pod.volumes:
            if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
                yield f"{pod.name}: volume {volume['name']} has no sizeLimit"


def disk_is_requested(release: Release) -> Iterator[str]:
    """A pod that may write to its node's disk requests the size of its folders there. A model's folder has a bound that
    is above the size of most models, so that any request will do.
    """
    for pod in pods(release):
        folders = {
            volume["name"]: volume["emptyDir"].get("sizeLimit", 0)
            for volume in pod.volumes
            if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
        }
        writes = bool(folders) or any(not _context(pod, each).get("readOnlyRootFilesystem") for each in pod.containers)
        least = sum(number(size) for name, size in folders.items() if not name.startswith("model-"))
        requested = _requested_disk(pod)
        if writes and (not requested or requested < least):
            yield f"{pod.name} requests {requested:.0f} bytes of its node's disk, and may write {least:.0f}"


def _requested_disk(pod: Pod) -> float:
    """Bytes; where only a limit is given, Kubernetes takes it as the request."""
    resources = [each.get("resources", {}) for each in pod.containers]
    asked = [{**each.get("limits", {}), **each.get("requests", {})} for each in resources]
    return sum(number(each.get("ephemeral-storage", 0)) for each in asked)


def number(quantity: str | float) -> float:
    """A quantity of Kubernetes as a number: bytes, processors."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert match is not None, quantity
    return float(match[1]) * UNITS[match[2]]


def mounts_and_volumes_agree(release: Release) -> Iterator[str]:
    """Every mount has its volume, and every volume is mounted somewhere."""
    for pod in pods(release):
        there = {volume["name"] for volume in pod.volumes}
        there |= {claim["metadata"]["name"] for claim in pod.owner.get("spec", {}).get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for container in pod.all_containers for mount in container.get("volumeMounts", [])}
        for volume in sorted(there ^ mounted):
            yield f"{pod.name}: {volume} is {'never mounted' if volume in there else 'no volume'}"


def variables_are_there_once(release: Release) -> Iterator[str]:
    """Kubernetes refuses to apply a container that has one twice."""
    for pod in pods(release):
        for container in pod.all_containers:
            names = [entry["name"] for entry in container.get("env", [])]
            for twice in sorted({name for name in names if names.count(name) > 1}):
                yield f"{pod.name}: {container['name']} has {twice} twice"


def only_the_router_speaks_to_kubernetes(release: Release) -> Iterator[str]:
    """Each pod has an account of the release's own, and only a router that needs it gets a token."""
    accounts = {manifest["metadata"]["name"]: manifest for manifest in release.of("ServiceAccount")}
    for pod in pods(release):
        account = pod.spec.get("serviceAccountName", "default")
        if account not in accounts:
            yield f"{pod.name}: {account} is no account of the release"
        elif pod.component != "router" and _gets_token(pod, accounts[account]):
            yield f"{pod.name} gets a token"


def _gets_token(pod: Pod, account: Mapping[str, Any]) -> bool:
    return bool(pod.spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)))
