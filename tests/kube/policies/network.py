"""Network policies: everything is denied but what is needed, and what is needed is allowed, from both ends.

Whether a block of addresses covers pods differs between networks. What must be closed is asked as if it did (``blocks``
is true), what must be open as if it did not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from tests.kube.helm import Manifest, Release
from tests.kube.manifests import Pod, components, matches, name, pods

Rule = Mapping[str, Any]
PUBLIC = {("router", "http"), ("router", "grpc")}
"""Ports that clients anywhere may reach."""
EPHEMERAL = (32768, 60999)
"""The ports that the kernel gives out, by default: those of gloo and NCCL between the nodes of an engine."""


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod of this or another namespace, or an address outside of the cluster."""

    labels: Mapping[str, str] | None = None
    namespace: str = "default"
    address: str = ""

    @property
    def namespace_labels(self) -> dict[str, str]:
        """The label that every namespace has."""
        return {"kubernetes.io/metadata.name": self.namespace}


ANYWHERE = End()
STRANGER = End({"app": "stranger"})
DNS = End({"k8s-app": "kube-dns"}, "kube-system")
CLIENTS = (End({"app": "gateway"}, "gateways"), End(address="192.168.0.9"))
"""A gateway in the cluster, and a load balancer with an address: an example opens the routers to one of them."""
PROMETHEUS = End({"app": "prometheus"}, "monitoring")
URL = re.compile(r"(?:redis|rediss|http|https)://(?:[^@/]*@)?([A-Za-z0-9.-]+):([0-9]+)")


def everything_is_denied_first(release: Release) -> Iterator[str]:
    """Policies of both directions apply to every pod."""
    for pod in pods(release):
        for direction in ("Ingress", "Egress"):
            if not _applying(release, pod.labels, direction):
                yield f"{direction} of {pod.name} is open"


def only_the_api_is_open_to_all(release: Release) -> Iterator[str]:
    """What strangers reach is the routers' API, and nothing else."""
    for pod in components(release, "router", "engine", "redis"):
        for port, number in pod.ports.items():
            if (pod.component, port) in PUBLIC:
                continue
            for who, end in (("a pod", STRANGER), ("the world", ANYWHERE)):
                if accepts(release, pod, end, number, blocks=True) and not _for_the_api_server(pod, port):
                    yield f"{who} reaches {port} of {pod.name}"


def _for_the_api_server(pod: Pod, port: str) -> bool:
    """The API server is no pod and has no address that a chart can know; the port asks for its certificate instead."""
    return (pod.component, port) == ("router", "scaling")


def needed_paths_are_open(release: Release) -> Iterator[str]:
    """Routers reach engines, Redis, DNS and what finds engines; whoever calls them reaches them."""
    for router in components(release, "router"):
        for engine in components(release, "engine"):
            yield from _path(release, router, engine, engine.ports["grpc"])
        for redis in components(release, "redis"):
            yield from _path(release, router, redis, next(iter(redis.ports.values())))
        for port in _offered(release, router):
            if not any(accepts(release, router, each, router.ports[port]) for each in CLIENTS):
                yield f"clients cannot reach {port} of {router.name}"
            for test in (pod for pod in pods(release) if _is_test(pod)):
                yield from _path(release, test, router, router.ports[port])
    for pod in components(release, "router", "engine"):
        yield from _surroundings(release, pod)
        yield from _nodes(release, pod)


def _offered(release: Release, router: Pod) -> Iterator[str]:
    """The ports of the Service that clients use: always that of REST."""
    yield "http"
    for service in release.of("Service"):
        if matches({"matchLabels": service["spec"]["selector"]}, router.labels):
            yield from (port["targetPort"] for port in service["spec"]["ports"] if port["targetPort"] == "grpc")


def _nodes(release: Release, pod: Pod) -> Iterator[str]:
    """An engine's nodes reach each other where they join, and where gloo and NCCL listen."""
    for port in (pod.ports["nodes"], *EPHEMERAL) if "nodes" in pod.ports else ():
        yield from _path(release, pod, pod, port)


def _surroundings(release: Release, pod: Pod) -> Iterator[str]:
    """What is no part of the release: DNS, Prometheus, the API server, models, the collector, another Redis."""
    if not opens(release, pod, DNS, 53, "UDP") or not opens(release, pod, DNS, 53):
        yield f"{pod.name} cannot ask DNS"
    if not accepts(release, pod, PROMETHEUS, pod.ports["metrics"]):
        yield f"{pod.name}'s metrics cannot be read"
    if pod.spec.get("automountServiceAccountToken"):
        for port in (443, 6443):
            if not opens(release, pod, ANYWHERE, port):
                yield f"{pod.name} cannot ask the API server on port {port}"
    if pod.spec.get("initContainers") and not opens(release, pod, ANYWHERE, 443):
        yield f"{pod.name} cannot download its model"
    for host, port in _foreign_hosts(release, pod):
        end = End({"app": "x"}, host.split(".")[1]) if host.endswith(".svc") else ANYWHERE
        if not opens(release, pod, end, port):
            yield f"{pod.name} cannot reach {host}:{port}"


def _foreign_hosts(release: Release, pod: Pod) -> Iterator[tuple[str, int]]:
    """Hosts in URLs of the pod's variables that are no Services of the release."""
    services = {service["metadata"]["name"] for service in release.of("Service")}
    for entry in pod.containers[0].get("env", []):
        for host, port in URL.findall(entry.get("value", "")):
            if host.split(".")[0] not in services:
                yield host, int(port)


def _is_test(pod: Pod) -> bool:
    return "test" in pod.owner["metadata"].get("annotations", {}).get("helm.sh/hook", "")


def redis_and_engines_keep_to_themselves(release: Release) -> Iterator[str]:
    """Redis opens no connection, engines reach neither Redis nor routers, and no engine reaches another but where the
    nodes of one model's join each other.
    """
    ends = components(release, "router", "engine", "redis")
    allowed = {("router", "engine"), ("router", "redis"), ("router", "router")}
    for source in ends:
        for target in ends:
            if (source.component, target.component) in allowed:
                continue
            for port, number in target.ports.items():
                if (target.component, port) in PUBLIC and source.component != "redis":
                    continue
                if port == "nodes" and source.owner is target.owner:
                    continue
                if _connects(release, source, target, number):
                    yield f"{source.name} reaches {port} of {target.name}"
    for pod in components(release, "redis"):
        if any(opens(release, pod, end, port, blocks=True) for end in (ANYWHERE, STRANGER) for port in (80, 443)):
            yield f"{pod.name} may open connections"


def policies_name_ports_that_are_there(release: Release) -> Iterator[str]:
    """Every policy picks pods, and a port that it lets in is one that they listen on, or of those that the kernel gives
    to an engine's nodes.
    """
    for policy in release.of("NetworkPolicy"):
        picked = [pod for pod in pods(release) if matches(policy["spec"]["podSelector"], pod.labels)]
        if not picked:
            yield f"{name(policy)} picks no pod"
        for rule in policy["spec"].get("ingress", []):
            for entry in rule.get("ports", []):
                if (entry["port"], entry.get("endPort")) == EPHEMERAL and all("nodes" in pod.ports for pod in picked):
                    continue
                if not any(entry["port"] in {*pod.ports, *pod.ports.values()} for pod in picked):
                    yield f"{name(policy)} lets port {entry['port']} in, which nothing listens on"


def _path(release: Release, source: Pod, target: Pod, port: int) -> Iterator[str]:
    if not opens(release, source, End(target.labels), port, target=target):
        yield f"{source.name} may not open port {port} of {target.name}"
    if not accepts(release, target, End(source.labels), port):
        yield f"{target.name} does not accept {source.name} on port {port}"


def _connects(release: Release, source: Pod, target: Pod, port: int) -> bool:
    return opens(release, source, End(target.labels), port, target=target, blocks=True) and accepts(
        release, target, End(source.labels), port, blocks=True
    )


def accepts(release: Release, pod: Pod, source: End, port: int, *, blocks: bool = False) -> bool:
    """Whether ``pod`` accepts a connection from ``source``."""
    policies = _applying(release, pod.labels, "Ingress")
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    return not policies or any(
        _peers(rule.get("from"), source, blocks) and _ports(rule.get("ports"), port, "TCP", pod.ports) for rule in rules
    )


def opens(
    release: Release,
    pod: Pod,
    end: End,
    port: int,
    protocol: str = "TCP",
    *,
    target: Pod | None = None,
    blocks: bool = False,
) -> bool:
    """Whether ``pod`` may open a connection to ``end``, whose named ports are ``target``'s."""
    policies = _applying(release, pod.labels, "Egress")
    rules = [rule for policy in policies for rule in policy["spec"].get("egress", [])]
    names = target.ports if target else {}
    return not policies or any(
        _peers(rule.get("to"), end, blocks) and _ports(rule.get("ports"), port, protocol, names) for rule in rules
    )


def _applying(release: Release, labels: Mapping[str, str], direction: str) -> list[Manifest]:
    return [
        policy
        for policy in release.of("NetworkPolicy")
        if direction in policy["spec"].get("policyTypes", ["Ingress"])
        and matches(policy["spec"]["podSelector"], labels)
    ]


def _ports(entries: Sequence[Rule] | None, port: int, protocol: str, names: Mapping[str, int]) -> bool:
    if not entries:
        return True
    for entry in entries:
        first = entry.get("port", port)
        first = names.get(first) if isinstance(first, str) else first
        known = first is not None and entry.get("protocol", "TCP") == protocol
        if known and first <= port <= entry.get("endPort", first):
            return True
    return False


def _peers(entries: Sequence[Rule] | None, end: End, blocks: bool) -> bool:
    return not entries or any(_peer(entry, end, blocks) for entry in entries)


def _peer(entry: Rule, end: End, blocks: bool) -> bool:
    if "ipBlock" in entry:
        if end.address and ip_address(end.address) in ip_network(entry["ipBlock"]["cidr"]):
            return True
        return entry["ipBlock"]["cidr"] == "0.0.0.0/0" and (blocks or end.labels is None)
    if end.labels is None:
        return False
    if "namespaceSelector" in entry:
        if not matches(entry["namespaceSelector"], end.namespace_labels):
            return False
    elif end.namespace != "default":
        return False
    return matches(entry.get("podSelector", {}), end.labels)
