"""What refers to what: selectors, ports, names, and labels that stay the same over upgrades."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kube.helm import Manifest, Release
from tests.kube.manifests import WORKLOADS, Pod, matches, name, pods

STABLE = {
    "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component", "quire.dev/model",
}  # fmt: skip
OWN = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
)
LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
PATTERNS = {
    "Service": re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"),
    **dict.fromkeys(("Deployment", "StatefulSet", "Job", "Pod"), DNS_LABEL),
}
"""Names of kinds that may not be any DNS name."""
KEDA_PARAMETERS = {"caCert", "tlsClientCert", "tlsClientKey"}
REFERENCES = {
    "secretKeyRef": "Secret", "secretRef": "Secret", "configMapKeyRef": "ConfigMap", "configMapRef": "ConfigMap",
}  # fmt: skip
ROLE_KINDS = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "APIService"}
"""Kinds whose names may have more than a DNS name has."""


def selectors_never_change(release: Release) -> Iterator[str]:
    """A selector holds only labels that no upgrade changes, and picks its own pods and no other workload's."""
    for workload in release.of("Deployment", "StatefulSet", "DaemonSet"):
        selector = workload["spec"]["selector"]
        unstable = set(selector.get("matchLabels", {})) - STABLE
        if unstable:
            yield f"{name(workload)} selects by {', '.join(sorted(unstable))}"
        picked = [pod.name for pod in pods(release) if matches(selector, pod.labels)]
        if picked != [name(workload)]:
            yield f"{name(workload)} selects {picked}"


def services_reach_their_pods(release: Release) -> Iterator[str]:
    """A Service selects pods that run all the time, and its ports are theirs."""
    for service in release.of("Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        picked = [pod for pod in pods(release) if matches(selector, pod.labels)]
        if not picked or any(pod.owner["kind"] in ("Job", "Pod") for pod in picked):
            yield f"{name(service)} selects {[pod.name for pod in picked]}"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if any(target not in {*pod.ports, *pod.ports.values()} for pod in picked):
                yield f"{name(service)} leads to port {target}, which is not there"


def routes_lead_to_services(release: Release) -> Iterator[str]:
    """The backends of routes and of an Ingress, and what serves an API, are Services of the release and their ports."""
    for manifest in release.of("HTTPRoute", "GRPCRoute", "Ingress", "APIService"):
        for service, port in _backends(manifest["spec"]):
            if (service, port) not in _service_ports(release):
                yield f"{name(manifest)} leads to {service}:{port}, which is not there"


def _backends(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, list):
        for entry in part:
            yield from _backends(entry)
    elif isinstance(part, dict):
        for backend in part.get("backendRefs", []):
            yield backend["name"], backend["port"]
        if isinstance(service := part.get("service"), dict):
            port = service["port"]
            yield service["name"], port if isinstance(port, int) else port.get("number", port.get("name"))
        for key, entry in part.items():
            if key not in ("backendRefs", "service"):
                yield from _backends(entry)


def _service_ports(release: Release) -> set[tuple[str, Any]]:
    return {
        (service["metadata"]["name"], port[key])
        for service in release.of("Service")
        for port in service["spec"]["ports"]
        for key in ("port", "name")
        if key in port
    }


def monitors_find_what_they_watch(release: Release) -> Iterator[str]:
    """A ServiceMonitor finds a Service with that port, a PodMonitor pods with it."""
    for monitor in release.of("ServiceMonitor"):
        found = [
            service
            for service in release.of("Service")
            if matches(monitor["spec"]["selector"], service["metadata"].get("labels", {}))
        ]
        ports = [{port.get("name") for port in service["spec"]["ports"]} for service in found]
        for endpoint in monitor["spec"]["endpoints"]:
            serving = [names for names in ports if endpoint["port"] in names]
            if len(serving) != 1:
                yield f"{name(monitor)} finds {len(serving)} Services with port {endpoint['port']}"
    for monitor in release.of("PodMonitor"):
        picked = [pod for pod in pods(release) if matches(monitor["spec"]["selector"], pod.labels)]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if not picked or any(endpoint["port"] not in pod.ports for pod in picked):
                yield f"{name(monitor)} finds no port {endpoint['port']}"


def autoscalers_speak_tls_where_others_do(release: Release) -> Iterator[str]:
    """Where routers show KEDA a certificate, KEDA checks it and shows its own; else neither does."""
    known = {item["metadata"]["name"]: item["spec"]["secretTargetRef"] for item in release.of("TriggerAuthentication")}
    variables = {entry["name"] for pod in pods(release) for entry in pod.containers[0].get("env", [])}
    encrypted, others = "QUIRE_ROUTER_KEDA_CLIENT_CA" in variables, "QUIRE_ENGINE_TLS_CERT" in variables
    for scaled in release.of("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            parameters = {entry["parameter"] for entry in known.get(_authentication(trigger), [])}
            if encrypted and (parameters != KEDA_PARAMETERS or trigger["metadata"].get("enableTLS") != "true"):
                yield f"{name(scaled)} asks in plain text, or whoever answers"
            if encrypted != others or "unsafeSsl" in trigger["metadata"]:
                yield f"{name(scaled)} is answered in plain text, or by anybody"


def _authentication(trigger: Mapping[str, Any]) -> str:
    return str(trigger.get("authenticationRef", {}).get("name"))


def what_pods_mount_is_there(release: Release) -> Iterator[str]:
    """A Secret or ConfigMap that a pod needs is one of the release, or named in the values."""
    there = {(item["kind"], item["metadata"]["name"]) for item in release.of("Secret", "ConfigMap")}
    there |= {("Secret", item["spec"]["secretName"]) for item in release.of("Certificate")}
    given = set(_texts(release.values))
    for authentication in release.of("TriggerAuthentication"):
        for entry in authentication["spec"]["secretTargetRef"]:
            if ("Secret", entry["name"]) not in there and entry["name"] not in given:
                yield f"{name(authentication)} needs Secret/{entry['name']}, which is not there"
    for pod in pods(release):
        for kind, wanted in sorted(set(_needs(pod))):
            if (kind, wanted) not in there and wanted not in given:
                yield f"{pod.name} needs {kind}/{wanted}, which is not there"


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for entry in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else []:
        yield from _texts(entry)


def _needs(pod: Pod) -> Iterator[tuple[str, str]]:
    for volume in pod.volumes:
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            if secret := source.get("secret"):
                yield "Secret", secret.get("secretName") or secret["name"]
            if config := source.get("configMap"):
                yield "ConfigMap", config["name"]
    for container in pod.all_containers:
        sources = [entry.get("valueFrom", {}) for entry in container.get("env", [])]
        for source in [*sources, *container.get("envFrom", [])]:
            for key, reference in source.items():
                if key in REFERENCES:
                    yield REFERENCES[key], reference["name"]


def every_object_says_whose_it_is(release: Release) -> Iterator[str]:
    """The recommended labels, and the release's namespace."""
    for manifest in release.everything:
        labels = manifest["metadata"].get("labels", {})
        if missing := [label for label in OWN if label not in labels]:
            yield f"{name(manifest)} has no label {', '.join(missing)}"
        foreign = manifest["metadata"].get("namespace", release.namespace) != release.namespace
        if foreign and manifest["kind"] != "RoleBinding":
            yield f"{name(manifest)} is in another namespace"


def names_fit(release: Release) -> Iterator[str]:
    """Names and labels are as long as Kubernetes lets them be, and of its letters; a port's name too."""
    seen = set()
    for manifest in release.everything:
        own = manifest["metadata"]["name"]
        pattern = PATTERNS.get(manifest["kind"], DNS_NAME)
        if manifest["kind"] not in ROLE_KINDS and not pattern.fullmatch(own):
            yield f"{name(manifest)} is not a name"
        if (key := (manifest["kind"], manifest["metadata"].get("namespace"), own)) in seen:
            yield f"{name(manifest)} is there twice"
        seen.add(key)
        yield from _labels(manifest, manifest["metadata"].get("labels", {}))
    for pod in pods(release):
        yield from _labels(pod.owner, pod.labels)
        for port in pod.ports:
            if len(port) > 15:
                yield f"{pod.name}: port name {port} is too long"


def _labels(manifest: Manifest, labels: Mapping[str, Any]) -> Iterator[str]:
    for label, value in labels.items():
        if not isinstance(value, str) or not LABEL.fullmatch(value):
            yield f"{name(manifest)}: {value!r} cannot be the label {label}"


def keys_are_text(release: Release) -> Iterator[str]:
    """No key is one that YAML 1.1 takes for something else, such as n, y, on or 08."""
    for manifest in release.everything:
        for key in _keys(manifest):
            if not isinstance(key, str):
                yield f"{name(manifest)} has the key {key!r}"


def _keys(part: Any) -> Iterator[Any]:
    if isinstance(part, dict):
        yield from part
    for entry in part.values() if isinstance(part, dict) else part if isinstance(part, list) else []:
        yield from _keys(entry)


def changed_configuration_restarts_pods(release: Release) -> Iterator[str]:
    """A pod that reads a ConfigMap of the release has its hash in an annotation, so that a change reaches it; unless it
    reads the file again by itself, as routers do with that of targets.
    """
    names = [item["metadata"]["name"] for item in release.of("ConfigMap")]
    ours = {("ConfigMap", name) for name in names if not name.endswith("-targets")}
    for pod in pods(release):
        reads = pod.owner["kind"] in WORKLOADS[:3] and ours & set(_needs(pod))
        if reads and not any(key.startswith("checksum/") for key in pod.annotations):
            yield f"{pod.name} goes on with an old configuration"
